"""The signs of reward hacking in the rows of steps, and notes about them while a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_like.verdict import FORGED_TEXT, Verdict
from controller.coordinator.effects import StoreFinished
from controller.coordinator.sample_outcome import SampleOutcome
from controller.run_folder.run_folder import RunFolder
from controller.telemetry.answer_signs import AnswerSigns, within_groups
from controller.telemetry.hacking_watch import HackingWatch


def finished(group: int, index: int, value: float | None, num_tokens: int, **more: Any) -> StoreFinished:
    outcome = SampleOutcome(
        lease_id=1, group_id=group, sample_index=index, num_tokens=num_tokens, first_version=0, last_version=0,
        verdict_kind="scored", value=value,
    )  # fmt: skip
    return StoreFinished(**{"purpose": "train", "outcome": outcome, "value": value, "is_kept": True, **more})


def test_a_steps_row_has_the_signs_of_its_samples_and_the_next_one_starts_empty():
    signs = AnswerSigns(held_out=["judge"])
    repeated = "go on and on go on and on go on and on"
    forged = Verdict(kind="scored", value=1.0, components={"judge": 0.5, FORGED_TEXT: 1.0})
    plain = Verdict(kind="scored", value=0.0, components={"judge": 0.0})
    signs.record(finished(0, 0, 1.0, 9), forged, repeated)
    signs.record(finished(0, 1, 0.0, 3), plain, "not looked at")
    signs.record(finished(1, 0, 0.0, 3), plain, "a+b")
    row = signs.row()
    assert row == {
        "forged_share": 0.5, "repeated_share": pytest.approx(0.5), "symbol_share": pytest.approx(1 / 6),
        "held_out/judge": pytest.approx(0.5 / 3), "held_out_error/judge": pytest.approx(0.125),
        "length_reward_correlation": 1.0,
    }  # fmt: skip
    assert signs.row() == {}


def test_samples_that_are_not_trained_on_do_not_count():
    signs, verdict = AnswerSigns(), Verdict(kind="scored", value=1.0)
    signs.record(finished(0, 0, 1.0, 9, purpose="eval"), verdict, "a")
    signs.record(finished(0, 0, 1.0, 9, is_kept=False), verdict, "a")
    signs.record(finished(0, 0, None, 9), Verdict(kind="crashed"), "a")
    assert signs.row() == {}


def test_truncated_answers_are_left_out_of_the_correlation():
    signs, verdict = AnswerSigns(), Verdict(kind="scored", value=1.0)
    for group in range(4):
        signs.record(finished(group, 0, 0.0, 100), verdict, "a", is_cut=True)
        signs.record(finished(group, 1, 1.0, 10 + group), verdict, "a")
        signs.record(finished(group, 2, 1.0, 12 + group), verdict, "a")
    assert "length_reward_correlation" not in signs.row()


def test_correlation_within_groups_ignores_differences_between_them():
    rng = np.random.default_rng(0)
    groups = [[(x + 100 * g, x - 100.0 * g + rng.normal(0, 0.1)) for x in range(4)] for g in range(20)]
    assert within_groups(groups) > 0.99
    assert np.isnan(within_groups([[(1, 1.0), (1, 0.0)]]))


def test_a_hack_is_said_once_while_the_run_goes_on():
    said: list[tuple[str, str]] = []
    watch = HackingWatch(RunFolder(Path("/nowhere")), lambda *words: said.append(words))
    for step in range(1, 31):
        watch.offer({"kind": "step", "step": step, "reward_mean": 0.5, "forged_share": step / 30, "loss": 1.0})
        watch.offer({"kind": "pulse"})
        if step == 8:
            assert [kind for kind, _ in said] == ["environment_forged"]


def test_a_fall_is_said_that_only_the_values_of_the_rows_show():
    """Twenty of 200 rows are no longer solved, and none is solved instead."""
    said = {}
    for has_values in (True, False):
        found: list[str] = []
        watch = HackingWatch(RunFolder(Path("/r")), lambda kind, words, found=found: found.append(kind))
        for step in range(1, 31):
            watch.offer({"kind": "step", "step": step, "reward_mean": 0.4 + 0.01 * step + 0.01 * (step % 2)})
            if step % 5 == 0:
                solved = [1.0] * (120 if step < 20 else 100) + [0.0] * (80 if step < 20 else 100)
                row = {"version": step, "num_scored": 200, "num_rows": 200}
                if has_values:
                    watch.offer({"kind": "eval_values", **row, "num_samples": 1, "values": solved})
                watch.offer({"kind": "eval", **row, "accuracy": sum(solved) / 200})
        said[has_values] = found
    assert said == {True: ["reward_hacked"], False: []}


def test_a_resumed_run_continues_with_the_rows_of_earlier_sessions():
    rows = [{"kind": "step", "step": step, "reward_mean": 0.5, "forged_share": step / 30} for step in range(1, 12)]
    evaluated = {"kind": "eval", "version": 11, "accuracy": 0.5}
    for note in ([], [{"kind": "note", "note": "environment_forged", "text": "said"}]):
        said: list[str] = []
        watch = HackingWatch(RunFolder(Path("/nowhere")), lambda kind, words, said=said: said.append(kind))
        watch.restore([*rows, evaluated, {"kind": "step", "step": None}, *note])
        assert said == []
        watch.offer({"kind": "step", "step": 10, "reward_mean": 0.5, "forged_share": 0.4})
        assert said == ([] if note else ["environment_forged"])
        assert [row["step"] for row in watch._steps] == list(range(1, 11)), "step 11 was discarded"
        assert watch._evals == []


def test_a_reward_that_has_not_risen_is_no_hack():
    said: list[tuple[str, str]] = []
    watch = HackingWatch(RunFolder(Path("/nowhere")), lambda *words: said.append(words))
    for step in range(1, 31):
        watch.offer({"kind": "step", "step": step, "reward_mean": 0.5, "forged_share": step / 30})
    assert len(said) == 1
    for version, accuracy in ((0, 0.9), (30, 0.5)):
        watch.offer({"kind": "eval", "version": version, "accuracy": accuracy, "num_scored": 500, "answers": []})
    assert len(said) == 1, "the reward has not risen"


def test_a_long_run_is_looked_at_about_fifty_times_in_its_steps(monkeypatch):
    watch, looks = HackingWatch(RunFolder(Path("/nowhere")), lambda *words: None), []
    monkeypatch.setattr(watch, "_look", lambda: looks.append(1))
    for step in range(1, 2_001):
        watch.offer({"kind": "step", "step": step})
    assert len(looks) < 300
