"""Callbacks see the rows, may add numbers, and never hold up the run."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from controller.config.run_config import RunConfig
from controller.telemetry.callbacks import CallbackSink, open_callbacks
from controller.telemetry.scalars import scalars
from controller.telemetry.sinks import QUEUE_ROWS, Sinks

PATIENCE_S = 300.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on how fast a callback closes."""
    monkeypatch.setattr("controller.telemetry.sinks.CLOSE_S", PATIENCE_S)


def step(number: int) -> dict[str, Any]:
    return {"kind": "step", "time_s": 5.0, "step": number, "reward_mean": 0.5}


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def on_start(self, run: dict[str, Any]) -> None:
        self.calls.append(("start", run))

    def on_step(self, row: dict[str, Any]) -> dict[str, float]:
        self.calls.append(("step", row))
        return {"double": 2 * row["reward_mean"], "bad": float("nan")}

    def on_eval(self, row: dict[str, Any]) -> dict[str, float]:
        self.calls.append(("eval", row))
        return {"seen": True}

    def on_end(self, summary: dict[str, Any]) -> None:
        self.calls.append(("end", summary))


def sinks_of(target: Any, timeout_s: float = PATIENCE_S, clock: Any = None) -> tuple[Sinks, CallbackSink]:
    callback = CallbackSink("Mine", target, timeout_s=timeout_s, **({"clock": clock} if clock else {}))
    return Sinks([], [callback]), callback


def test_a_callback_sees_start_rows_and_end_and_its_numbers_become_rows() -> None:
    target = Recorder()
    sinks, _ = sinks_of(target)
    evaluation = {"kind": "eval", "time_s": 6.0, "version": 3, "accuracy": 0.5}
    for row in ({"kind": "start", "time_s": 4.0, "name": "r"}, step(3), evaluation, {"kind": "pulse", "time_s": 6.0}):
        sinks.offer(row)
    (news,) = sinks.close()
    assert (news.sink, news.written, news.lost, news.error) == ("callback Mine", 3, 0, "")
    assert sinks.end({"status": "completed"}) == []
    assert [kind for kind, _ in target.calls] == ["start", "step", "eval", "end"]
    rows = sinks.take_rows()
    assert rows == [
        {"kind": "callback_step", "time_s": 5.0, "step": 3, "callback/Mine/double": 1.0},
        {"kind": "callback_eval", "time_s": 6.0, "version": 3, "callback/Mine/seen": 1.0},
    ]
    assert sinks.take_rows() == []
    drawn = [scalars(row) for row in rows]
    assert [dict(one.values) for one in drawn if one is not None] == [
        {"train/callback/Mine/double": 1.0}, {"eval/callback/Mine/seen": 1.0},
    ]  # fmt: skip


class Failing:
    def __init__(self, found: Any = None, error: Exception | None = None) -> None:
        self.found, self.error, self.num_calls = found, error, 0

    def on_step(self, row: dict[str, Any]) -> Any:
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        return self.found

    def on_end(self, summary: dict[str, Any]) -> None:
        raise AssertionError("a disabled callback is not called")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Failing(error=ValueError("no\nmore")), "on_step raised ValueError: no"),
        (Failing(found=[1]), "a method returned list"),
        (Failing(found={"x": "high"}), "the metric `x` is str, not a number"),
    ],
)
def test_an_exception_or_a_wrong_return_is_reported_and_disables_the_callback(target: Failing, words: str) -> None:
    sinks, callback = sinks_of(target)
    for number in range(3):
        sinks.offer(step(number))
    (news,) = sinks.close()
    assert words in news.error
    assert (target.num_calls, news.written, news.lost) == (1, 0, 3)
    assert callback.refusal()
    assert sinks.end({}) == []


def test_a_callback_that_hangs_is_disabled_and_its_rows_are_counted() -> None:
    release, began, now_s = threading.Event(), threading.Event(), [0.0]

    class Hanging:
        def on_step(self, row: dict[str, Any]) -> None:
            began.set()
            release.wait()

    sinks, _ = sinks_of(Hanging(), timeout_s=10.0, clock=lambda: now_s[0])
    sinks.offer(step(1))
    assert began.wait(PATIENCE_S)
    sinks.offer(step(2))
    assert sinks.news() == []
    now_s[0] = 10.5
    for number in range(2 * QUEUE_ROWS):
        sinks.offer(step(number))
    (news,) = sinks.news()
    assert news.error == "disabled: a call took more than 10 s (callback_timeout_s)"
    assert news.lost == 2 * QUEUE_ROWS
    assert sinks.end({}) == []
    release.set()
    (last,) = sinks.close()
    assert (last.written, last.lost) == (0, 2 * QUEUE_ROWS + 2)


def test_an_end_that_fails_or_hangs_is_reported_in_a_sentence() -> None:
    release = threading.Event()

    class Late:
        def on_end(self, summary: dict[str, Any]) -> None:
            release.wait()

    class Wrong:
        def on_end(self, summary: dict[str, Any]) -> None:
            raise OSError("disk full")

    for target, words in ((Late(), "on_end took more than 0.01 s"), (Wrong(), "on_end raised OSError: disk full")):
        sinks, _ = sinks_of(target, timeout_s=0.01 if isinstance(target, Late) else PATIENCE_S)
        sinks.close()
        (problem,) = sinks.end({})
        assert problem.startswith("callback Mine: ")
        assert words in problem
    release.set()


def test_what_cannot_be_a_callback_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = types.ModuleType("my_callbacks")
    module.Recorder, module.Empty = Recorder, object  # type: ignore[attr-defined]
    module.Needy = lambda run: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_callbacks", module)
    (made,) = open_callbacks(["my_callbacks:Recorder"], timeout_s=1.0)
    assert made.name == "callback Recorder"
    for name, words in (
        ("my_callbacks:Empty", "has none of the methods on_start, on_step"),
        ("my_callbacks:Needy", "calling my_callbacks:Needy without arguments failed"),
        ("my_callbacks:Recoder", "did you mean my_callbacks:Recorder"),
        ("no_such_module_here:X", "cannot be imported"),
    ):
        with pytest.raises(UserError, match=words):
            open_callbacks([name], timeout_s=1.0)
    config = RunConfig.model_validate({"data": {"train": {"generator": "running_sum"}}, "callbacks": ["a:B"]})
    assert config.callbacks == ("a:B",)
