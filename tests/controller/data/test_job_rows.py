"""Claims about the rows of a job: which row each draw takes, how many are evaluated, what a resume compares."""

from __future__ import annotations

import pytest
from valid_config import make

import controller.data.job_rows
from controller.data.job_rows import JobRows, Tables
from controller.data.table import DrawOrder, load_eval, load_train

LIMITS = {
    "data__train": {"generator": "running_sum", "limit": 5},
    "data__eval": {"generator": "running_sum", "limit": 4},
}


def test_each_draw_takes_the_row_of_the_draw_order_and_each_evaluation_row_is_its_own() -> None:
    config = make(**LIMITS)
    rows, train, held_out = JobRows.load(config), load_train(config), load_eval(config)
    assert held_out is not None
    order = DrawOrder.of(config, train)
    assert [rows.train(draw) for draw in range(12)] == [train[order.row_index(draw)] for draw in range(12)]
    assert len({rows.train(draw)["prompt"] for draw in range(5)}) == 5, "one epoch takes every row once"
    assert [rows.eval(index) for index in range(4)] == list(held_out)
    assert not {row["prompt"] for row in held_out} & {row["prompt"] for row in train}


@pytest.mark.parametrize(("asked", "number"), [(None, 4), (3, 3), (4, 4), (9, 4)])
def test_an_evaluation_has_the_rows_asked_for_and_never_more_than_there_are(asked: int | None, number: int) -> None:
    for key, other in (("final_prompts", "num_prompts"), ("num_prompts", "final_prompts")):
        rows = JobRows.load(make(**LIMITS, **{f"eval__{key}": asked, f"eval__{other}": 1}))
        found = {"final_prompts": rows.num_final, "num_prompts": rows.num_periodic}
        assert found == {key: number, other: 1}


def test_without_held_out_rows_nothing_is_evaluated() -> None:
    rows = JobRows.load(make(data__eval=None))
    assert (rows.num_final, rows.num_periodic, list(rows.fingerprints)) == (0, 0, ["data.train"])


def test_draws_end_with_the_epochs_and_a_job_without_training_rows_has_none() -> None:
    assert JobRows.load(make(**LIMITS, data__epochs=3)).max_draws == 15
    assert JobRows.load(make(**LIMITS)).max_draws is None
    evaluation = JobRows.load(make(**LIMITS), needs_train=False)
    assert evaluation.max_draws == 0
    assert list(evaluation.fingerprints) == ["data.eval"]


def test_a_resume_compares_the_rows_of_both_tables_by_their_keys() -> None:
    config = make(**LIMITS)
    train, held_out = load_train(config), load_eval(config)
    assert held_out is not None
    expected = {"data.train": train.fingerprint, "data.eval": held_out.fingerprint}
    assert JobRows.load(config).fingerprints == expected
    assert train.fingerprint != held_out.fingerprint


def test_tables_that_were_read_already_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(**LIMITS)
    known = Tables(load_train(config), load_eval(config))
    for name in ("load_train", "load_eval"):
        monkeypatch.setattr(controller.data.job_rows, name, lambda config: pytest.fail("it was read already"))
    rows = JobRows.load(config, tables=known)
    assert rows.train_table is known.train
    assert rows.eval_table is known.eval
