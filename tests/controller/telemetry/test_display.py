"""Claims about what a job shows."""

from __future__ import annotations

import io
import os
import re
from io import StringIO

import pytest
from rich.console import Console

from controller.telemetry.display import PLAIN_EVERY_S, PROGRESS_EVERY_S, Display, Snapshot
from controller.telemetry.progress import Progress
from controller.telemetry.screen import Screen
from controller.telemetry.step_table import StepRow


def row(step: int = 3, **facts: object) -> StepRow:
    values: dict[str, object] = {
        "step": step, "num_steps": 80, "reward": 0.5, "loss": -0.25, "grad_norm": 1.5, "staleness_mean": 0.75,
        "staleness_max": 2, "rollout_tokens_per_s": 1234.0, "trainer_tokens_per_s": 987.0, "wait_share": 0.25,
        "bound": 2, **facts,
    }  # fmt: skip
    return StepRow(**values)  # type: ignore[arg-type]


SNAPSHOT = Snapshot(
    version=7,
    waits=["trainer waits for batch 8: 3 of 12 groups ready"],
    states={"rollout-0": "generate", "trainer": "wait:batch"},
    counts={"drawn": 40, "ready": 3},
    elapsed_s=12.0,
    progress=[Progress("steps", 7, 80, 75.0), Progress("evaluation of version 20", 50, 200, 30.0)],
)


class Plain:
    """A display on a pipe, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s, self.shown = 100.0, StringIO()
        self.display = Display("auto", Screen(file=self.shown, width=250), clock=lambda: self.now_s)

    @property
    def lines(self) -> list[str]:
        return self.shown.getvalue().splitlines()


def drawn(display: Display, width: int = 250, height: int = 40) -> list[str]:
    """What is on the terminal now, without styles."""
    shown = StringIO()
    display.console = Console(file=shown, width=width, height=height, force_terminal=True, no_color=True)
    display.console.print(display._render())
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()


# ---------------------------------------------------------------- plain


def test_plain_output_is_one_line_per_step_with_all_that_matters() -> None:
    plain = Plain()
    with plain.display as display:
        display.step(row(left_s=75.0))
        display.show(SNAPSHOT)
    step, evaluation = plain.lines
    for part in (
        "step 3/80", "reward 0.500", "staleness 0.75 (max 2, bound 2)", "rollout 1,234 tok/s", "trainer 987 tok/s",
        "trainer waited 25%", "1 min 15 s left",
    ):  # fmt: skip
        assert part in step
    assert evaluation == "evaluation of version 20 50/200  30 s left"
    assert "no bound" in row(bound=None).line()


def test_replayed_step_says_so() -> None:
    plain = Plain()
    plain.display.step(row(is_replay=True))
    assert "step 3/80 (replayed)" in plain.lines[0]


def test_plain_lines_of_a_kind_come_at_their_pace_but_the_first_and_the_last_step_always() -> None:
    plain = Plain()
    for step in (1, 2, 79, 80):
        plain.display.step(row(step))
    assert [line.split()[1] for line in plain.lines] == ["1/80", "80/80"]
    plain.now_s += PLAIN_EVERY_S
    plain.display.step(row(79))
    assert plain.lines[-1].startswith("step 79/80")


def test_plain_progress_comes_at_its_pace_and_is_not_repeated() -> None:
    plain = Plain()
    for done in (1, 2, 2, 300):
        plain.display.progress(Progress("warm start", done, 300))
    assert plain.lines == ["warm start 1/300", "warm start 300/300"]
    assert plain.display.progress_text == "warm start 300/300"
    plain.now_s += PROGRESS_EVERY_S
    plain.display.progress(Progress("download", 2e6, 2e9, 1998.0, is_bytes=True))
    assert plain.lines[-1] == "download 2 MB of 2.0 GB  33 min 18 s left"


def test_an_evaluation_that_is_about_to_end_is_not_worth_a_line() -> None:
    plain = Plain()
    for left_s in (None, 2.0):
        progress = [Progress("steps", 1, 9), Progress("evaluation of version 1", 10, 20, left_s)]
        plain.display.show(Snapshot(1, [], {}, {}, 1.0, progress))
    assert plain.lines == []


def test_words_of_others_are_shown_as_they_are_and_on_one_line() -> None:
    plain = Plain()
    plain.display.note("rollout-0: KeyError '[/red]' in [bold]reward\x1b[2J\nnext", "warning")
    plain.display.progress(Progress("[step]", 3, note="[/]\x1b"))
    assert "KeyError '[/red]' in [bold]reward\\x1b[2J\\nnext" in plain.lines[0]
    assert plain.lines[1] == "[step] 3  [/]\\x1b"
    assert len(plain.lines) == 2


def test_plain_output_has_no_control_characters_and_no_line_is_broken_at_the_width() -> None:
    shown = StringIO()
    display = Display("auto", Screen(file=shown, width=40))
    with display:
        display.note("a warning " * 10, "warning")
        display.step(row())
        display.accuracy(7, {"accuracy": 0.875}, 1000)
    assert len(shown.getvalue().splitlines()) == 3
    assert not re.search(r"[^\n -~]", shown.getvalue())
    assert "evaluation of version 7: 0.875 on 1,000 held-out prompts" in shown.getvalue()


def test_a_reader_that_went_away_ends_the_words_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(os.fdopen(writing, "wb", buffering=0), write_through=True) as pipe:
        display = Display("auto", Screen(file=pipe))
        with display:
            for step in (1, 80):
                display.step(row(step))
        pipe.write("what the command prints later is dropped as well")
    assert caplog.text.count("the output of this command was closed by its reader") == 1


# ---------------------------------------------------------------- terminal


def test_terminal_shows_steps_version_accuracy_time_left_and_who_waits_for_whom() -> None:
    shown = StringIO()
    display = Display("live", Screen(file=shown, width=250, force_terminal=True))
    with display:
        display.progress(Progress("warm start", 50, 300, 20.0, "loss 1.2"))
        (bar,) = drawn(display)
        assert re.fullmatch(r"warm start +━+╸? +50/300 20 s left loss 1\.2 *", bar)
        for step in range(1, 40):
            display.step(row(step))
        display.show(SNAPSHOT)
        display.console = Screen(file=shown, width=250, force_terminal=True)
        display.accuracy(7, {"accuracy": 0.875, "pass_at_2": 0.9}, 200)
        text = "\n".join(drawn(display))
    for part in (
        "39/80", "version 7   12 s", "trainer waits for batch 8", "rollout-0: generate", "drawn 40", "v7 0.875",
        "staleness, bound 2", "0.75, max 2", "1 min 15 s left", "50/200", "30 s left",
    ):  # fmt: skip
        assert part in text
    assert "1/80" not in text.split(), "only the newest steps stay"
    assert "evaluation of version 7: 0.875 on 200 answers (pass_at_2 0.900)" in shown.getvalue()


def test_after_a_resume_the_time_says_what_it_counts_from() -> None:
    display = Display("live")
    display.show(Snapshot(7, [], {}, {}, 75.0, is_resumed=True))
    assert drawn(display) == ["version 7   1 min 15 s since the resume   ", ""]


@pytest.mark.parametrize("width", [20, 40, 60, 100, 160])
def test_nothing_is_wider_than_the_terminal_and_the_important_columns_go_last(width: int) -> None:
    display = Display("live")
    for step in range(1, 13):
        display.step(row(step))
    display.progress(Progress("download", 2e6, 2e9, 1998.0, "from somewhere with a long name", is_bytes=True))
    display.show(SNAPSHOT)
    lines = drawn(display, width)
    assert all(len(line) <= width for line in lines)
    assert "reward" in lines[0]
    assert ("staleness, bound 2" in lines[0]) == (width >= 40)
    assert ("loss" in lines[0]) == (width >= 60)
    assert ("grad" in lines[0]) == (width >= 100)


def test_low_terminal_keeps_room_for_what_goes_on() -> None:
    display = Display("live")
    for step in range(1, 13):
        display.step(row(step))
    assert len(drawn(display, height=24)) == 13
    assert [line.split()[0] for line in drawn(display, height=15)] == ["step", "10/80", "11/80", "12/80"]


def test_last_table_stays_on_the_screen_without_bars_and_states() -> None:
    shown = StringIO()
    display = Display("live", Screen(file=shown, width=250, force_terminal=True))
    with display:
        display.step(row(80))
        display.show(SNAPSHOT)
    last = shown.getvalue().rsplit("trainer waited", 1)[-1]
    assert "80/80" in last
    assert "rollout-0" not in last
    assert "\x1b[2K" not in last, "it is not erased"


def test_a_terminal_of_a_run_without_steps_is_left_empty() -> None:
    shown = StringIO()
    with Display("live", Screen(file=shown, width=250, force_terminal=True)) as display:
        display.show(SNAPSHOT)
        assert display._live is not None
        display._live.refresh()
    after = shown.getvalue().rsplit("trainer waits for batch 8", 1)[-1]
    assert after.count("\x1b[2K") >= 5, "as many lines as were drawn are erased"
    assert "rollout-0" not in after


def test_no_color_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = StringIO()
    display = Display("live", Screen(file=shown, width=80, force_terminal=True))
    with display:
        display.note("a warning", "warning")
        display.step(row(1))
        display.show(SNAPSHOT)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", shown.getvalue())


def test_terminal_is_live_and_a_pipe_is_not() -> None:
    live = Display("auto", Screen(file=StringIO(), force_terminal=True))
    with live:
        assert live._live is not None
    assert live._live is None
    pipe = Plain().display
    with pipe:
        assert pipe._live is None
