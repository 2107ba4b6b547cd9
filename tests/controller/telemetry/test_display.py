"""Claims about what a job shows."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from controller.telemetry.display import Display, Snapshot, StepRow


def row(step: int = 3, **facts: object) -> StepRow:
    values: dict[str, object] = {
        "step": step, "num_steps": 80, "reward": 0.5, "loss": -0.25, "grad_norm": 1.5, "staleness_mean": 0.75,
        "staleness_max": 2, "rollout_tokens_per_s": 1234.0, "trainer_tokens_per_s": 987.0, "wait_share": 0.25, **facts,
    }  # fmt: skip
    return StepRow(**values)  # type: ignore[arg-type]


SNAPSHOT = Snapshot(
    version=7,
    waits=["trainer waits for batch 8: 3 of 12 groups ready"],
    states={"rollout-0": "generate", "trainer": "wait:batch"},
    counts={"drawn": 40, "ready": 3},
    elapsed_s=12.0,
)


def plain(display_width: int = 250) -> tuple[Display, StringIO]:
    shown = StringIO()
    return Display("auto", Console(file=shown, width=display_width)), shown


def test_plain_output_is_one_line_per_step_with_all_that_matters():
    display, shown = plain()
    with display:
        display.step(row())
        display.show(SNAPSHOT)
    (line,) = shown.getvalue().splitlines()
    for part in ("step 3/80", "reward 0.500", "staleness 0.75 (max 2)", "rollout 1,234 tok/s", "trainer 987 tok/s"):
        assert part in line
    assert "trainer waited 25%" in line


def test_replayed_step_says_so():
    display, shown = plain()
    display.step(row(is_replay=True))
    assert "step 3/80 (replayed)" in shown.getvalue()


def test_words_of_others_are_shown_as_they_are():
    display, shown = plain()
    display.note("rollout-0: KeyError '[/red]' in [bold]reward", "warning")
    display.progress("[step] 3 [/]")
    assert "KeyError '[/red]' in [bold]reward" in shown.getvalue()
    assert "[step] 3 [/]" in shown.getvalue()


def test_same_progress_is_not_printed_twice():
    display, shown = plain()
    for text in ("step 1", "step 1", "step 2"):
        display.progress(text)
    assert shown.getvalue().splitlines() == ["step 1", "step 2"]


def test_live_display_shows_steps_version_accuracy_and_who_waits_for_whom():
    shown = StringIO()
    display = Display("live", Console(file=shown, width=250, force_terminal=True))
    with display:
        display.progress("  step 20  loss 1.2")
        before = StringIO()
        Console(file=before, width=250).print(display._render())
        assert "loss 1.2" in before.getvalue()
        for step in range(1, 40):
            display.step(row(step))
        display.show(SNAPSHOT)
        display.accuracy(7, 0.875, 200)
        drawn = StringIO()
        Console(file=drawn, width=250).print(display._render())
    text = drawn.getvalue()
    for part in ("39/80", "version 7", "trainer waits for batch 8", "rollout-0: generate", "drawn 40", "v7 0.875"):
        assert part in text
    assert "1/80" not in text.split(), "only the newest steps stay"
    assert "evaluation of version 7: 0.875 on 200 held-out prompts" in shown.getvalue()


def test_terminal_is_live_and_a_pipe_is_not():
    live = Display("auto", Console(file=StringIO(), force_terminal=True))
    with live:
        assert live._live is not None
    assert live._live is None
    pipe, _ = plain()
    with pipe:
        assert pipe._live is None
