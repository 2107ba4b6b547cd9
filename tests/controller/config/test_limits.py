"""Every number of the schema, and of the command line, has an upper limit; none can exhaust memory by itself."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from valid_config import config_of, make

from areal_like import arguments, limits
from areal_like.errors import UserError
from areal_like.settings import Settings
from areal_like.tasks.running_sum import RunningSumOptions
from controller.cli.arguments import make_parser
from controller.config.loading import build
from controller.config.run_config import RunConfig
from controller.config.schema import section_of
from controller.config.validation.run import cross_check
from controller.config.yaml_document import parse_value
from services.reward.scorer_registry import SCORERS
from services.reward.standalone import _parser

FREE = {"rollout.engine.sglang.arguments", "rollout.engine.vllm.arguments"}
"""Passed on to another program, which knows its own limits."""


def fields_of(root: type[Settings], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in root.model_fields.items():
        yield f"{prefix}{name}", field
        if (section := section_of(field.annotation)) is not None:
            yield from fields_of(section, f"{prefix}{name}.")


def holds(annotation: Any, kind: type) -> bool:
    return annotation is kind or any(holds(part, kind) for part in get_args(annotation))


def has_upper_bound(field: FieldInfo) -> bool:
    def metadata(annotation: Any) -> Iterator[Any]:
        for part in get_args(annotation):
            yield from part.metadata if isinstance(part, FieldInfo) else metadata(part)

    found = (*field.metadata, *metadata(field.annotation))
    return any(getattr(item, name, None) is not None for item in found for name in ("le", "lt"))


ROOTS = {
    "": RunConfig,
    "running_sum.": RunningSumOptions,
    **{f"{name}.": kind.options for name, kind in SCORERS.items()},
}
FIELDS = [(path, field) for prefix, root in ROOTS.items() for path, field in fields_of(root, prefix)]
WHOLE = [(path, field) for path, field in FIELDS if holds(field.annotation, int) and path not in FREE]
DURATIONS = [(path, field) for path, field in FIELDS if path.endswith("_s") and holds(field.annotation, float)]


@pytest.mark.parametrize(
    ("path", "field"), WHOLE + DURATIONS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_count_and_every_duration_has_an_upper_bound(path: str, field: FieldInfo) -> None:
    assert has_upper_bound(field), f"{path}: give it le=limits..."


def test_the_walk_reaches_every_section() -> None:
    paths = {path for path, _ in WHOLE + DURATIONS}
    wanted = {"group_size", "trainer.deepspeed.reduce_bucket_size", "launch.ray.node_wait_s", "reward.scorers.retries",
              "rollout.threads", "staleness.max_staleness", "code.max_processes", "math.max_answer_chars",
              "data.eval.limit", "rollout.engine.sglang.port"}  # fmt: skip
    assert wanted <= paths


@pytest.mark.parametrize(
    "path",
    ["trainer.optimizer.lr", "trainer.loss.weight.max", "eval.temperature", "launch.silence_s", "ledger.keep_mb",
     "trainer.advantage.reward_clip", "emulation.mean_tokens"],
)  # fmt: skip
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_refused_in_words(path: str, value: float) -> None:
    config, problems = build(config_of({path: value}))
    assert config is None
    assert [str(problem) for problem in problems] == [f"{path}: the value must be a finite number, not {value}"]


def test_every_float_refuses_infinity() -> None:
    assert all(root.model_config["allow_inf_nan"] is False for root in ROOTS.values())
    for kind in ("rollout", "trainer", "reward"):
        with pytest.raises(ValidationError):
            make(launch__ray={kind: {"resources": {"own": math.inf}}})


def test_a_group_too_large_to_keep_is_refused_at_once() -> None:
    config, problems = build(config_of({"group_size": 10**11}))
    assert config is None
    assert str(problems[0]) == "group_size: the value must be at most 65,536, not 100000000000"


def test_too_many_samples_at_once_name_the_memory_they_take() -> None:
    assert cross_check(make(groups_per_step=1024, group_size=64, staleness__max_staleness=63)) == []
    (problem,) = cross_check(make(groups_per_step=1024, group_size=64, staleness__max_staleness=64))
    assert problem.keys[0] == "groups_per_step"
    assert "allows 4,259,840 samples in flight" in problem.what
    assert "724 MB of memory in the controller" in problem.what
    unbounded = {"max_staleness": "unbounded", "on_stale": "keep"}
    (problem,) = cross_check(make(groups_per_step=2**20, group_size=8, staleness=unbounded))
    assert problem.what.startswith("groups_per_step * group_size allows 8,388,608")


def test_generated_rows_that_fill_the_memory_are_refused() -> None:
    source = {"generator": "running_sum", "limit": limits.GENERATED_ROWS + 1}
    (problem,) = cross_check(make(data={"train": source}))
    assert problem.keys == ("data.train.limit",)
    assert "memory" in problem.what
    assert cross_check(make(data={"train": {"path": "x.jsonl", "limit": limits.ROWS}})) == []


def test_a_number_of_thousands_of_digits_is_refused_in_short_words() -> None:
    with pytest.raises(UserError) as caught:
        parse_value("9" * 5000)
    assert len(str(caught.value)) < 400


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


@pytest.mark.parametrize("make_one", [lambda: make_parser(lambda text: 2), _parser], ids=["areal-like", "services"])
def test_every_number_on_the_command_line_has_an_upper_bound(make_one: Any) -> None:
    typed = [
        (parser.prog, action)
        for parser in parsers(make_one())
        for action in parser._actions
        if action.type not in (None, Path)
    ]
    assert typed
    for prog, action in typed:
        for text in ("inf", "nan", "1e300", "9" * 400, "-1"):
            with pytest.raises((argparse.ArgumentTypeError, ValueError)):
                pytest.fail(f"{prog} {action.option_strings} takes {text}: {action.type(text)}")  # type: ignore[operator]


def test_seconds_are_those_an_operating_system_can_wait_for() -> None:
    assert arguments.seconds("1e6") == limits.SECONDS
    with pytest.raises(argparse.ArgumentTypeError, match="at most 1,000,000"):
        arguments.seconds("1e7")
