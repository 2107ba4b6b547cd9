"""Claims about what a run says at its end."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from controller.telemetry.screen import Screen
from controller.telemetry.summary_page import next_steps, print_summary, sentences

SUMMARY: dict[str, Any] = {
    "status": "completed", "accuracy_before": 0.2345, "accuracy_after": 1.0, "accuracy_after_version": 60,
    "eval_prompts": 1000, "wall_s": 99.6, "prepare_s": 28.0, "train_wall_s": 68.2, "steps": 60, "samples_per_s": 430.4,
    "trainer_wait_share": 0.04, "rollout_idle_share": 0.28, "staleness_mean": 1.956, "staleness_max": 2,
    "groups_drawn": 2976, "groups_consumed": 2880, "groups_filtered": 0, "groups_dropped": 1, "groups_in_flight": 95,
    "accuracy_by_version": {"0": 0.2345, "60": 1.0}, "num_steps": 60, "staleness_bound": 2, "lives": 1,
    "audit": "clean",
}  # fmt: skip
ANSWERS = [
    {"prompt": "3+8+5=", "before": "3+8=2;#2", "value_before": 0.0, "after": "3+8=1,1+5=6;#6", "value_after": 1.0},
    {"prompt": "1+1=", "before": "?", "value_before": None, "after": "1+1=2;#2", "value_after": 1.0},
]


def shown(summary: dict[str, Any], folder: Path = Path("/runs/first"), width: int = 200) -> list[str]:
    text = StringIO()
    print_summary(summary, folder, Screen(file=text, width=width))
    return text.getvalue().splitlines()


def test_five_plain_sentences_say_how_the_run_went() -> None:
    assert sentences(SUMMARY) == [
        "The run is complete: 60 of 60 steps.",
        "Accuracy on 1,000 held-out prompts went from 0.234 before the first step to 1.000 after step 60.",
        "Samples were 1.96 versions old on average when they were used, 2 at most; the bound is 2; a recount of the "
        "ledger confirms it.",
        "Of 2,976 prompts drawn, 2,880 were trained on, 0 filtered, 1 dropped; 95 have not been used yet.",
        "It took 1 min 40 s: 28 s for the starting model, 1 min 8 s of training at 430 samples/s; the trainer waited "
        "4 % of its time, rollout workers were idle 28 % of theirs.",
    ]


def test_after_a_resume_every_number_says_which_part_of_the_run_it_covers() -> None:
    resumed = {**SUMMARY, "lives": 2, "answers": ANSWERS}
    end, accuracy, staleness, groups, time = sentences(resumed)
    assert end == "The run is complete: 60 of 60 steps in 2 sessions."
    assert "before the first step" in accuracy
    assert staleness.startswith("Over the whole run, samples were")
    assert groups.startswith("Over the whole run, of 2,976 prompts")
    assert time.startswith("Since the last resume, it took 1 min 40 s")
    lines = shown(resumed)
    whole, last = lines.index("the whole run:"), lines.index("since the last resume:")
    keys = [line.split()[0] if line else "" for line in lines]
    assert "; over the whole run, the trainer waited 4 % of its time" in time
    assert {"wall_s", "samples_per_s"} <= set(keys[last:])
    assert {"trainer_wait_share", "steps", "staleness_max", "accuracy_before", "groups_drawn", "audit"} <= set(
        keys[whole:last]
    )


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"status": "stopped", "steps": 12}, "The run was stopped: 12 of 60 steps."),
        ({"status": "exhausted"}, "The data is used up: 60 of 60 steps."),
        ({"status": "failed"}, "The run failed: 60 of 60 steps."),
        ({"accuracy_before": None, "accuracy_after": None}, "No accuracy was measured."),
        ({"accuracy_after": None}, "was 0.234 before the first step; it was not measured again."),
        ({"accuracy_before": None}, "is 1.000 after step 60; it was not measured before the first step."),
        ({"staleness_bound": None}, "2 at most; there is no bound; a recount"),
        ({"audit": "a group was used late"}, "the bound is 2; audit: a group was used late."),
        ({"prepare_s": 0.0}, "It took 1 min 40 s: 1 min 8 s of training"),
    ],
)
def test_what_was_not_measured_is_not_claimed(facts: dict[str, Any], words: str) -> None:
    assert words in "\n".join(sentences({**SUMMARY, **facts}))


def test_an_evaluation_speaks_of_no_training() -> None:
    counts = dict.fromkeys(("groups_drawn", "groups_consumed", "groups_filtered", "groups_dropped"), 0)
    summary = {
        "status": "completed", "steps": 0, "accuracy_before": 0.25, "accuracy_after": None, "eval_prompts": 40,
        **counts, "groups_in_flight": 0, "wall_s": 25.0,
        "prepare_s": 5.0, "train_wall_s": 0.0, "rollout_idle_share": 0.9,
    }  # fmt: skip
    assert sentences(summary) == [
        "The run is complete.",
        "Accuracy on 40 held-out prompts is 0.250.",
        "It took 25 s: 5 s for the starting model.",
    ]
    assert "No accuracy was measured." in sentences({**summary, "accuracy_before": None})


def test_a_run_from_files_has_the_sentences_it_has_numbers_for() -> None:
    assert sentences({"status": "finished", "steps": 3, "num_steps": 3, "wall_s": 7.0, "accuracy_after": 0.5}) == [
        "The run is complete: 3 of 3 steps.",
        "Accuracy is 0.500 at the end; it was not measured before the first step.",
        "It took 7 s.",
    ]


def test_sentences_come_first_then_answers_then_every_key_and_the_folder_whatever_stands_in_them() -> None:
    odd = {**SUMMARY, "audit": "exactly-once: steps [/] have [bold]holes\x1b", "answers": ANSWERS}
    lines = shown(odd, Path("/runs/[red]odd[/]"))
    assert lines[0].startswith("The run is complete")
    assert lines[6:12] == [
        "Answers to the first 2 held-out prompts, before training and after:",
        "  prompt  3+8+5=",
        "    before  scored 0  3+8=2;#2",
        "    after   scored 1  3+8=1,1+5=6;#6",
        "  prompt  1+1=",
        "    before  no score  ?",
    ]
    keys = {line.split()[0] for line in lines if line}
    assert set(SUMMARY) <= keys
    assert any("exactly-once: steps [/] have [bold]holes\\x1b" in line for line in lines)
    assert lines[-1] == "run folder: /runs/[red]odd[/]"


def test_accuracies_are_shown_with_three_decimals() -> None:
    words = [line.split() for line in shown(SUMMARY)]
    assert ["accuracy_before", "0.234"] in words
    assert ["accuracy_by_version", "0:", "0.234", "60:", "1.000"] in words


def test_long_answers_are_cut_at_the_width_and_keys_are_not() -> None:
    long = [{**ANSWERS[0], "after": "word" * 100}]
    lines = shown({"answers": long, "audit": "finding " * 30}, width=60)
    assert max(len(line) for line in lines if line.startswith("    ")) == 60
    assert f"audit  {'finding ' * 30}".rstrip() in [line.rstrip() for line in lines]


def test_a_terminal_breaks_sentences_between_words() -> None:
    text = StringIO()
    print_summary(SUMMARY, Path("/runs/first"), Screen(file=text, width=60, force_terminal=True, no_color=True))
    lines = text.getvalue().splitlines()
    assert lines[1:3] == [
        "Accuracy on 1,000 held-out prompts went from 0.234 before ", "the first step to 1.000 after step 60.",
    ]  # fmt: skip


def test_what_to_do_next_names_commands_and_asks_why_where_nothing_was_gained() -> None:
    folder, config = Path("/runs/first"), Path("/runs/first/config.yaml")
    lines = next_steps(SUMMARY, folder, config)
    assert [line.split(": ", 1)[1].strip() for line in lines] == [
        "areal-like samples /runs/first", "areal-like export /runs/first MODEL_FOLDER",
    ]  # fmt: skip
    flat = next_steps({**SUMMARY, "accuracy_after": 0.24}, folder, config)
    assert any("--why" in line and f"areal-like probe {config}" in line for line in flat)
