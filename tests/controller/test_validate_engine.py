"""Claims about the settings of the rollout engine, and about an environment of SGLang's that is not as it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller import preflight
from controller.config import RunConfig
from controller.validate import cross_check


def make(engine: dict[str, Any], **rollout: Any) -> RunConfig:
    qwen = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    return RunConfig.model_validate(
        {
            "model": {"init": qwen, "tokenizer": "bytes"},
            "data": {"train": {"generator": "running_sum", "limit": 50}},
            "eval": {"every_steps": 0},
            "rollout": {"engine": engine, **rollout},
        }
    )


def said(config: RunConfig) -> str:
    return "; ".join(map(str, cross_check(config)))


def environment(root: Path, version: str) -> Path:
    """An interpreter that says which SGLang it has, and knows one argument of its launcher."""
    python = root / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/bin/sh
if [ -n "$3" ]; then
    echo '{{"enable-metrics": {{"takes_value": false, "takes_many": false, "choices": []}}}}' > "$3"
else
    echo '{{"sglang": "{version}", "torch": "2.13.0"}}'
fi
"""
    )
    python.chmod(0o755)
    return python


def test_settings_of_an_engine_that_is_not_used_are_a_mistake() -> None:
    assert "rollout.engine.kind: sglang" in said(make({"sglang": {"tp_size": 2}}))
    assert said(make({"kind": "sglang", "sglang": {"tp_size": 2}})) == ""


def test_every_worker_needs_its_own_server_to_attach_to() -> None:
    one = {"kind": "sglang", "sglang": {"attach": ["http://127.0.0.1:30000"]}}
    assert said(make(one)) == ""
    assert "names 1 server for 2 workers" in said(make(one, num_workers=2))
    assert "`30000` is no address" in said(make({"kind": "sglang", "sglang": {"attach": ["30000"]}}))


@pytest.mark.parametrize(
    ("tp_size", "trainer", "devices"),
    [
        (1, "cuda:0", "cuda:1 cuda:2"),
        (2, "cuda:0", "cuda:1 cuda:3"),
        (2, "cuda:3", "cuda:0 cuda:4"),
        (2, "cpu", "cuda:0 cuda:2"),
    ],
)
def test_workers_with_several_gpus_each_leave_out_the_trainers(tp_size: int, trainer: str, devices: str) -> None:
    config = make({"kind": "sglang", "device": "cuda", "sglang": {"tp_size": tp_size}}, num_workers=2)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"device": trainer})})
    assert " ".join(config.rollout_devices) == devices


def test_validate_says_what_is_wrong_with_the_environment(tmp_path: Path) -> None:
    def absent(**engine: Any) -> str:
        found = preflight.look(make({"kind": "sglang", **engine}), "validate")
        assert found.problems == []
        return "; ".join(map(str, found.absent))

    assert "no interpreter" in absent(python=str(tmp_path / "nothing"))
    assert absent(python=str(environment(tmp_path / "good", "0.5.23"))) == ""
    other = absent(python=str(environment(tmp_path / "other", "0.5.9")))
    assert "rollout.engine.python: SGLang 0.5.9 is installed" in other
    assert "0.5.23 is needed" in other


def test_an_argument_that_version_does_not_know_is_a_problem_before_the_launch(tmp_path: Path) -> None:
    python = str(environment(tmp_path / "good", "0.5.23"))
    given = {"kind": "sglang", "python": python, "sglang": {"arguments": {"enable-metric": True}}}
    (problem,) = preflight.look(make(given), "validate").problems
    assert "no argument `enable-metric`" in str(problem)
    assert "did you mean enable-metrics?" in str(problem)
