"""What an override stands in for in the file, and what stays; what is said where a file or a list has no such entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from controller.config.loading import _remove, apply_overrides, find_config, load_config
from controller.config.problems import ConfigError
from controller.config.yaml_document import Document, parse_document

INIT = "model:\n  init: {model_type: qwen3}\n  tokenizer: bytes\n"
GENERATED = "data:\n  train: {generator: running_sum, options: {bias: 0.5}, limit: 9}\n"


def applied(text: str, *overrides: str) -> tuple[dict[str, Any], list[str]]:
    """The document's data afterwards, and the notes; there are no problems."""
    document = parse_document(text, "job.yaml")
    notes, problems = apply_overrides(document, overrides)
    assert problems == []
    return document.data, notes


# ---------------------------------------------------------------- models


def test_path_takes_the_place_of_a_made_model_with_its_tokenizer() -> None:
    data, notes = applied(INIT, "model.path=x")
    assert data == {"model": {"path": "x"}}
    assert notes == [
        "model.path on the command line replaces model.init", "model.path on the command line replaces model.tokenizer",
    ]  # fmt: skip


def test_tokenizer_that_is_given_along_stays() -> None:
    data, notes = applied(INIT, "model.path=x", "model.tokenizer=y")
    assert data == {"model": {"path": "x", "tokenizer": "y"}}
    assert notes == ["model.path on the command line replaces model.init"]


def test_tokenizer_of_a_model_that_was_a_path_before_stays() -> None:
    data, notes = applied("model: {path: a, tokenizer: t}\n", "model.path=x")
    assert (data, notes) == ({"model": {"path": "x", "tokenizer": "t"}}, [])


@pytest.mark.parametrize("override", ["model.init={model_type: llama}", "model.init.model_type=llama"])
def test_made_model_takes_the_place_of_a_path_and_leaves_the_tokenizer(override: str) -> None:
    data, notes = applied("model: {path: a, tokenizer: t}\n", override)
    assert data == {"model": {"init": {"model_type": "llama"}, "tokenizer": "t"}}
    assert notes == ["model.init on the command line replaces model.path"]


@pytest.mark.parametrize("overrides", [("model.path=null",), ("model.path=x", "model.init={model_type: llama}"), ()])
def test_nothing_is_replaced_by_nothing_nor_where_both_are_given(overrides: tuple[str, ...]) -> None:
    data, notes = applied(INIT, *overrides)
    assert notes == []
    assert "init" in data["model"]
    assert data["model"]["tokenizer"] == "bytes"


def test_key_that_only_begins_like_a_path_replaces_nothing() -> None:
    assert applied(INIT, "model.path_like=x")[1] == []


# ---------------------------------------------------------------- sources


@pytest.mark.parametrize("kind", ["path", "dataset"])
@pytest.mark.parametrize("key", ["data.train", "data.eval", "warm_start.data"])
def test_source_takes_the_place_of_another_kind_with_all_that_belongs_to_it_but_the_limit(kind: str, key: str) -> None:
    section, leaf = key.split(".")
    text = f"{section}:\n  {leaf}: {{generator: running_sum, options: {{bias: 0.5}}, limit: 9}}\n"
    data, notes = applied(text, f"{key}.{kind}=x")
    assert data == {section: {leaf: {kind: "x", "limit": 9}}}
    assert notes == [f"{key}.{kind} on the command line replaces {key}.{{generator, options}}"]


def test_source_of_the_same_kind_keeps_what_belongs_to_it() -> None:
    text = "data: {train: {path: a, columns: {prompt: q}, limit: 9}}\n"
    data, notes = applied(text, "data.train.path=x")
    assert (data, notes) == ({"data": {"train": {"path": "x", "columns": {"prompt": "q"}, "limit": 9}}}, [])


def test_source_without_anything_to_replace_says_nothing() -> None:
    assert applied("data: {train: {limit: 9}}\n", "data.train.path=x") == (
        {"data": {"train": {"path": "x", "limit": 9}}},
        [],
    )
    assert applied("data: {}\n", "data.train.path=x") == ({"data": {"train": {"path": "x"}}}, [])


def test_two_kinds_on_the_command_line_replace_nothing_and_are_refused_later() -> None:
    data, notes = applied(GENERATED, "data.train.path=x", "data.train.dataset=y")
    assert notes == []
    assert data["data"]["train"]["generator"] == "running_sum"


def test_source_that_is_taken_away_replaces_nothing() -> None:
    data, notes = applied(GENERATED, "data.train.path=null")
    assert notes == []
    assert data["data"]["train"]["generator"] == "running_sum"


# ---------------------------------------------------------------- mode and evaluation


@pytest.mark.parametrize(
    ("file", "overrides", "bound", "notes"),
    [
        (3, ["mode=sync"], None, ["mode=sync sets staleness.max_staleness to 0 instead of 3"]),
        (0, ["mode=sync"], 0, []),
        (3, ["mode=one_step_off"], None, ["mode=one_step_off sets staleness.max_staleness to 1 instead of 3"]),
        (3, ["mode=async"], 3, []),
        (3, ["mode=odd"], 3, []),
        (3, ["mode=7"], 3, []),
        (3, ["mode=sync", "staleness.max_staleness=2"], 2, []),
        (3, [], 3, []),
    ],
)
def test_mode_takes_the_place_of_the_files_bound_and_of_no_other(
    file: int, overrides: list[str], bound: int | None, notes: list[str]
) -> None:
    data, said = applied(f"staleness: {{max_staleness: {file}, on_stale: drop}}\n", *overrides)
    assert data["staleness"] == {"on_stale": "drop"} | ({} if bound is None else {"max_staleness": bound})
    assert said == notes


@pytest.mark.parametrize(
    ("overrides", "interruption", "notes"),
    [
        (["mode=one_step_off"], None, ["mode=one_step_off sets rollout.interruption to drain"]),
        (["mode=one_step_off", "rollout.interruption=recompute"], "recompute", []),
        (["mode=async"], "keep_kv", []),
    ],
)
def test_one_step_off_takes_the_place_of_the_files_interruption(
    overrides: list[str], interruption: str | None, notes: list[str]
) -> None:
    data, said = applied("rollout: {interruption: keep_kv}\n", *overrides)
    assert data["rollout"].get("interruption") == interruption
    assert said == notes


@pytest.mark.parametrize(
    ("overrides", "every", "notes"),
    [
        (["data.eval=null"], None, ["data.eval=null disables evaluation, so eval.every_steps is set to 0"]),
        (["data.eval=null", "eval.every_steps=4"], 4, []),
        (["data.eval.limit=4"], 5, []),
        ([], 5, []),
    ],
)
def test_evaluation_that_is_taken_away_takes_its_interval_along(
    overrides: list[str], every: int | None, notes: list[str]
) -> None:
    text = "data: {eval: {generator: running_sum}}\neval: {every_steps: 5, at_start: true}\n"
    data, said = applied(text, *overrides)
    assert data["eval"] == {"at_start": True} | ({} if every is None else {"every_steps": every})
    assert said == notes


def test_interval_of_zero_is_nothing_to_take_away() -> None:
    assert applied("eval: {every_steps: 0}\n", "data.eval=null")[1] == []


# ---------------------------------------------------------------- places


@pytest.mark.parametrize(
    ("text", "override", "fault"),
    [
        ("a: [1, 2, 3]\n", "a.3=x", "the list has no entry `3`; its entries are 0 to 2"),
        ("a: [1]\n", "a.1.b=x", "the list has no entry `1`; its only entry is 0"),
        ("a: []\n", "a.0=x", "the list has no entry `0`; the list is empty"),
        ("a: {b: 5}\n", "a.b.c=x", "`a.b` is 5 and has no key `c`"),
        ("a: text\n", "a.b=x", "`a` is 'text' and has no key `b`"),
    ],
)
def test_place_that_is_not_there_is_named_with_what_is(text: str, override: str, fault: str) -> None:
    _, (problem,) = apply_overrides(parse_document(text, "f"), [override])
    assert (problem.what, problem.where) == (fault, "command line")


def test_entries_of_lists_are_set_whole_and_in_part_and_sections_are_made_on_the_way() -> None:
    data, _ = applied("a: [1, {b: 2}]\nn: null\n", "a.0=5", "a.1.c=6", "n.x.y=7", "new.deep.key=8", "--dashed=9")
    assert data == {"a": [5, {"b": 2, "c": 6}], "n": {"x": {"y": 7}}, "new": {"deep": {"key": 8}}, "dashed": 9}


@pytest.mark.parametrize("text", ["a", "=1", "a..b=1", ".a=1", "a.=1", " =1", "--=1"])
def test_text_that_is_no_override_says_what_one_is(text: str) -> None:
    _, (problem,) = apply_overrides(parse_document("a: 1\n", "f"), [text])
    assert (problem.keys, problem.what) == ((), f"`{text}` is not a valid override")
    assert (problem.remedy, problem.where) == ("write key.path=value", "command line")


# ---------------------------------------------------------------- files


def test_configuration_near_a_missing_one_is_named_here_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstarts.yml").write_text("")
    with pytest.raises(UserError, match=r"did you mean quickstarts\.yml\? shipped configs: ") as raised:
        find_config("quickstart1.yaml")
    assert (raised.value.what, raised.value.where) == ("there is no such config file", "quickstart1.yaml")
    with pytest.raises(UserError) as raised:
        find_config("nothing_like_it_at_all")
    assert str(raised.value.remedy).startswith("shipped configs: ")
    for elsewhere in ("other/quickstart.yaml", "configs/x/quickstart"):
        with pytest.raises(UserError, match="there is no such config file"):
            find_config(elsewhere)


def test_home_is_understood_and_the_source_is_relative_where_it_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "job.yaml").write_text(INIT + GENERATED)
    (tmp_path / "here" / "job.yaml").write_text(INIT + GENERATED)
    assert find_config("~/job.yaml") == tmp_path / "job.yaml"
    assert load_config("~/job.yaml", ["model.init.max_position_embeddings=4096"]).source == str(tmp_path / "job.yaml")
    here = load_config(str(tmp_path / "here" / "job.yaml"), ["model.init.max_position_embeddings=4096"])
    assert here.source == "job.yaml"


def test_problems_of_a_file_come_in_the_order_of_its_lines_behind_those_of_overrides(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("seed: x\n" + INIT + GENERATED + "num_steps: y\ngroup_size: z\n")
    with pytest.raises(ConfigError) as raised:
        load_config(str(path), ["nothing"])
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("command line: `nothing` is not a valid override")
    assert [line.split(": ")[1] for line in lines[1:]] == ["seed", "num_steps", "group_size"]


@pytest.mark.parametrize(
    ("path", "value"),
    [("a.0.b", 1), ("a.1.b", None), ("a.x.b", None), ("a.0", None), ("a.0.c", None), ("n.x", None), ("t.x.y", None)],
)
def test_key_is_taken_out_where_it_is_and_nothing_where_it_is_not(path: str, value: int | None) -> None:
    data = {"a": [{"b": 1}], "n": None, "t": "text"}
    assert _remove(data, path.split(".")) == value
    assert data == {"a": [{} if value else {"b": 1}], "n": None, "t": "text"}


def test_another_engine_takes_the_section_of_the_files_engine_unless_it_has_other_keys() -> None:
    def loaded(*overrides: str, **section: Any) -> tuple[Any, list[str]]:
        engine = {"kind": "sglang", "python": "/x/python", "sglang": section}
        document = Document({"rollout": {"engine": engine}})
        notes, problems = apply_overrides(document, overrides)
        assert not problems
        return document.data["rollout"]["engine"], notes

    kind, python = "rollout.engine.kind=vllm", "rollout.engine.kind on the command line replaces rollout.engine.python"
    engine, notes = loaded(kind, tp_size=2)
    assert engine == {"kind": "vllm", "vllm": {"tp_size": 2}}
    assert notes == [python, f"{kind}: rollout.engine.sglang is used as rollout.engine.vllm"]
    engine, notes = loaded(kind, "rollout.engine.vllm.tp_size=4", "rollout.engine.python=/y", tp_size=2, port=7)
    assert engine == {"kind": "vllm", "python": "/y", "vllm": {"tp_size": 4, "port": 7}}
    engine, notes = loaded(kind, tp_size=2, quantization="fp8")
    assert (engine["sglang"], "vllm" in engine, notes) == ({"tp_size": 2, "quantization": "fp8"}, False, [python])
    engine, notes = loaded("rollout.engine.kind=embedded", tp_size=2)
    assert engine["sglang"] == {"tp_size": 2}
    engine, notes = loaded("rollout.engine.kind=sglang", tp_size=2)
    assert (engine["sglang"], engine["python"], notes) == ({"tp_size": 2}, "/x/python", [])
