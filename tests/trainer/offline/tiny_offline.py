"""A tiny run from files for the tests of this folder: rows, spec, model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_like.metrics import read_jsonl
from trainer.offline.loop import OfflineTraining
from trainer.offline.spec import OfflineSpec

INIT: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 48,
    "tie_word_embeddings": True,
}  # fmt: skip
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_rows(path: Path, rows: Sequence[object]) -> str:
    """A JSONL file; returns its path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def digits(num: int, first: int = 0) -> list[dict[str, str]]:
    """Rows whose completion is the prompt's digit."""
    return [{"prompt": f"{n % 10}+{n // 10}=", "completion": str(n % 10)} for n in range(first, first + num)]


def make_spec(tmp_path: Path, **changes: Any) -> OfflineSpec:
    """Two epochs over ten rows in batches of four: six steps. `changes` replace keys of the spec."""
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    data = changes.pop("data", None) or {
        "train": write_rows(tmp_path / "train.jsonl", digits(10)),
        "eval": write_rows(tmp_path / "eval.jsonl", digits(4, 20)),
    }
    keys: dict[str, Any] = {
        "run_id": "r", "parent_pid": os.getpid(), "seed": 3, "run_dir": str(run_dir), "objective": "sft",
        "model": {"init": INIT, "tokenizer": "characters:running_sum"},
        "data": data, "epochs": 2, "max_steps": None, "batch_size": 4,
        "trainer": {"device": "cpu", "micro_batch_tokens": 24, "checkpoint": {"every_steps": 2},
                    "optimizer": {"lr": 2e-2, "warmup_steps": 1}},
        "eval": {"at_start": True},
    }  # fmt: skip
    return OfflineSpec.model_validate({**keys, **changes})


def rows_of_kind(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl."""
    return [row for row in read_jsonl(run_dir / "metrics.jsonl") if row["kind"] == kind]


def run_until(spec: OfflineSpec, step: int) -> None:
    """A part of the run: stopped after `step`."""
    training = OfflineTraining(spec, lambda: training.version >= step)
    training.run()
    assert training.version == step
