"""`areal-like score`: its arguments, what it shows, what it says at the end; the scoring itself is made up here."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import controller.cli.score
from areal_like.errors import UserError
from controller.cli.main import main
from controller.cli.score import ScoreProgress, options_of, summary
from controller.wiring.scoring import ScoreStatus

ARGUMENTS = ["score", "--scorer", "math", "--input", "in.jsonl", "--output", "out.jsonl"]


def standing(num_scored: int = 3, num_rows: int = 4, **fields: Any) -> ScoreStatus:
    made = ScoreStatus(num_rows=num_rows, scorer="math@2", wall_s=2.0, **fields)
    for number in range(num_scored):
        made.totals.add(number + 1, "scored", 1.0, "")
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the services were asked for; `result` and `raises` say what they do."""
    script: dict[str, Any] = {"result": standing()}

    def score_rows(scorer: str, options: Any, source: Path, target: Path, **rest: Any) -> ScoreStatus:
        script.update(scorer=scorer, options=options, source=source, target=target, **rest)
        rest["show"](script["result"])
        if "raises" in script:
            raise script["raises"]
        return script["result"]

    monkeypatch.setattr(controller.cli.score, "score_rows", score_rows)
    monkeypatch.setattr(controller.cli.score, "set_environment", lambda: None)
    return script


def test_arguments_reach_the_scorer(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--workers", "3", "--timeout", "2.5", "--overwrite", "float_digits=3", "rules=[boxed]"]
    assert main([*ARGUMENTS, *more]) == 0
    assert asked["options"] == {"float_digits": 3, "rules": ["boxed"]}
    assert (asked["scorer"], asked["source"], asked["target"]) == ("math", Path("in.jsonl"), Path("out.jsonl"))
    assert (asked["num_workers"], asked["timeout_s"], asked["overwrite"]) == (3, 2.5, True)
    assert "3 of 4 rows have a verdict, 1.5 rows/s" in capsys.readouterr().out


def test_without_options_there_is_a_worker_for_each_core(asked: dict[str, Any]) -> None:
    assert main(ARGUMENTS) == 0
    assert asked["num_workers"] >= 1
    assert (asked["timeout_s"], asked["overwrite"], asked["options"]) == (None, False, {})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_reported_and_is_the_exit_status(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], number: int
) -> None:
    asked["result"] = standing(stopped_by=int(number))
    assert main(ARGUMENTS) == 128 + number
    assert "run the same command again to continue from here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UserError("there is no such file", where="in.jsonl"), 2, "error: in.jsonl: there is no such file"),
        (
            OSError(28, "No space left on device"),
            1,
            "out.jsonl: No space left on device; after fixing the cause, run the same command again to continue",
        ),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], error: Exception, status: int, words: str
) -> None:
    asked["raises"] = error
    assert main(ARGUMENTS) == status
    lines = capsys.readouterr().err.strip().splitlines()
    assert words in lines[-1]
    assert len(lines) == 1


@pytest.mark.parametrize("arguments", [ARGUMENTS[:-2], [*ARGUMENTS, "--workers", "0"], [*ARGUMENTS, "--timeout", "-1"]])
def test_wrong_arguments_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "score --help" in capsys.readouterr().err


@pytest.mark.parametrize("pair", ["float_digits", "=3", "a=[", "--x"])
def test_an_option_is_key_and_value(pair: str) -> None:
    with pytest.raises(UserError):
        options_of([pair])


def test_the_summary_counts_every_kind_and_names_the_first_fault() -> None:
    done = standing(num_rows=6, num_before=1)
    done.totals.add(4, "timed_out", None, "math took longer than 10 s")
    done.totals.add(5, "invalid", None, "the line is empty")
    done.totals.add(6, "scored", 0.0, "")
    text = summary(done, Path("out.jsonl"))
    assert "6 of 6 rows have a verdict (1 of them from an earlier invocation), 2.5 rows/s" in text
    assert "mean value   0.7500 over the scored rows" in text
    assert "first row without a score: line 4: math took longer than 10 s" in text
    assert "crashed" not in text
    assert text.endswith("verdicts: out.jsonl\n")
    assert "mean value" not in summary(standing(0), Path("out.jsonl"))


@pytest.fixture
def console() -> Callable[[bool], tuple[Console, io.StringIO]]:
    def make(is_terminal: bool) -> tuple[Console, io.StringIO]:
        file = io.StringIO()
        return Console(file=file, force_terminal=is_terminal, width=100, soft_wrap=True, highlight=False), file

    return make


def test_progress_is_a_bar_on_a_terminal(console: Callable[[bool], tuple[Console, io.StringIO]]) -> None:
    terminal, shown = console(True)
    with ScoreProgress(terminal) as progress:
        progress.show(standing(num_scored=1_234, num_rows=2_468))
    assert "1234/2468" in shown.getvalue()
    assert "617/s" in shown.getvalue()


def test_progress_is_lines_anywhere_else_and_not_too_many(
    console: Callable[[bool], tuple[Console, io.StringIO]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, shown = console(False)
    now_s = [100.0]
    monkeypatch.setattr(controller.cli.score.time, "monotonic", lambda: now_s[0])
    with ScoreProgress(plain) as progress:
        for _ in range(60):
            now_s[0] += 0.1
            progress.show(standing(num_scored=100, num_rows=300))
    assert shown.getvalue() == "score 100/300  50.0/s, about 4 s left\n"
