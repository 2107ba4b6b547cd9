"""Limits of tables and draws: what travels, where draws end, which part of a source is held out."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.errors import UserError
from controller.config.run_config import RunConfig
from controller.data.sources import RawRows
from controller.data.table import DrawOrder, RowReader, _plain, load_demonstrations, load_eval, load_train


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), 0])
def test_integers_of_64_bits_with_or_without_a_sign_travel(value: int) -> None:
    assert _plain({"n": value, "deep": [{"n": value}]}, "here") == {"n": value, "deep": [{"n": value}]}


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_larger_integers_are_refused_with_their_place_however_deep_they_lie(value: int) -> None:
    for row in ({"n": value}, {"deep": [{"n": value}]}):
        with pytest.raises(
            UserError, match="`n` contains an integer of more than 64 bits" if "n" in row else "64 bits"
        ) as e:
            _plain(row, "rows.jsonl:7")
        assert (e.value.where, e.value.remedy) == ("rows.jsonl:7", "write the number as text")


def test_values_that_are_no_plain_data_are_left_behind_and_numbers_that_are_not_finite_are_absent() -> None:
    row = {"picture": b"x", "list": [1, b"x"], "tuple": (1, "a"), "nan": float("nan"), "inf": [float("inf")], 3: "key"}
    assert _plain(row, "here") == {"tuple": [1, "a"], "nan": None, "inf": [None], "3": "key"}


def test_without_held_out_rows_or_a_warm_start_there_is_no_table() -> None:
    config = RunConfig.model_validate({"data": {"train": {"generator": "running_sum"}}})
    assert load_eval(config) is None
    assert load_demonstrations(config) is None


def test_held_out_rows_are_of_another_part_of_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, int]] = []
    rows = RawRows.of([{"prompt": "p", "answer": "1", "response": "r"}], lambda index: "here")
    monkeypatch.setattr(
        "controller.data.table.read_source",
        lambda source, *, key, split, seed: asked.append((key, split, seed)) or rows,
    )
    sources: list[dict[str, Any]] = [{"generator": "running_sum"}, {"dataset": "org/name"}]
    for source in sources:
        data = {"train": source, "eval": source, "seed": 4}
        config = RunConfig.model_validate({"data": data, "seed": 9, "warm_start": {"data": source}})
        load_train(config)
        load_eval(config)
        load_demonstrations(config)
    assert asked == [
        ("data.train", "train", 4), ("data.eval", "eval", 4), ("warm_start.data", "train", 4),
        ("data.train", "train", 4), ("data.eval", "test", 4), ("warm_start.data", "train", 4),
    ]  # fmt: skip


def test_draws_end_exactly_with_the_last_epoch_and_none_comes_before_the_first() -> None:
    order = DrawOrder(3, 7, epochs=2)
    assert order.max_draws == 6
    assert sorted(order.row_index(draw) for draw in range(6)) == [0, 0, 1, 1, 2, 2]
    for draw in (6, -1):
        with pytest.raises(IndexError, match=f"draw {draw} is out of range: draws must be from 0 to 5"):
            order.row_index(draw)
    endless = DrawOrder(3, 7)
    assert endless.max_draws is None
    assert endless.row_index(10**9) in (0, 1, 2)
    with pytest.raises(IndexError):
        endless.row_index(-1)


USER, ASSISTANT = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


def reader(row: dict[str, Any], key: str = "data.train", **columns: str | None) -> RowReader:
    return RowReader.plan(RawRows.of([row], lambda index: "here"), columns, key)


@pytest.mark.parametrize(
    "message",
    [
        7,
        "text",
        ["user", "u"],
        {"content": "u"},
        {"role": "user"},
        {"role": 3, "content": "u"},
        {"role": None, "content": "u"},
    ],
)
def test_message_without_a_role_in_words_and_content_is_refused(message: Any) -> None:
    row = {"messages": [message, USER], "answer": "1"}
    with pytest.raises(
        UserError, match="each message in `messages` must have a `role`, and a `content` or `tool_calls`"
    ) as raised:
        reader(row).read(row, "rows.jsonl:7")
    assert raised.value.where == "rows.jsonl:7"


def test_messages_are_copied_and_a_message_may_have_more_than_role_and_content() -> None:
    row = {"messages": [{**USER, "name": "x", "content": None}], "answer": "1"}
    assert reader(row).read(row, "here") == {
        "messages": [{"role": "user", "content": None, "name": "x"}],
        "answer": "1",
    }


@pytest.mark.parametrize(
    ("row", "read"),
    [
        ({"messages": [USER], "response": "r"}, {"messages": [USER], "response": "r"}),
        ({"messages": [ASSISTANT, USER], "response": "r"}, {"messages": [ASSISTANT, USER], "response": "r"}),
        ({"messages": [USER, ASSISTANT], "x": 1}, {"messages": [USER], "response": "a"}),
        ({"messages": [USER, ASSISTANT, USER, ASSISTANT]}, {"messages": [USER, ASSISTANT, USER, ASSISTANT]}),
        ({"prompt": "p", "response": " "}, "no response in `response`"),
        ({"prompt": "p", "response": 3}, "no response in `response`"),
        ({"prompt": "p", "spans": []}, "no `spans`"),
    ],
)
def test_demonstration_ends_with_the_assistants_answer_or_has_a_column_for_it(row: dict[str, Any], read: Any) -> None:
    assert reader(row, "warm_start.data").read(row, "here") == read


def test_column_of_the_first_row_decides_for_all_and_null_is_no_value() -> None:
    first = {"prompt": None, "question": "q", "answer": None, "solution": r"\boxed{2}", "level": 3}
    read = reader(first).read(first, "here")
    assert read == {"prompt": "q", "answer": "2", "solution": r"\boxed{2}", "level": 3}
    nested = {"ask": {"text": "q"}, "gold": 2, "a.b": "x"}
    assert reader(nested, prompt="ask.text", answer="gold").read(nested, "here") == {
        "prompt": "q", "answer": "2", "ask": {"text": "q"}, "a.b": "x",
    }  # fmt: skip
    assert reader(nested, prompt="a.b", answer=None).read(nested, "here") == {
        "prompt": "x", "ask": {"text": "q"}, "gold": 2,
    }  # fmt: skip


@pytest.mark.parametrize("prompt", ["right", [USER]])
def test_columns_that_are_mapped_take_the_place_of_those_with_the_names_of_the_roles(prompt: Any) -> None:
    row = {"prompt": "other", "answer": "other", "ask": prompt, "gold": "right", "x": 1}
    read = reader(row, prompt="ask", answer="gold").read(row, "here")
    asked = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
    assert read == {**asked, "answer": "right", "x": 1}


def test_missing_column_is_named_with_the_way_to_map_it() -> None:
    with pytest.raises(UserError, match=r"no column for the answer \(looked for answer, final_answer, solution") as e:
        reader({"prompt": "p", "x": 1})
    assert e.value.remedy == (
        "map the column with data.train.columns.answer=YOUR_COLUMN; existing columns: prompt, x; "
        "columns.answer=null means that there are no answers"
    )
    with pytest.raises(UserError, match="no column for the prompt") as e:
        reader({"promt": "p", "answer": 1})
    assert e.value.remedy == "map the column with data.train.columns.prompt=promt; existing columns: promt, answer"
    with pytest.raises(UserError, match="no column `ask`") as e:
        reader({"prompt": "p", "answer": 1}, prompt="ask")
    remedy = "existing columns: prompt, answer; specify the correct column with data.train.columns.prompt=..."
    assert e.value.remedy == remedy
    with pytest.raises(UserError, match="no column for the response") as e:
        reader({"prompt": "p", "x": 1}, "warm_start.data")
    assert "columns.answer=null" not in str(e.value.remedy)
