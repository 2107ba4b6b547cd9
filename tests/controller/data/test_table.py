"""Rows out of files, data sets and generators; what columns mean; the order of draws."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.errors import OperationError, UserError
from controller.config.data_settings import DataSource
from controller.config.run_config import RunConfig
from controller.data.table import DrawOrder, Table, _plain, final_answer, load_demonstrations, load_eval, load_train

GSM8K = {"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 1,234"}
MATH = {"problem": "Find x.", "level": "Level 1", "solution": "So $x = \\boxed{\\frac{1}{2}}$."}


def config_of(train: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    return RunConfig.model_validate({"data": {"train": train or {"generator": "running_sum"}}, **more})


def rows_of(path: Path | str, **more: Any) -> Table:
    return load_train(config_of({"path": str(path), **more}))


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refusal(path: Path | str, **more: Any) -> str:
    with pytest.raises(UserError) as caught:
        rows_of(path, **more)
    return str(caught.value)


class TestColumns:
    def test_gsm8k_as_published(self, tmp_path: Path) -> None:
        row = rows_of(write_lines(tmp_path / "g.jsonl", GSM8K))[0]
        assert row == {"prompt": "How many?", "answer": "1234", "solution": GSM8K["answer"]}

    def test_math_as_published(self, tmp_path: Path) -> None:
        row = rows_of(write_lines(tmp_path / "m.jsonl", MATH))[0]
        assert row["prompt"] == "Find x."
        assert row["answer"] == r"\frac{1}{2}"
        assert row["solution"] == MATH["solution"]
        assert row["level"] == "Level 1"

    def test_mapping_reaches_into_nested_columns(self, tmp_path: Path) -> None:
        file = write_lines(tmp_path / "v.jsonl", {"ask": "1+1?", "reward_model": {"ground_truth": 2}})
        row = rows_of(file, columns={"prompt": "ask", "answer": "reward_model.ground_truth"})[0]
        assert (row["prompt"], row["answer"]) == ("1+1?", "2")

    def test_answer_may_be_declared_absent(self, tmp_path: Path) -> None:
        file = write_lines(tmp_path / "p.jsonl", {"prompt": "Tell me.", "topic": "cats"})
        assert rows_of(file, columns={"answer": None})[0] == {"prompt": "Tell me.", "topic": "cats"}

    def test_messages_are_prompts(self, tmp_path: Path) -> None:
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        for column in ("prompt", "messages"):
            row = rows_of(write_lines(tmp_path / "c.jsonl", {column: messages, "answer": "1"}))[0]
            assert row == {"messages": messages, "answer": "1"}

    def test_answered_messages_are_refused_for_rl(self, tmp_path: Path) -> None:
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
        assert "ends with an assistant message" in refusal(
            write_lines(tmp_path / "c.jsonl", {"messages": messages, "answer": "1"})
        )

    def test_rows_without_a_final_answer_are_left_out_and_reported(self, tmp_path: Path) -> None:
        table = rows_of(write_lines(tmp_path / "m.jsonl", MATH, {**MATH, "solution": r"It is $\boxed{}$."}, MATH))
        assert len(table) == 2
        assert table.skipped == [f"{tmp_path}/m.jsonl:2: no answer in `solution`"]
        assert table.where(1) == f"{tmp_path}/m.jsonl:3"

    def test_columns_that_are_no_plain_data_are_left_behind(self, tmp_path: Path) -> None:
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame(
            {
                "prompt": ["p"],
                "answer": [3],
                "picture": [b"\x00"],
                "when": [pandas.Timestamp("2026-01-02")],
                "x": [[1, 2]],
            }
        )
        frame.to_parquet(tmp_path / "t.parquet")
        row = rows_of(tmp_path / "t.parquet")[0]
        assert row == {"prompt": "p", "answer": "3", "when": "2026-01-02T00:00:00", "x": [1, 2]}

    def test_missing_column_names_the_nearest(self, tmp_path: Path) -> None:
        file = write_lines(tmp_path / "t.jsonl", {"prompts": "p", "anwser": "1"})
        assert "data.train.columns.prompt=prompts" in refusal(file)
        assert "data.train.columns.answer=anwser" in refusal(file, columns={"prompt": "prompts"})
        assert "similar columns: prompts" in refusal(file, columns={"prompt": "promts"})

    def test_missing_column_names_the_two_nearest(self, tmp_path: Path) -> None:
        file = write_lines(tmp_path / "t.jsonl", {"prompt1": "p", "prompt2": "p", "prompt3": "p", "answer": "1"})
        said = refusal(file, columns={"prompt": "prompts"})
        assert sum(f"prompt{number}" in said for number in (1, 2, 3)) == 2

    def test_a_byte_order_mark_at_the_beginning_of_a_file_is_no_part_of_its_first_line(self, tmp_path: Path) -> None:
        mark, line = b"\xef\xbb\xbf", b'{"prompt": "p", "answer": "1"}\n'
        file = tmp_path / "t.jsonl"
        file.write_bytes(mark + line + b"\n" + line)
        assert [row["prompt"] for row in rows_of(file)] == ["p", "p"]
        file.write_bytes(mark + b"\n" + line)
        assert [row["prompt"] for row in rows_of(file)] == ["p"]

    def test_column_missing_in_a_later_row_names_its_line(self, tmp_path: Path) -> None:
        assert "t.jsonl:2: there is no column `question`" in refusal(
            write_lines(tmp_path / "t.jsonl", GSM8K, {"answer": "1"})
        )

    @pytest.mark.parametrize(
        ("row", "words"),
        [
            ({"prompt": " ", "answer": "1"}, "is empty"),
            ({"prompt": 3, "answer": "1"}, "text or a list of messages, not int"),
            ({"prompt": [], "answer": "1"}, "is empty"),
            ({"prompt": [{"role": "user"}], "answer": "1"}, "a `role`, and a `content` or `tool_calls`"),
            ({"prompt": "p", "answer": "1", "big": 2**70}, "64 bits"),
            ({"prompt": "p\ud800", "answer": "1"}, "an unpaired surrogate"),
        ],
    )
    def test_bad_row_is_refused_with_its_line(self, tmp_path: Path, row: dict[str, Any], words: str) -> None:
        file = write_lines(tmp_path / "t.jsonl", {"prompt": "p", "answer": "1"}, row)
        text = refusal(file)
        assert f"{file}:2: " in text
        assert words in text

    @pytest.mark.parametrize(
        ("value", "answer"),
        [
            ("so\n#### -1,000", "-1000"),
            (r"\boxed{a} then \boxed{\{1, 2\}}", r"\{1, 2\}"),
            (r"\boxed{\begin{pmatrix} 1 \\ {2} \end{pmatrix}}", r"\begin{pmatrix} 1 \\ {2} \end{pmatrix}"),
            (r"$\boxed 5$.", "5"),
            (r"\boxed{unclosed", None),
            (r"\boxed{}", None),
            (" 7 ", "7"),
            (7, "7"),
            (0, "0"),
            (0.5, "0.5"),
            (False, "False"),
            ("", None),
            (None, None),
            ([], None),
            (["a"], ["a"]),
        ],
    )
    def test_final_answer(self, value: object, answer: object) -> None:
        assert final_answer(value) == answer


class TestFiles:
    def test_every_kind_gives_the_same_rows(self, tmp_path: Path) -> None:
        rows = [{"prompt": f"p{index}", "answer": str(index)} for index in range(5)]
        lines = "\ufeff" + "\n\n".join(map(json.dumps, rows))
        (tmp_path / "a.jsonl").write_text(lines)
        with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
            file.write("\n".join(map(json.dumps, rows)))
        (tmp_path / "c.json").write_text(json.dumps(rows, indent=1))
        tables = [rows_of(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "c.json")]
        assert all(list(table) == rows for table in tables)
        assert len({table.fingerprint for table in tables}) == 1
        assert tables[0].where(1) == f"{tmp_path}/a.jsonl:3"
        assert list(rows_of(tmp_path / "a.jsonl", limit=2)) == rows[:2]

    def test_a_glob_joins_files_in_order_of_name(self, tmp_path: Path) -> None:
        for name in ("b", "a", "c"):
            write_lines(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{i}", "answer": "1"} for i in range(2)))
        assert [row["prompt"] for row in rows_of(tmp_path / "*.jsonl")] == ["a0", "a1", "b0", "b1", "c0", "c1"]
        table = rows_of(tmp_path / "*.jsonl", limit=3)
        assert len(table) == 3
        assert table.where(2) == f"{tmp_path}/b.jsonl:1"

    def test_missing_file_names_the_nearest(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "train.jsonl", GSM8K)
        assert "train.jsonl" in refusal(tmp_path / "trian.jsonl").partition("->")[2]
        assert "does not exist" in refusal(tmp_path / "none" / "train.jsonl")
        assert "train.jsonl" in refusal(tmp_path / "*.parquet").partition("->")[2]
        assert "such as" in refusal(tmp_path)

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("a.jsonl", b"", "contains no rows"),
            ("a.jsonl", b"\n \n", "contains no rows"),
            ("a.jsonl", b'{"prompt": "p", "answer": "1"}\n{"prompt": \n', "a.jsonl:2: the line is not valid JSON"),
            ("a.jsonl", b"[1]\n", "a.jsonl:1: a row must be a JSON object, not list"),
            ("a.jsonl", b"[\n{}\n]\n", "rename it to .json"),
            ("a.jsonl", b'{"prompt": "\xff"}\n', "a.jsonl:1: the file is not UTF-8 text"),
            ("a.jsonl", b"[" * 100_000, "not valid JSON"),
            ("a.json", b'{"a": 1}', "the file must contain a list of rows"),
            ("a.json", b'{"a": 1}\n{"a": 2}', "rename it to .jsonl"),
            ("a.json", b"[1]", "a row must be an object"),
            ("a.json", b"[]", "no rows"),
            ("a.json", b"", "contains no rows"),
            ("a.jsonl.gz", b"not gzip", "cannot be read"),
            ("a.parquet", b"not parquet", "cannot be read as Parquet"),
            ("a.txt", b"x", "one of the file types .jsonl"),
        ],
    )
    def test_unusable_content_is_refused_with_its_place(
        self, tmp_path: Path, name: str, content: bytes, words: str
    ) -> None:
        (tmp_path / name).write_bytes(content)
        assert words in refusal(tmp_path / name)

    def test_a_gzip_cut_short_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(GSM8K).encode() * 100)[:-20])
        assert "cannot be read" in refusal(tmp_path / "a.jsonl.gz")

    def test_a_file_that_changes_under_a_run_is_noticed(self, tmp_path: Path) -> None:
        file = write_lines(tmp_path / "t.jsonl", GSM8K, GSM8K)
        table = rows_of(file)
        file.write_text("x" * file.stat().st_size)
        with pytest.raises(OperationError, match="changed"):
            table[1]


class TestDatasets:
    @pytest.fixture
    def datasets(self) -> Any:
        return pytest.importorskip("datasets")

    def test_a_folder_saved_to_disk_is_read(self, tmp_path: Path, datasets: Any) -> None:
        saved = datasets.DatasetDict({"train": datasets.Dataset.from_list([GSM8K] * 3)})
        saved.save_to_disk(str(tmp_path / "d"))
        table = load_train(config_of({"dataset": str(tmp_path / "d"), "limit": 2}))
        assert [row["answer"] for row in table] == ["1234", "1234"]
        with pytest.raises(UserError, match="splits of the dataset: train"):
            load_train(config_of({"dataset": str(tmp_path / "d"), "split": "test"}))

    def test_a_folder_of_files_is_read(self, tmp_path: Path, datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        (tmp_path / "d").mkdir()
        write_lines(tmp_path / "d" / "train.jsonl", GSM8K)
        assert load_train(config_of({"dataset": str(tmp_path / "d")}))[0]["answer"] == "1234"

    def test_what_cannot_be_loaded_is_one_sentence(self, tmp_path: Path, datasets: Any) -> None:
        (tmp_path / "d").mkdir()
        with pytest.raises(UserError, match="cannot be loaded"):
            load_train(config_of({"dataset": str(tmp_path / "d")}))

    def test_the_missing_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(UserError, match=r"areal-like\[datasets\]"):
            load_train(config_of({"dataset": "x"}))


class TestGenerators:
    def test_running_sum_gives_a_finite_table(self) -> None:
        config = config_of({"generator": "running_sum", "limit": 30}, seed=3)
        rows = list(load_train(config))
        assert len(rows) == 30
        assert all(re.fullmatch(r"\d(\+\d)+=", row["prompt"]) and row["answer"] for row in rows)
        assert list(load_train(config)) == rows

    def test_training_and_evaluation_share_no_prompt(self) -> None:
        config = RunConfig.model_validate(
            {
                "data": {
                    "train": {"generator": "running_sum", "limit": 500},
                    "eval": {"generator": "running_sum", "limit": 99},
                }
            }
        )
        held_out = load_eval(config)
        assert held_out is not None
        assert not {row["prompt"] for row in load_train(config)} & {row["prompt"] for row in held_out}

    def test_demonstrations_are_as_many_as_the_steps_take(self) -> None:
        start = {"data": {"generator": "running_sum"}, "sft": {"steps": 3, "batch_size": 4}}
        table = load_demonstrations(config_of(warm_start=start))
        assert table is not None
        assert len(table) == 12
        assert set(table[0]) == {"prompt", "response"}

    def test_demonstrations_come_from_files_too(self, tmp_path: Path) -> None:
        chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
        called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}
        cases = [
            (GSM8K, {"prompt": "How many?", "response": GSM8K["answer"]}),
            (MATH, {"prompt": "Find x.", "response": MATH["solution"]}),
            ({"prompt": "p", "completion": "c"}, {"prompt": "p", "response": "c"}),
            ({"messages": chat}, {"messages": chat[:1], "response": "a"}),
            ({"messages": [*chat, *chat], "x": 1}, {"messages": [*chat, *chat]}),
            (
                {"messages": chat, "tools": [{"name": "f"}]},
                {"messages": chat[:1], "response": "a", "tools": [{"name": "f"}]},
            ),
            (
                {"messages": [chat[0], called], "tools": "[]"},
                {"messages": [chat[0], {**called, "content": ""}], "tools": "[]"},
            ),
            (
                {"messages": [chat[0], {**chat[1], "reasoning_content": "r"}]},
                {"messages": [chat[0], {**chat[1], "reasoning_content": "r"}]},
            ),
            (
                {"prompt": "p", "spans": [["a", True], ["b", False]]},
                {"prompt": "p", "spans": [["a", True], ["b", False]]},
            ),
        ]
        for row, expected in cases:
            file = write_lines(tmp_path / "d.jsonl", row)
            table = load_demonstrations(config_of(warm_start={"data": {"path": str(file)}}))
            assert table is not None
            assert list(table) == [expected]

    def test_fields_that_a_typed_source_adds_to_calls_are_left_out(self, tmp_path: Path) -> None:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

        user, answer = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
        calls = [
            {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
            for name, arguments in (("f", {"x": 1}), ("g", {"y": 2}))
        ]
        row = {"messages": [user, calls[0], calls[1], answer], "tools": [{"name": "f", "strict": True}, {"name": "g"}]}
        file = tmp_path / "d.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([row]), file)
        table = load_demonstrations(config_of(warm_start={"data": {"path": str(file)}}))
        assert table is not None
        expected = [user, *({**one, "content": ""} for one in calls), answer]
        assert list(table) == [{"messages": expected, "tools": row["tools"]}]

    def test_a_users_function_is_called(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own_rows.py").write_text(
            "def rows(seed, split, *, limit, options):\n"
            "    n = 0\n"
            "    while True:\n"
            "        yield {'prompt': f'{split} {seed} {n}', 'answer': options['a']}\n"
            "        n += 1\n"
            "def bad(seed, split, *, limit, options):\n    raise KeyError('x')\n"
            "def odd(seed, split, *, limit, options):\n    return [3]\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        source = {"generator": "own_rows:rows", "limit": 3, "options": {"a": "7"}}
        assert load_train(config_of(source, seed=5))[2] == {"prompt": "train 5 2", "answer": "7"}
        for name, words in (
            ("own_rows:bad", "raised KeyError"),
            ("own_rows:odd", "must be a dict, not int"),
            ("own_rows:row", "did you mean own_rows:rows"),
            ("no_such_rows:f", "cannot be imported"),
        ):
            with pytest.raises(UserError, match=words):
                load_train(config_of({"generator": name}))

    def test_wrong_options_are_refused(self) -> None:
        with pytest.raises(UserError, match="options"):
            load_train(config_of({"generator": "running_sum", "options": {"biass": 1}}))


class TestDrawOrder:
    @settings(max_examples=num_examples(60), deadline=None)
    @given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**40), epoch=st.integers(0, 5), shuffle=st.booleans())
    def test_every_epoch_takes_every_row_once(self, num_rows: int, seed: int, epoch: int, shuffle: bool) -> None:
        order = DrawOrder(num_rows, seed, shuffle)
        draws = range(epoch * num_rows, (epoch + 1) * num_rows)
        assert sorted(order.row_index(draw) for draw in draws) == list(range(num_rows))
        assert {order.epoch(draw) for draw in draws} == {epoch}

    def test_is_a_pure_function_of_the_seed(self) -> None:
        draws = [DrawOrder(100, 7).row_index(draw) for draw in range(300)]
        assert draws == [DrawOrder(100, 7).row_index(draw) for draw in range(300)]
        assert [DrawOrder(100, 7).row_index(draw) for draw in reversed(range(300))] == draws[::-1]
        assert draws != [DrawOrder(100, 8).row_index(draw) for draw in range(300)]
        assert draws[:100] != draws[100:200]

    def test_the_order_of_a_seed_never_changes(self) -> None:
        assert [DrawOrder(8, 1).row_index(draw) for draw in range(8)] == PINNED_ORDER

    def test_unshuffled_is_in_file_order(self) -> None:
        assert [DrawOrder(3, 1, shuffle=False).row_index(draw) for draw in range(7)] == [0, 1, 2, 0, 1, 2, 0]

    def test_ends_with_its_epochs(self) -> None:
        order = DrawOrder(3, 1, epochs=2)
        assert order.max_draws == 6
        order.row_index(5)
        with pytest.raises(IndexError):
            order.row_index(6)
        assert DrawOrder(3, 1).max_draws is None


PINNED_ORDER = [3, 6, 1, 2, 5, 0, 7, 4]
"""A run resumed under a later Python must draw as before: this list may not change."""


Published = Callable[[str], Path]


class TestPublishedRows:
    def test_gsm8k_answers_are_the_published_ones(self, published: Published) -> None:
        table = rows_of(published("gsm8k/test.jsonl"))
        assert len(table) == 1319
        assert all(row["answer"] == row["final_answer"] for row in table)

    def test_math_answers_out_of_solutions_are_the_published_ones(self, published: Published) -> None:
        table = rows_of(published("math/math500.jsonl"), columns={"answer": "solution"})
        stated = rows_of(published("math/math500.jsonl"))
        assert len(table) == len(stated) == 500
        assert sum(a["answer"] == b["answer"] for a, b in zip(table, stated, strict=True)) >= 495


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_rows_from_a_pipe_or_a_device_are_refused_in_words(tmp_path, kind):
    """Reading them would wait indefinitely, or never end."""
    path = tmp_path / "rows.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"named {kind}" if kind == "pipe" else kind):
        rows_of(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json"])
def test_row_with_a_number_that_is_not_finite_is_refused_with_its_line(tmp_path: Path, name: str, number: str) -> None:
    lines = ['{"prompt": "1", "answer": 1}', f'{{"prompt": "2", "answer": {number}}}']
    text = "[\n" + ",\n".join(lines) + "\n]" if name.endswith(".json") else "\n".join(lines)
    file = tmp_path / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    said = refusal(file)
    assert f"{file}:{3 if name.endswith('.json') else 2}" in said
    assert f"contains {number}" in said
    assert "write null" in said


def test_line_of_such_a_number_is_found_in_a_document_of_many_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[\n  {\n    "prompt": "1",\n    "answer": NaN\n  }\n]\n')
    assert f"{file}:4" in refusal(file)


def test_generator_that_gives_such_a_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nan_rows.py").write_text(
        "def rows(seed, split, *, limit, options): return [{'prompt': '1', 'answer': float('nan')}]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="row 0: `answer` is nan"):
        load_train(config_of({"generator": "nan_rows:rows"}))


def test_absent_values_and_truth_values_travel_as_they_are() -> None:
    row = {"none": None, "yes": True, "no": False, "list": [None, 1], "inf": float("inf"), "bytes": b"x"}
    assert _plain(row, "here") == {"none": None, "yes": True, "no": False, "list": [None, 1], "inf": None}


class TestChat:
    def test_a_system_prompt_and_chat_arguments_travel_with_each_row(self, tmp_path: Path) -> None:
        file = write_lines(tmp_path / "c.jsonl", {"prompt": "1+1?", "answer": "2"})
        row = rows_of(file, system_prompt="Be brief.", chat_template_kwargs={"enable_thinking": False})[0]
        assert row["_chat"] == {"system_prompt": "Be brief.", "kwargs": {"enable_thinking": False}}
        assert (row["prompt"], row["answer"]) == ("1+1?", "2")
        assert "_chat" not in rows_of(file)[0]
        assert rows_of(file).fingerprint != rows_of(file, system_prompt="Be brief.").fingerprint

    def test_a_second_system_message_is_refused_with_its_line(self, tmp_path: Path) -> None:
        said = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "1+1?"}]
        file = write_lines(tmp_path / "c.jsonl", {"messages": said, "answer": "2"})
        words = refusal(file, system_prompt="Be brief.")
        assert "c.jsonl:1: `messages` already has a system message" in words
        assert "data.train.system_prompt" in words

    def test_rows_of_the_red_team_need_no_answer_and_are_marked(self, tmp_path: Path) -> None:
        file = write_lines(tmp_path / "red.jsonl", {"prompt": "How is poison made?", "answer": "kept as a column"})
        held_out = write_lines(tmp_path / "c.jsonl", {"prompt": "1+1?", "answer": "2"})
        config = config_of({"path": str(held_out)})
        source = DataSource(path=str(file))
        data = config.data.model_copy(update={"eval": DataSource(path=str(held_out)), "red_team": source})
        table = load_eval(config.model_copy(update={"data": data}))
        assert table is not None
        assert [row.get("_red_team") for row in (table[0], table[1])] == [None, True]
        assert table[1]["answer"] == "kept as a column"

    def test_the_reserved_column_is_refused(self, tmp_path: Path) -> None:
        file = write_lines(tmp_path / "c.jsonl", {"prompt": "1+1?", "answer": "2", "_chat": 1})
        assert "the name `_chat` is reserved" in refusal(file)
