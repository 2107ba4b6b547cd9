"""Limits of the cross-checks, each at the value that is still right and the first that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from valid_config import make

from controller.config.problems import Problem
from controller.config.validation.run import cross_check, is_loopback, unknown_kinds


def problem(key: str, **changes: Any) -> Problem | None:
    """The problem that begins with this key, if there is one."""
    found = [one for one in cross_check(make(**changes)) if one.keys[0] == key]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rollout__engine": {"kind": "sglnag"}}, "rollout.engine.kind"),
        ({"launch": {"kind": "rya"}}, "launch.kind"),
        ({"trainer__weights": {"kind": "smh"}}, "trainer.weights.kind"),
        ({"trainer__backend": "tocrh"}, "trainer.backend"),
    ],
)
def test_implementation_that_there_is_not_is_all_that_is_said(changes: dict[str, Any], key: str) -> None:
    """The other checks ask it."""
    config = make(**changes, group_size=1)
    (found,) = cross_check(config)
    assert found.keys[0] == key
    assert unknown_kinds(config) == [found]


def test_several_that_there_are_not_are_all_named() -> None:
    config = make(launch={"kind": "rya"}, trainer__backend="tocrh")
    assert [one.keys[0] for one in cross_check(config)] == ["launch.kind", "trainer.backend"]


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("filter_zero_signal", {"group_size": 2, "filter_zero_signal": True},
         {"group_size": 1, "filter_zero_signal": True}),
        ("trainer.mini_batches", {"groups_per_step": 4, "trainer__mini_batches": 4},
         {"groups_per_step": 4, "trainer__mini_batches": 5}),
        ("sampling.top_p", {"sampling__top_p": 1.0}, {"sampling__top_p": 0.99}),
        ("sampling.top_k", {"sampling__top_k": 0}, {"sampling__top_k": 1}),
        ("sampling.max_new_tokens", {"sampling__max_new_tokens": 511, "rollout__engine": {"max_context": 512}},
         {"sampling__max_new_tokens": 512, "rollout__engine": {"max_context": 512}}),
        ("eval.max_new_tokens", {"eval__max_new_tokens": 511, "sampling__max_new_tokens": 9,
                                 "rollout__engine": {"max_context": 512}},
         {"eval__max_new_tokens": 512, "sampling__max_new_tokens": 9, "rollout__engine": {"max_context": 512}}),
        ("trainer.micro_batch_tokens", {"trainer__micro_batch_tokens": 4096, "rollout__engine": {"max_context": 4096}},
         {"trainer__micro_batch_tokens": 4095, "rollout__engine": {"max_context": 4096}}),
        ("launch.silence_s", {"launch__silence_s": 8.0, "launch__heartbeat_s": 2.0},
         {"launch__silence_s": 7.9, "launch__heartbeat_s": 2.0}),
        ("launch.controller_silence_s", {"launch__controller_silence_s": 8.0, "launch__heartbeat_s": 2.0},
         {"launch__controller_silence_s": 7.9, "launch__heartbeat_s": 2.0}),
        ("metrics.tensorboard", {"metrics__tensorboard": "x"}, {"metrics__tensorboard": ""}),
        ("metrics.prometheus.port", {"metrics__prometheus": {"port": 5000}, "launch__port": 5001},
         {"metrics__prometheus": {"port": 5000}, "launch__port": 5000}),
        ("metrics.prometheus.port", {"metrics__prometheus": {"port": 0}, "launch__port": 0},
         {"metrics__prometheus": {"port": 1}, "launch__port": 1}),
        ("eval.every_steps", {"data__eval": None, "eval__every_steps": 0},
         {"data__eval": None, "eval__every_steps": 1}),
        ("staleness.max_staleness", {"mode": "sync", "staleness__max_staleness": 0},
         {"mode": "sync", "staleness__max_staleness": 1}),
        ("staleness.on_stale", {"staleness": {"max_staleness": "unbounded", "on_stale": "keep"}},
         {"staleness": {"max_staleness": "unbounded", "on_stale": "drop"}}),
        ("rollout.interruption", {"mode": "one_step_off", "rollout__interruption": "drain"},
         {"mode": "one_step_off", "rollout__interruption": "recompute"}),
        ("reward.scorers", {"reward__scorers": [{"kind": "math", "weight": 0}, {"kind": "math", "weight": 0.1}]},
         {"reward__scorers": [{"kind": "math", "weight": 0}]}),
        ("trainer.weights.swap", {"trainer__weights": {"swap": "rolling"}, "rollout__interruption": "recompute"},
         {"trainer__weights": {"swap": "rolling"}, "rollout__interruption": "drain"}),
        ("name", {"name": "a"}, {"name": "-a"}),
    ],
)  # fmt: skip
def test_last_value_that_is_right_and_the_first_that_is_wrong(
    key: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    assert problem(key, **good) is None
    found = problem(key, **bad)
    assert found is not None
    assert found.what
    assert found.remedy


@pytest.mark.parametrize(
    ("source", "key", "words"),
    [
        ({}, "data.train", "this section specifies no source of rows"),
        ({"path": "a", "dataset": "b"}, "data.train", "path and dataset are mutually exclusive"),
        ({"path": ""}, "data.train.path", "the value is empty"),
        ({"path": "a", "split": "x"}, "data.train.split", "this key has no effect with data.train.path"),
        ({"path": "a", "config": "x"}, "data.train.config", "this key has no effect with data.train.path"),
        ({"path": "a", "options": {"x": 1}}, "data.train.options", "this key has no effect with data.train.path"),
        ({"dataset": "a", "options": {"x": 1}}, "data.train.options", "this key has no effect with data.train.dataset"),
        (
            {"generator": "running_sum", "config": "x"},
            "data.train.config",
            "this key has no effect with data.train.generator",
        ),
        ({"generator": "running_sum", "columns": {"prompt": "x"}}, "data.train.columns", "this key has no effect with"),
        (
            {"path": "a", "columns": {"promt": "x"}},
            "data.train.columns.promt",
            "this key is not a role to which a column can be mapped",
        ),
        (
            {"path": "a", "columns": {"prompt": None}},
            "data.train.columns.prompt",
            "the value must be the name of a column",
        ),
        (
            {"path": "a", "columns": {"prompt": "x", "messages": "y"}},
            "data.train.columns",
            "prompt and messages are mutually exclusive",
        ),
        ({"generator": "runing_sum"}, "data.train.generator", "there is no generator `runing_sum`"),
        (
            {"path": "a", "template": "{{ x }}", "columns": {"prompt": "x"}},
            "data.train.template",
            "this key defines the prompt",
        ),
        ({"path": "a", "template": "{{ x"}, "data.train.template", ""),
    ],
)
def test_source_that_cannot_be_is_one_problem_with_its_key(source: dict[str, Any], key: str, words: str) -> None:
    (found,) = cross_check(make(data__train=source, data__eval=None))
    assert found.keys[0] == key
    assert found.what.startswith(words)


@pytest.mark.parametrize(
    "source",
    [
        {"path": "a", "columns": {"prompt": "x", "answer": None}}, {"path": "a", "columns": {"messages": "x"}},
        {"dataset": "a", "split": "x", "config": "y"}, {"generator": "my_rows:make", "options": {"x": 1}, "split": "x"},
        {"path": "a", "template": "{{ x }}", "columns": {"answer": "y"}},
    ],
)  # fmt: skip
def test_source_that_can_be_is_no_problem(source: dict[str, Any]) -> None:
    assert cross_check(make(data__train=source, data__eval=None)) == []


@pytest.mark.parametrize(
    ("host", "is_here"),
    [("localhost", True), ("::1", True), ("127.0.0.1", True), ("127.1.2.3", True), ("127.0.0", False),
     ("10.127.0.0.1", False), ("127.0.0.1.x", False), ("0.0.0.0", False), ("", False)],
)  # fmt: skip
def test_only_this_machine_reaches_its_loopback(host: str, is_here: bool) -> None:
    assert is_loopback(host) == is_here
