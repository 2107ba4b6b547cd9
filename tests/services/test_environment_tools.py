"""What the environment `tools` answers to each call, without a policy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.environment import Step
from areal_like.errors import UserError
from areal_like.tool_call import ToolCall
from services.environment import tools as module
from services.environment.config import MAX_RESULT_CHARS
from services.environment.interruption import CallTimedOut, interrupted
from services.environment.loading import check_environment
from services.environment.tools import ToolEnvironment

HERE = f"{__name__}:TOOLS"


def add(x: int, y: int = 1) -> int:
    """Add two numbers."""
    return x + y


async def later(text: str) -> str:
    """Wait a moment."""
    await asyncio.sleep(0)
    return text


def echo(text: str) -> str:
    """The same text."""
    return text


def fail() -> None:
    """Raises."""
    raise LookupError("no such page")


def spin() -> None:
    """Never ends."""
    while True:
        pass


async def wait() -> None:
    """Never ends, without a processor."""
    await asyncio.sleep(600)


def odd() -> Any:
    """Something that is no JSON."""
    return {"at": SimpleNamespace(x=1)}


TOOLS = [add, later, echo, fail, spin, wait, odd]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are imported from their files, and tools by the names of modules."""
    monkeypatch.setattr(module, "_loaded", lambda names: module.load_tools([], {}, "") | _tools())


def _tools() -> dict[str, Any]:
    from areal_like.tools import by_name, tool_of

    return by_name([tool_of(one) for one in TOOLS], "")


def call(name: str, fault: str = "", **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments), fault)


def turn(*calls: ToolCall, environment: ToolEnvironment | None = None, **options: Any) -> Step:
    hosted = environment or ToolEnvironment(tools=[HERE], **options)
    return asyncio.run(hosted.step(calls))


def failures(step: Step) -> dict[str, float]:
    """Components that are not zero, without the time."""
    return {name: number for name, number in step.components.items() if number and name != "tool_s"}


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tools": "search"}, "`tools` must be a non-empty list, not 'search'"),
        ({}, '`tools` must be a non-empty list, not () -> write, for example, tools: ["my_tools:search"]; or set mcp'),
        ({"tools": ["python"], "call_timeout_s": float("inf")}, "greater than 0, not inf"),
        ({"tools": ["python"], "call_timeout_s": -1}, "greater than 0, not -1"),
        ({"tools": ["python"], "max_calls": True}, "max_calls must be a whole number of at least 1, not True"),
        ({"tools": 5}, "`tools` must be a list of names, not 5 -> write, for example, tools: ["),
        ({"tools": {"python": 1}}, "`tools` must be a list of names, not {'python': 1} -> write, for example,"),
        ({"tools": ["python", 3]}, "`tools` must be a list of names, not ['python', 3]"),
        (
            {"tools": ["python"], "mcp": ["web"]},
            "`mcp` must be a mapping, not list -> write a mapping of names to servers",
        ),
        (
            {"tools": ["python"], "call_timeout_s": "5"},
            "call_timeout_s must be a finite number of seconds greater than 0, not '5'",
        ),
        ({"tools": ["python"], "call_timeout_s": True}, "greater than 0, not True"),
        ({"tools": ["python"], "call_timeout_s": float("nan")}, "greater than 0, not nan"),
        ({"tools": ["python"], "call_timeout_s": 0}, "greater than 0, not 0"),
        ({"tools": ["python"], "max_calls": 2.5}, "max_calls must be a whole number of at least 1, not 2.5"),
        ({"tools": ["python"], "max_calls": None}, "max_calls must be a whole number of at least 1, not None"),
        (
            {"tools": ["python"], "max_result_chars": "9"},
            "max_result_chars must be a whole number of at least 1, not '9'",
        ),
        ({"tools": ["python"], "max_result_chars": 0}, "max_result_chars must be a whole number of at least 1, not 0"),
    ],
)
def test_option_of_a_wrong_type_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        ToolEnvironment(**options)
    assert sentence in str(refused.value)
    with pytest.raises(UserError) as checked:
        check_environment("tools", options)
    assert str(checked.value) == str(refused.value)


def test_text_for_tools_is_refused_also_where_there_is_a_server() -> None:
    with pytest.raises(UserError) as raised:
        ToolEnvironment(tools="search", mcp={"archive": {"url": "http://127.0.0.1:1"}})
    assert raised.value.what == "`tools` must be a list, not 'search'"


def test_smallest_bounds_are_bounds() -> None:
    ToolEnvironment(tools=[HERE], call_timeout_s=0.001, max_calls=1, max_result_chars=1)


def test_tools_are_declared_with_their_arguments_before_the_first_turn() -> None:
    step = asyncio.run(ToolEnvironment(tools=[HERE]).reset({}, 1))
    named = {one["function"]["name"]: one["function"] for one in step.tools}
    assert list(named) == ["add", "later", "echo", "fail", "spin", "wait", "odd"]
    assert named["add"]["parameters"]["required"] == ["x"]


# ---------------------------------------------------------------- calls


def test_every_call_has_its_own_result_in_order() -> None:
    step = turn(call("add", x=2, y=3), call("later", text="soon"), call("add", x=1), call("echo", text="ü"))
    assert step.results == ("5", "soon", "2", "ü")
    assert failures(step) == {"tool_calls": 4.0}


def test_result_that_is_no_json_is_shown_as_text() -> None:
    assert turn(call("odd")).results == ('{"at":"namespace(x=1)"}',)


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        (call("add", fault="no closing bracket", x=1), "malformed", "the call cannot be read: no closing bracket"),
        (call("sub", x=1), "unknown",
         "there is no tool 'sub'; the available tools are add, later, echo, fail, spin, wait, odd"),
        (call("add", x="one"), "wrong_arguments", "the arguments of add are wrong: Expected `int`, got `str`"),
        (call("fail"), "raised", "fail failed (LookupError: no such page)"),
    ],
)  # fmt: skip
def test_call_that_fails_is_answered_in_words_and_counted_by_kind(asked: ToolCall, kind: str, words: str) -> None:
    step = turn(asked, call("add", x=1))
    assert step.results[0].startswith(f"Error: {words}")
    assert step.results[1] == "2", "the turn goes on"
    assert failures(step) == {"tool_calls": 2.0, f"tool_{kind}": 1.0}


def test_calls_beyond_the_bound_are_answered_and_not_run() -> None:
    step = turn(call("add", x=1), call("add", x=2), call("fail"), max_calls=2)
    assert step.results == ("2", "3", "Error: too many calls in one turn")
    assert failures(step) == {"tool_calls": 3.0, "tool_malformed": 1.0}


@pytest.mark.parametrize(("length", "result"), [(5, "xxxxx"), (6, "xxxxx\n[... 1 characters omitted]")])
def test_result_past_the_bound_is_cut_and_says_by_how_much(length: int, result: str) -> None:
    step = turn(call("echo", text="x" * length), max_result_chars=5)
    assert step.results == (result,)
    assert failures(step) == {"tool_calls": 1.0} | ({"tool_truncated": 1.0} if length > 5 else {})


def test_words_for_a_failure_are_cut_as_well() -> None:
    assert turn(call("sub"), max_result_chars=10).results[0].startswith("Error: the\n[... ")
    assert MAX_RESULT_CHARS > 1000


@pytest.mark.parametrize("name", ["spin", "wait"])
def test_call_that_hangs_ends_with_the_time_of_its_turn_and_later_ones_have_none(name: str) -> None:
    step = turn(call(name), call("add", x=2), call_timeout_s=0.05)
    late = "Error: the tool returned no result within 0.05 s"
    assert step.results == (late, late)
    assert failures(step) == {"tool_calls": 2.0, "tool_timed_out": 2.0}


def test_counts_and_seconds_add_up_over_the_turns_of_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=0.0)

    def monotonic() -> float:
        clock.now_s += 0.5
        return float(clock.now_s)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
    environment = ToolEnvironment(tools=[HERE], call_timeout_s=100.0)
    first = turn(call("add", x=1), environment=environment)
    second = turn(call("fail"), environment=environment)
    assert first.components["tool_s"] == 1.0
    assert second.components["tool_s"] == 2.0
    assert failures(second) == {"tool_calls": 2.0, "tool_raised": 1.0}
    assert set(first.components) == {
        "tool_calls", "tool_malformed", "tool_unknown", "tool_wrong_arguments", "tool_raised", "tool_timed_out",
        "tool_truncated", "tool_s",
    }  # fmt: skip


def test_text_instead_of_calls_names_the_workflow_that_makes_calls() -> None:
    with pytest.raises(TypeError, match=r"set rollout\.workflow: tools"):
        asyncio.run(ToolEnvironment(tools=[HERE]).step("text"))  # type: ignore[arg-type]


# ---------------------------------------------------------------- the alarm


def test_alarm_of_the_process_is_as_it_was_after_a_call() -> None:
    before = signal.getsignal(signal.SIGALRM)
    for asked in (call("add", x=1), call("fail"), call("spin")):
        turn(asked, call_timeout_s=0.05)
        assert signal.getsignal(signal.SIGALRM) is before
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_tool_that_swallows_the_alarm_is_interrupted_again() -> None:
    def stubborn() -> None:
        with contextlib.suppress(BaseException):
            while True:
                pass
        while True:
            pass

    with pytest.raises(CallTimedOut):
        interrupted(stubborn, 0.01)
