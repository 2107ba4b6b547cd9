"""A config without contradictions, for tests that change a key or two."""

from __future__ import annotations

from typing import Any

from controller.config.run_config import RunConfig

QWEN = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}

SMALL = ["data.train.limit=20", "data.eval.limit=4", "warm_start=null", "metrics.display=plain"]
"""Overrides that make the quickstart start at once."""


def config_of(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config without contradictions, with some keys changed: {"a.b": value}."""
    data: dict[str, Any] = {
        "model": {"init": {**QWEN, "max_position_embeddings": 4096}, "tokenizer": "bytes"},
        "data": {"train": {"generator": "running_sum", "limit": 50}, "eval": {"generator": "running_sum", "limit": 5}},
    }
    for path, value in (changes or {}).items():
        section = data
        *parents, leaf = path.split(".")
        for part in parents:
            section = section.setdefault(part, {})
        section[leaf] = value
    return data


def make(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(config_of({key.replace("__", "."): value for key, value in changes.items()}))
