"""Claims about the rows of a job: which row each draw takes, how many are evaluated, what a resume compares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from valid_config import make

import controller.data.job_rows
from controller.config.run_config import RunConfig
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
    for key, other, most in (("final_prompts", "num_prompts", 1), ("num_prompts", "final_prompts", 4)):
        rows = JobRows.load(make(**LIMITS, **{f"eval__{key}": asked, f"eval__{other}": most}))
        found = {"final_prompts": rows.num_final, "num_prompts": rows.num_periodic}
        assert found == {key: number, other: most}
    rows = JobRows.load(make(**LIMITS, eval__num_prompts=asked, eval__final_prompts=1))
    assert rows.num_periodic == 1, "a periodic evaluation takes the first rows of a final one"


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
    for name in ("load_training", "load_eval"):
        monkeypatch.setattr(controller.data.job_rows, name, lambda config: pytest.fail("it was read already"))
    rows = JobRows.load(config, tables=known)
    assert rows.train_table is known.train
    assert rows.eval_table is known.eval


def test_named_sources_are_sets_of_one_evaluation(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 5)):
        rows = [json.dumps({"prompt": f"{name}{row}", "answer": str(row)}) for row in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    sets = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b")}
    data = {"train": {"generator": "running_sum", "limit": 4}, "eval": sets}
    config = RunConfig.model_validate(
        {"data": data, "eval": {"num_prompts": 2, "final_prompts": 4, "num_samples": 2, "temperature": 1.0}}
    )
    assert config.data.eval is None
    assert RunConfig.model_validate(config.model_dump()) == config
    rows = JobRows.load(config, needs_train=False)
    prompts = [rows.eval(number)["prompt"] for number in range(rows.num_final)]
    assert prompts[::2] == prompts[1::2] == ["a0", "a1", "b0", "b1", "a2", "b2", "b3"]
    assert rows.num_periodic == 8
    assert rows.fingerprints["eval.num_samples"] == "2"


def test_a_setting_of_one_set_is_merged_into_the_mapping() -> None:
    data = {"train": {"generator": "running_sum"}, "eval": {"a": {"generator": "running_sum"}}}
    config = RunConfig.model_validate({"data": {**data, "eval_sets": {"a": {"limit": 3}}}})
    assert (config.data.eval_sets["a"].generator, config.data.eval_sets["a"].limit) == ("running_sum", 3)
    with pytest.raises(ValueError, match="generatr"):
        RunConfig.model_validate({"data": {**data, "eval": {"generatr": "running_sum"}}})
