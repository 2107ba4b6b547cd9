"""Rows are passed over by what they gave; every position is taken or passed over once; a resume goes on as before."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from real_ledger import apply_all
from schedules import run_schedule
from valid_config import make

from controller.config.curriculum_settings import CurriculumSettings
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.draws import Taken
from controller.coordinator.settings import CoordinatorSettings
from controller.data.curriculum import Curriculum, RowOutcome
from controller.data.job_rows import JobRows
from controller.data.table import DrawOrder
from controller.ledger.audit import audit
from controller.ledger.ledger import Ledger

NUM_ROWS = 10


def curriculum(order: DrawOrder, chosen: CurriculumSettings, **changes: Any) -> Curriculum:
    keys: dict[str, Any] = {"seed": 5, "max_draws": order.max_draws, **changes}
    return Curriculum(chosen, row_of=order.row_index, num_rows=order.num_rows, **keys)


def test_rows_without_an_outcome_come_in_the_order_of_the_data() -> None:
    draws = curriculum(DrawOrder(NUM_ROWS, seed=1), CurriculumSettings())
    assert [draws.take() for _ in range(30)] == [Taken(draw) for draw in range(30)]


def test_rows_are_drawn_as_often_as_their_band_says() -> None:
    """Solved and failed rows with their `keep`, others always: within four standard errors over 400 epochs."""
    order = DrawOrder(NUM_ROWS, seed=1)
    chosen = CurriculumSettings.model_validate(
        {"bands": [{"up_to": 0.0, "keep": 0.5}, {"up_to": 0.9, "keep": 1.0}, {"up_to": 1.0, "keep": 0.2}]}
    )
    draws, taken = curriculum(order, chosen), Counter[int]()
    rewards = {0: [0.0, 0.0], 1: [1.0, 1.0]}
    while (draw := draws.take().draw) < 401 * NUM_ROWS:
        row = order.row_index(draw)
        taken[row] += draw >= NUM_ROWS
        draws.ended(draw, rewards.get(row, [0.0, 1.0]), 7.0)
    assert {taken[row] for row in range(2, NUM_ROWS)} == {400}
    for row, keep in ((0, 0.5), (1, 0.2)):
        assert abs(taken[row] - 400 * keep) < 4 * (400 * keep * (1 - keep)) ** 0.5


def test_a_rate_is_of_the_newest_groups_and_what_was_passed_over_is_named_with_it() -> None:
    bands = [{"up_to": 0.5, "keep": 1.0}, {"up_to": 1.0, "keep": 1e-9}]
    chosen = CurriculumSettings.model_validate({"memory": 2, "success_reward": 0.5, "bands": bands})
    draws = curriculum(DrawOrder(2, seed=0, shuffle=False), chosen)
    draws.ended(0, [0.0, 0.4], 10.0)  # two more push it out of the memory
    draws.ended(0, [0.5, 0.4], 20.0)
    draws.ended(0, [1.0, 1.0], 30.0)
    taken = draws.take()
    assert taken.draw == 1
    assert [(one.draw, one.rate, one.num_tokens) for one in taken.skipped] == [(0, 0.75, 25.0)]


def test_where_all_rows_are_passed_over_one_is_taken_after_a_whole_pass_and_at_the_end_of_the_data() -> None:
    bands = [{"up_to": 1.0, "keep": 1e-9}]
    chosen, order = CurriculumSettings.model_validate({"bands": bands}), DrawOrder(4, seed=0, epochs=2)
    outcomes = [RowOutcome(draw, [0.0], 1.0) for draw in range(4)]
    draws = curriculum(order, chosen, outcomes=outcomes, first=1)
    assert [one.draw for one in draws.take().skipped] == [1, 2, 3]
    assert draws.has_more
    last = draws.take()
    assert (last.draw, [one.draw for one in last.skipped]) == (7, [5, 6])
    assert not draws.has_more


@settings(max_examples=num_examples(60), deadline=None)
@given(seed=st.integers(0, 10_000), stop=st.integers(0, 60), epochs=st.sampled_from([None, 6, 20]))
def test_a_resumed_run_chooses_as_one_that_was_never_stopped(seed: int, stop: int, epochs: int | None) -> None:
    """Groups finish in any order; the state is made again from what the ledger has: positions and outcomes."""
    order = DrawOrder(NUM_ROWS, seed=seed, epochs=epochs)
    chosen, rng = CurriculumSettings(memory=rng_memory(seed)), random.Random(seed)
    draws = curriculum(order, chosen, seed=seed)
    running: list[int] = []
    ended: list[RowOutcome] = []
    seen: list[int] = []
    for number in range(70):
        if number == stop:
            again = curriculum(order, chosen, seed=seed, first=seen[-1] + 1 if seen else 0, outcomes=ended)
            assert (again._next, again._memory) == (draws._next, draws._memory)
            draws = again
        if draws.has_more and (not running or rng.random() < 0.6):
            taken = draws.take()
            seen += [*(one.draw for one in taken.skipped), taken.draw]
            running.append(taken.draw)
        elif running:
            draw = running.pop(rng.randrange(len(running)))
            rate = (order.row_index(draw) % 3) / 2
            ended.append(RowOutcome(draw, [float(rng.random() < rate) for _ in range(4)], rng.randrange(9) / 2))
            draws.ended(*ended[-1])
    assert seen == list(range(len(seen))), "every position is taken or passed over, once and in order"
    fresh = curriculum(order, chosen, seed=seed, first=draws._next, outcomes=ended)
    while draws.has_more and draws._next < 500:
        assert draws.take() == fresh.take()


def rng_memory(seed: int) -> int:
    return 1 + seed % 3


@pytest.mark.parametrize("seed", range(4))
def test_a_run_with_crashes_gives_each_group_one_position_and_its_ledger_gives_the_memory_back(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The virtual cluster with the real ledger; `LedgerModel` asserts that no position is lost or taken twice."""
    order, made = DrawOrder(7, seed=seed), []
    bands = [{"up_to": 0.5, "keep": 0.5}, {"up_to": 1.0, "keep": 0.3}]
    chosen = CurriculumSettings.model_validate({"success_reward": 0.5, "bands": bands})
    restore = Coordinator.restore.__func__  # type: ignore[attr-defined]
    init = Coordinator.__init__

    def fresh(self: Coordinator, settings: CoordinatorSettings) -> None:
        init(self, settings)
        made.append(curriculum(order, chosen))
        self._state.groups.draws = made[-1]

    def restored(cls: type[Coordinator], settings: CoordinatorSettings, state: Any, draws: Any = None) -> Coordinator:
        outcomes = [RowOutcome(*one) for one in ledger.row_outcomes(group_size=settings.group_size)]
        again = curriculum(order, chosen, first=state.next_draw, outcomes=outcomes)
        assert again._memory == made[-1]._memory
        assert again._next == made[-1]._next
        coordinator: Coordinator = restore(cls, settings, state, again)
        made.append(again)
        return coordinator

    monkeypatch.setattr(Coordinator, "__init__", fresh)
    monkeypatch.setattr(Coordinator, "restore", classmethod(restored))
    settings = CoordinatorSettings(
        groups_per_step=2, group_size=2, num_steps=8, max_staleness=2, num_workers=2, max_filtered_batches=0
    )
    with Ledger(tmp_path) as ledger:
        cluster = run_schedule(seed, settings=settings, mirror=lambda entries: apply_all(ledger, entries))
        assert cluster.end is not None
        assert ledger.load() == cluster.ledger.load()
    assert audit(tmp_path).is_clean
    assert cluster.ledger.skipped


def test_a_band_that_is_missing_or_out_of_order_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"the last band must have `up_to: 1\.0`"):
        CurriculumSettings.model_validate({"bands": [{"up_to": 0.5, "keep": 1.0}]})
    with pytest.raises(ValueError, match=r"must be strictly increasing, but they are 0\.5, 0\.5, 1"):
        CurriculumSettings.model_validate({"bands": [{"up_to": end, "keep": 1.0} for end in (0.5, 0.5, 1.0)]})
    with pytest.raises(ValueError, match="greater than 0"):
        CurriculumSettings.model_validate({"bands": [{"up_to": 1.0, "keep": 0.0}]})


def test_rows_of_a_job_make_the_curriculum_of_their_order() -> None:
    config = make(data__train={"generator": "running_sum", "limit": 5}, data__curriculum={}, data__epochs=2)
    draws = JobRows.load(config).curriculum(CurriculumSettings(), seed=3, first=9, outcomes=())
    assert draws.take() == Taken(9)
    assert not draws.has_more
