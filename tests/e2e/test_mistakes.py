"""A user's mistake gets one clear error: what, where, how to fix it. Never a traceback, never silence."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).resolve().parents[2]
WORDS = REPOSITORY / "tests" / "fixtures" / "word_problems.jsonl"

MISTAKES = {
    "unknown key": (["stalenes.max_staleness=2"], ["stalenes", "staleness"]),
    "unknown nested key": (["trainer.optimizer.lrr=1"], ["lrr", "lr"]),
    "wrong type": (["num_steps=many"], ["num_steps", "many"]),
    "negative staleness": (["staleness.max_staleness=-1"], ["max_staleness"]),
    "missing model": (["model.path=/nowhere/model"], ["/nowhere/model"]),
    "missing data": (["data.train.path=/nowhere/rows.jsonl"], ["/nowhere/rows.jsonl"]),
    "std over one sample": (["group_size=1"], ["group_size"]),
    "top_p in training": (["sampling.top_p=0.9"], ["top_p"]),
    "off without behaviour": (["trainer.loss.weight.mode=off"], ["proximal"]),
    "sync with a bound": (["mode=sync", "staleness.max_staleness=4"], ["sync"]),
    "reward that cannot be imported": (["reward.scorers=[{kind: 'no_such_module:f'}]"], ["no_such_module"]),
    "unknown option of a scorer": (["reward.scorers=[{kind: math, options: {gold: x}}]"], ["options.gold"]),
    "scorer without what it needs": (["reward.scorers=[{kind: format}]"], ["checks nothing"]),
    "a group too large for memory": (["group_size=1e11"], ["at most 65,536"]),
    "another system's key": (["actor_rollout_ref.rollout.n=8"], ["group_size"]),
    "unknown scorer": (["reward.scorers=[{kind: maths}]"], ["math"]),
    "folder that cannot be written": (["runs_dir=/proc/here"], ["/proc/here"]),
}


def refused(run, words):
    assert run.wait() == 2, run.output
    assert "Traceback" not in run.output, run.output
    assert "error" in run.output
    for word in words:
        assert word in run.output, run.output


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_clear_error(run_class, quickstart, tmp_path, runs_dir, name):
    overrides, words = MISTAKES[name]
    refused(run_class(["train", quickstart, *overrides], tmp_path, runs_dir), words)


def test_empty_model_folder_is_named(run_class, quickstart, tmp_path, runs_dir):
    (tmp_path / "empty").mkdir()
    refused(run_class(["train", quickstart, f"model.path={tmp_path / 'empty'}"], tmp_path, runs_dir), ["empty"])


def test_empty_data_file_is_named(run_class, quickstart, tmp_path, runs_dir):
    (tmp_path / "rows.jsonl").write_text("")
    refused(
        run_class(["train", quickstart, "data.train.path=rows.jsonl"], tmp_path, runs_dir), ["rows.jsonl", "no rows"]
    )


def test_port_in_use_is_named(run_class, quickstart, tmp_path, runs_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(run_class(["train", quickstart, f"launch.port={port}"], tmp_path, runs_dir), [str(port), "use"])


def test_corrupt_weights_are_named(run_class, tmp_path, runs_dir, quickstart, areal):
    made = areal("sft", quickstart, f"out={tmp_path / 'warm'}", "warm_start.sft.steps=1")
    assert made.wait() == 0, made.output
    weights = tmp_path / "warm" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    run = run_class(
        ["train", quickstart, f"model.path={tmp_path / 'warm'}", f"runs_dir={runs_dir}"], tmp_path, runs_dir
    )
    refused(run, ["model.safetensors"])


def test_prompt_longer_than_the_context_stops_the_run_where_asked(run_class, tmp_path, runs_dir):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": "why? " * 400, "answer": "1"}) for _ in range(40)))
    command = ["train", str(REPOSITORY / "configs" / "gsm8k_tiny.yaml"), "data.eval=null", f"runs_dir={runs_dir}"]
    run = run_class([*command, f"data.train.path={rows}", "data.on_long_prompt=stop"], tmp_path, runs_dir)
    refused(run, ["prompt"])
    run = run_class([*command, f"data.train.path={rows}"], tmp_path, runs_dir)
    assert run.wait() != 0
    assert "Traceback" not in run.output
    assert "prompt" in run.output


def test_raising_reward_function_is_counted_not_fatal_and_not_zero(run_class, areal, quickstart, short, tmp_path):
    (tmp_path / "moody.py").write_text(
        "def score(row, response, **info):\n"
        "    if len(response) % 7 == 0:\n        raise RuntimeError('not today')\n"
        "    return float(len(response) % 2)\n"
    )
    run = areal("train", quickstart, *short, "reward.scorers=[{kind: 'moody:score'}]", "reward.retries=0")
    assert run.wait() == 0, run.output
    assert run.summary["samples_dropped"] > 0
    assert run.summary["audit"] == "clean"


def test_resuming_what_is_not_there_names_the_known_runs(run_class, tmp_path, runs_dir):
    refused(run_class(["resume", "nowhere"], tmp_path, runs_dir), ["nowhere"])
