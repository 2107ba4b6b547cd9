"""Lengths of drawn and of trained samples: by cause, across a resume, and significant only where they are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_run import made_run, step_rows
from real_ledger import apply_all
from valid_config import make

from controller.config.derived import advise
from controller.coordinator.effects import (
    DropGroup,
    Effect,
    FilterGroup,
    RecordBatch,
    RecordGroup,
    StoreFinished,
    StorePartial,
)
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.snapshot import BatchGroup
from controller.ledger.ledger import Ledger
from controller.ledger.sample_lengths import SampleLengths, length_figures, mean_length
from controller.report.diagnosis import diagnose
from controller.report.overview import figures
from controller.telemetry.summary import Tally


def finished(group_id: int, index: int, num_tokens: int, is_kept: bool = True) -> StoreFinished:
    value = 1.0 if is_kept else None
    outcome = SampleOutcome(
        lease_id=1, group_id=group_id, sample_index=index, num_tokens=num_tokens, first_version=0, last_version=0,
        verdict_kind="scored" if is_kept else "timed_out", value=value,
    )  # fmt: skip
    return StoreFinished(purpose="train", outcome=outcome, value=value, is_kept=is_kept)


def partial(group_id: int, index: int, start: int, num_tokens: int) -> StorePartial:
    return StorePartial(lease_id=1, group_id=group_id, sample_index=index, start=start, skip=0, num_tokens=num_tokens)


def batch(step: int, groups: dict[int, tuple[int, ...]], *, is_replay: bool = False) -> RecordBatch:
    members = tuple(BatchGroup(group_id=g, sample_indices=kept, first_version=0) for g, kept in groups.items())
    return RecordBatch(step=step, lineage="l0", groups=members, is_replay=is_replay)


STORY: list[Effect] = [
    *(RecordGroup(group_id=g, version=0, started=g) for g in range(1, 6)),
    finished(1, 0, 3), finished(1, 1, 5),
    finished(2, 0, 4), finished(2, 1, 40, is_kept=False),
    batch(1, {1: (0, 1), 2: (0,)}),
    finished(3, 0, 6), partial(3, 1, 0, 10), partial(3, 1, 10, 7),
    DropGroup(group_id=3, reason="timeout", detail=""),
    finished(4, 0, 8), finished(4, 1, 8),
    FilterGroup(group_id=4, value=1.0),
    finished(5, 0, 9), partial(5, 1, 0, 2),
]  # fmt: skip


def test_samples_are_counted_by_what_becomes_of_them_when_their_group_ends() -> None:
    lengths = SampleLengths()
    for effect in STORY:
        lengths.record(effect)
    found = lengths.summary()
    assert found["trained"] == {"samples": 3, "tokens": 12, "mean": 4.0, "p50": 4, "p99": 5}
    assert found["lost"] == {
        "filtered": {"samples": 2, "tokens": 16, "mean": 8.0, "p50": 8, "p99": 8},
        "not_scored": {"samples": 1, "tokens": 40, "mean": 40.0, "p50": 40, "p99": 40},
        "timeout": {"samples": 2, "tokens": 23, "mean": 11.5, "p50": 6, "p99": 17, "unfinished": 1},
    }
    assert found["drawn"]["samples"] == 8, "group 5 is still in flight"
    longer_than_17 = 40  # the only answer that got so far says what the cut one would have become
    assert found["drawn"]["mean"] == pytest.approx((3 + 5 + 4 + 40 + 6 + longer_than_17 + 8 + 8) / 8, abs=0.01)
    expected = 4 / ((3 + 5 + 4 + 40 + 6 + longer_than_17) / 6) - 1
    assert found["shift"] == pytest.approx(expected, abs=1e-4), "filtered left out"
    lengths.record(batch(1, {1: (0, 1), 2: (0,)}, is_replay=True))
    assert lengths.summary() == found, "a replay trains on the same samples again"


def test_a_resumed_run_goes_on_from_the_lengths_in_its_ledger(tmp_path: Path) -> None:
    whole = SampleLengths()
    with Ledger(tmp_path) as ledger:
        apply_all(ledger, [(effect, [0] * getattr(effect, "num_tokens", 1)) for effect in STORY])
        resumed = SampleLengths()
        resumed.restore(ledger.length_facts(), ledger.load().live)
    for effect in STORY:
        whole.record(effect)
    assert resumed.summary() == whole.summary() != {}
    for lengths in (resumed, whole):
        lengths.record(finished(5, 1, 20))
        lengths.record(batch(2, {5: (0, 1)}))
    assert resumed.row() == whole.row()
    assert whole.row()["trained_len_p99"] == 20


def drawn_by(lose: Any, *, seed: int = 0, num_groups: int = 400) -> SampleLengths:
    """Groups of four with log-normal lengths, of which `lose` says by their longest answer who is dropped."""
    rng, lengths = random.Random(seed), SampleLengths()
    for group_id in range(num_groups):
        centre = rng.gauss(3.2, 0.6)
        tokens = [max(1, int(rng.lognormvariate(centre, 0.8))) for _ in range(4)]
        for index, length in enumerate(tokens):
            lengths.record(finished(group_id, index, length))
        if lose(rng, max(tokens)):
            lengths.record(DropGroup(group_id=group_id, reason="stale", detail=""))
        else:
            lengths.record(batch(group_id, {group_id: (0, 1, 2, 3)}))
    return lengths


def test_drops_of_the_longest_are_a_shift_far_beyond_noise() -> None:
    lengths = drawn_by(lambda rng, longest: longest > 120)
    found = lengths.summary()
    assert found["shift"] < -0.15
    assert found["shift_z"] < -6
    assert found["trained"]["p99"] < 0.6 * found["drawn"]["p99"]


def test_the_error_of_the_shift_is_that_of_leaving_out_each_block_in_turn() -> None:
    lengths, rng = SampleLengths(), random.Random(5)
    tokens = {group_id: [rng.randrange(1, 60) + group_id for _ in range(2)] for group_id in range(60)}
    is_kept = {group_id: group_id < 20 or max(two) < 80 for group_id, two in tokens.items()}
    for group_id, two in tokens.items():
        for index, length in enumerate(two):
            lengths.record(finished(group_id, index, length))
        drop = DropGroup(group_id=group_id, reason="stale", detail="")
        lengths.record(batch(group_id, {group_id: (0, 1)}) if is_kept[group_id] else drop)

    def shift(left_out: int | None) -> float:
        found = {group_id: two for group_id, two in tokens.items() if group_id % 20 != left_out}
        trained = [length for group_id, two in found.items() if is_kept[group_id] for length in two]
        return float(np.mean(trained) / np.mean(list(found.values())) - 1)

    error = np.sqrt(19 * np.var([shift(block) for block in range(20)]))
    found = lengths.summary()
    assert found["shift"] == pytest.approx(shift(None), abs=1e-4)
    assert found["shift_z"] == pytest.approx(shift(None) / error, abs=0.051)
    assert found["shift_z"] < -2, "far enough from 0 that the comparison means something"


@pytest.mark.parametrize("seed", range(20))
def test_drops_at_random_are_no_significant_shift(seed: int) -> None:
    assert abs(drawn_by(lambda rng, longest: rng.random() < 0.2, seed=seed).summary()["shift_z"]) < 4


def test_lengths_of_cut_answers_are_estimated_from_those_that_got_further() -> None:
    rng, lengths = random.Random(3), []
    uncut, cut = np.zeros((2, 2, 1000), np.int64)
    for _ in range(4000):
        length, limit = min(999, max(1, int(rng.lognormvariate(3.2, 0.8)))), rng.choice((20, 60, 10_000))
        lengths.append(length)
        uncut[0, length] += 1
        cut[int(length > limit), min(length, limit)] += 1
    plain = float((cut[0] * np.arange(1000)).sum() / cut[0].sum())
    assert plain < 0.8 * np.mean(lengths), "without the cut ones the mean would be far too small"
    assert mean_length(cut) == pytest.approx(np.mean(lengths), rel=0.04)
    assert mean_length(uncut) == pytest.approx(np.mean(lengths), rel=1e-9)
    assert length_figures(uncut)["p50"] == sorted(lengths)[1999]
    assert length_figures(uncut)["p99"] == sorted(lengths)[3959]


def test_drops_of_groups_whose_answers_never_finish_are_a_shift() -> None:
    rng, lengths = random.Random(1), SampleLengths()
    for group_id in range(400):
        tokens = [max(1, int(rng.lognormvariate(3.2, 1.0))) for _ in range(4)]
        limit = rng.choice((100, 150, 200))
        for index, length in enumerate(tokens):
            lengths.record(finished(group_id, index, length) if length <= limit else partial(group_id, index, 0, limit))
        is_late = max(tokens) > limit
        drop = DropGroup(group_id=group_id, reason="timeout", detail="")
        lengths.record(drop if is_late else batch(group_id, {group_id: (0, 1, 2, 3)}))
    found = lengths.summary()
    assert found["lost"]["timeout"]["unfinished"] > 30
    assert found["shift"] < -0.1
    assert found["shift_z"] < -4


def test_a_run_that_loses_nothing_has_no_shift() -> None:
    row = drawn_by(lambda rng, longest: False, num_groups=20).row()
    assert row["length_shift"] == row["length_shift_z"] == 0.0
    assert all(row[f"trained_len_{key}"] == row[f"drawn_len_{key}"] for key in ("mean", "p50", "p99"))
    assert SampleLengths().row() == SampleLengths().summary() == {}


# ---------------------------------------------------------------- where it is said


def shifted(lengths: SampleLengths) -> Any:
    tally = Tally(lengths=lengths)
    summary = tally.summary({"audit": "clean"}, status="finished", wall_s=1.0, prepare_s=0.0)
    return made_run(steps=step_rows(**lengths.row()), summary=summary)


def test_the_diagnosis_warns_of_trained_answers_shorter_than_drawn_ones() -> None:
    found = diagnose(shifted(drawn_by(lambda rng, longest: longest > 120)))
    (warning,) = [one for one in found if "shorter than generated ones" in one.title]
    assert warning.severity in ("warning", "bad")
    assert "samples stale (mean" in warning.detail
    assert "on_stale: wait" in warning.advice


def test_the_diagnosis_says_nothing_of_a_shift_within_noise() -> None:
    found = diagnose(shifted(drawn_by(lambda rng, longest: rng.random() < 0.04)))
    assert not [one for one in found if "than generated ones" in one.title]


def test_the_page_shows_trained_against_drawn_lengths() -> None:
    (shown,) = [one for one in figures(shifted(drawn_by(lambda rng, longest: longest > 120)))
                if one.label == "tokens per answer"]  # fmt: skip
    assert "drawn; median" in shown.note


def test_validate_says_which_settings_lose_long_answers() -> None:
    assert "shorter answers" not in "\n".join(advise(make()))
    assert "staleness.on_stale: drop loses" in "\n".join(advise(make(staleness__on_stale="drop")))
    short = make(staleness__group_timeout_s=10.0, sampling__max_new_tokens=512)
    assert "staleness.group_timeout_s: 512 tokens in 10 s need 51 tokens/s" in "\n".join(advise(short))
