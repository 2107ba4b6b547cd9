"""A file that grows: what an epoch uses, what is recorded, and that a resume draws the same rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from valid_config import SMALL

from areal_like.errors import OperationError, UserError
from controller.cli import jobs
from controller.cli.main import main
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.data.job_rows import JobRows
from controller.data.live import RECORD, LiveOrder, LiveTable, read_extents
from controller.data.table import DrawOrder, load_train
from controller.run_folder.run_folder import RunFolder
from controller.runs.verify.data_rows import read_rows
from controller.runtime.session import RunSession


def lines(*numbers: int) -> str:
    return "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1), "terms": [n, 1]}) + "\n" for n in numbers)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rows.jsonl"
    file.write_text(lines(0, 1, 2))
    return file


def config_of(path: Path, *more: str) -> RunConfig:
    words = [one for one in SMALL if "train.limit" not in one]
    return load_config(
        "quickstart", [*words, "runs_dir=runs", f"data.train={{path: {path}, follow: true}}", *more]
    ).config


def prompts(rows: JobRows, draws: range) -> list[str]:
    return [str(rows.train(draw)["prompt"]) for draw in draws]


def test_new_rows_enter_at_the_next_epoch_and_each_is_recorded(path: Path, tmp_path: Path) -> None:
    rows = JobRows.load(config_of(path, "data.shuffle=false"))
    rows.record_epochs(tmp_path)
    assert prompts(rows, range(2)) == ["0+1=", "1+1="]
    append(path, lines(3) + '{"prompt": "4+')
    assert prompts(rows, range(2, 3)) == ["2+1="], "the epoch is not finished"
    assert prompts(rows, range(3, 7)) == ["0+1=", "1+1=", "2+1=", "3+1="], "an incomplete line is not a row"
    append(path, '1=", "answer": "5", "terms": [4, 1]}\n\n{\n' + lines(5))
    assert prompts(rows, range(7, 13)) == ["0+1=", "1+1=", "2+1=", "3+1=", "4+1=", "5+1="]
    assert rows.train_table is not None
    assert len(rows.train_table.skipped) == 1
    content = path.read_bytes()
    extents = read_extents(tmp_path)
    assert [(one.epoch, one.first_draw, one.rows) for one in extents] == [(0, 0, 3), (1, 3, 4), (2, 7, 6)]
    for one in extents:
        assert one.sha256 == hashlib.sha256(content[: one.offset]).hexdigest()
    entered = [row for one in extents for row in one.new_rows]
    assert [row.where for row in entered] == [f"{path}:4", f"{path}:5", f"{path}:8"]
    for row in entered:
        line = content[row.offset :].split(b"\n")[0]
        assert row.sha256 == hashlib.sha256(line).hexdigest()


@pytest.mark.parametrize("shuffle", ["true", "false"])
def test_without_new_rows_the_order_is_that_of_a_file(path: Path, tmp_path: Path, shuffle: str) -> None:
    config = config_of(path, f"data.shuffle={shuffle}")
    rows = JobRows.load(config)
    plain = JobRows.load(load_config("quickstart", [
        *(one for one in SMALL if "train.limit" not in one), f"data.train={{path: {path}}}", f"data.shuffle={shuffle}",
    ]).config)  # fmt: skip
    assert prompts(rows, range(30)) == prompts(plain, range(30))
    assert rows.fingerprints["data.train"] == plain.fingerprints["data.train"]


def test_a_resume_draws_the_same_rows_whatever_was_appended(path: Path, tmp_path: Path) -> None:
    config = config_of(path)
    rows = JobRows.load(config)
    rows.record_epochs(tmp_path)
    first = prompts(rows, range(3))
    append(path, lines(3, 4))
    drawn = first + prompts(rows, range(3, 10))
    append(path, lines(5, 6, 7))
    (tmp_path / RECORD).write_bytes((tmp_path / RECORD).read_bytes() + b'{"epoch": 2, "fir')
    again = JobRows.load(config, root=tmp_path)
    again.record_epochs(tmp_path)
    assert again.fingerprints == rows.fingerprints
    assert prompts(again, range(10)) == drawn
    assert sorted(prompts(again, range(13, 21))) == [f"{n}+1=" for n in range(8)]
    assert [(one.epoch, one.rows) for one in read_extents(tmp_path)] == [(0, 3), (1, 5), (2, 5), (3, 8)]


def test_a_changed_file_is_refused_at_a_resume_and_a_shorter_one_ends_the_run(path: Path, tmp_path: Path) -> None:
    config = config_of(path)
    rows = JobRows.load(config)
    rows.record_epochs(tmp_path)
    append(path, lines(3))
    prompts(rows, range(4))
    content = path.read_text()
    path.write_text(content.replace("3+1", "4+1"))
    with pytest.raises(UserError, match="differ from those that epoch 1 of the run used"):
        JobRows.load(config, root=tmp_path)
    path.write_text(lines(0))
    with pytest.raises(OperationError, match="became shorter"):
        prompts(rows, range(7, 8))


def test_a_line_that_is_changed_in_place_is_never_drawn(path: Path, tmp_path: Path) -> None:
    rows = JobRows.load(config_of(path, "data.shuffle=false"))
    rows.record_epochs(tmp_path)
    assert prompts(rows, range(2)) == ["0+1=", "1+1="]
    path.write_text(path.read_text().replace('"answer": "2"', '"answer": "9"'))
    assert prompts(rows, range(1)) == ["0+1="]
    with pytest.raises(
        OperationError,
        match=r"rows\.jsonl:2 the file was changed while the run was reading it; restore the original lines",
    ):
        rows.train(1)


def test_an_edit_that_moves_the_end_is_not_read_as_new_rows(path: Path, tmp_path: Path) -> None:
    rows = JobRows.load(config_of(path, "data.shuffle=false"))
    rows.record_epochs(tmp_path)
    path.write_text(path.read_text().replace('"answer": "3"', '"answer": "3333"') + lines(3))
    with pytest.raises(OperationError, match="lines may only be appended"):
        rows.train(3)
    assert len(read_extents(tmp_path)) == 1


def test_skipped_lines_are_logged_and_recorded(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = JobRows.load(config_of(path))
    rows.record_epochs(tmp_path)
    append(path, "{\n" + lines(3) + '{"prompt": "7+1="}\n')
    prompts(rows, range(4))
    first, last = read_extents(tmp_path)[1].skipped
    assert first.startswith(f"{path}:4: the line is not a valid row")
    assert last.startswith(f"{path}:6: ")
    assert [record.getMessage() for record in caplog.records] == [
        f"skipping an appended line: {words}" for words in (first, last)
    ]
    prompts(rows, range(8))
    assert read_extents(tmp_path)[2].skipped == ()


def test_a_job_records_its_epochs_and_resumes_with_them(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[RunSession] = []

    async def run(self: RunSession) -> int:
        begun.append(self)
        return 0

    monkeypatch.setattr(RunSession, "run", run)
    config = config_of(path)
    assert jobs.train(config) == 0
    folder = RunFolder(tmp_path / "runs" / config.name)
    assert [one.rows for one in read_extents(folder.root)] == [3]
    append(path, lines(3))
    drawn = prompts(begun[0].rows, range(7))
    folder.write_state("stopped")
    append(path, lines(4, 5))
    assert jobs.resume(folder.root) == 0
    assert prompts(begun[1].rows, range(7)) == drawn
    found, why = read_rows(folder)
    assert why == ""
    assert found is not None
    assert isinstance(found.order, LiveOrder)
    assert sorted(found.where(draw) for draw in range(3, 7)) == [f"{path}:{number}" for number in (1, 2, 3, 4)]


def test_rows_at_the_start_are_those_of_the_file(path: Path) -> None:
    config = config_of(path)
    plain = load_train(load_config("quickstart", [*SMALL, f"data.train={{path: {path}}}"]).config)
    table = LiveTable(config)
    assert list(table) == list(plain)
    assert [table.where(index) for index in range(3)] == [plain.where(index) for index in range(3)]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", "no complete rows"), ('{"prompt": "x"', "no complete rows"), ("{\n", "rows.jsonl:1: the line is not"),
        ("[1]\n", "must be a JSON object"), ('{"question": "x", "label": "y"}\n', "no column for the answer"),
    ],
)  # fmt: skip
def test_a_bad_start_is_one_message(path: Path, content: str, error: str) -> None:
    path.write_text(content)
    with pytest.raises(UserError, match=error):
        LiveTable(config_of(path))


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("data.train={path: 'rows*.jsonl', follow: true}", "requires a single .jsonl file"),
        ("data.train={path: rows.json, follow: true}", "requires a single .jsonl file"),
        ("data.train={generator: running_sum, follow: true}", "requires a single .jsonl file"),
        ("data.train={path: rows.jsonl, new_share: 0.5}", "data.train.new_share: this key has no effect"),
        ("data.epochs=2", "data.train.follow and data.epochs are mutually exclusive"),
        ("data.train.stages=[schema]", "data.train.follow and data.train.stages are mutually exclusive"),
    ],
)
def test_contradictions_are_found_by_validate(
    path: Path, override: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [one for one in SMALL if "train.limit" not in one]
    assert main(["validate", "quickstart", *words, f"data.train={{path: {path}, follow: true}}", override]) == 2
    assert error in capsys.readouterr().err


# ---------------------------------------------------------------- a folder, and a share of new rows


def test_lines_and_files_that_are_added_to_a_folder_enter_at_the_next_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tasks.v1"  # a folder may have a dot in its name
    folder.mkdir()
    (folder / "b.jsonl").write_text(lines(0, 1))
    (folder / "notes.txt").write_text("no rows")
    rows = JobRows.load(config_of(folder, "data.shuffle=false"))
    rows.record_epochs(tmp_path)
    (folder / "a.jsonl").write_text(lines(7))
    append(folder / "b.jsonl", lines(2))
    assert prompts(rows, range(2)) == ["0+1=", "1+1="]
    assert prompts(rows, range(2, 6)) == ["0+1=", "1+1=", "2+1=", "7+1="], "rows keep their numbers"
    table = rows.train_table
    assert isinstance(table, LiveTable)
    assert [table.where(index) for index in range(4)] == [
        f"{folder / 'b.jsonl'}:{n}" for n in (1, 2, 3)
    ] + [f"{folder / 'a.jsonl'}:1"]  # fmt: skip
    assert (table.index_at(str(folder / "a.jsonl"), 1), table.index_at(str(folder / "b.jsonl"), 3)) == (3, 2)
    assert table.index_at(str(folder / "a.jsonl"), 2) is None
    for index, name in ((0, "b.jsonl"), (3, "a.jsonl")):
        part = table.file_at(index)
        assert part["sha256"] == hashlib.sha256((folder / name).read_bytes()[: part["bytes"]]).hexdigest()
    (_, second) = read_extents(tmp_path)
    assert [(Path(part.path).name, part.offset) for part in second.files] == [
        (name, (folder / name).stat().st_size) for name in ("b.jsonl", "a.jsonl")
    ]
    (folder / "c.jsonl").write_text(lines(9))
    again = LiveOrder(LiveTable(config_of(folder, "data.shuffle=false"), read_extents(tmp_path)), 0, False)
    assert [again.row_index(draw) for draw in range(6)] == [0, 1, 0, 1, 2, 3]
    (folder / "a.jsonl").write_text(lines(8))
    with pytest.raises(UserError, match="differ from those that epoch 1 of the run used"):
        LiveTable(config_of(folder), read_extents(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="the folder contains no"):
        LiveTable(config_of(tmp_path / "empty"))


def test_a_share_of_the_draws_are_rows_that_entered_within_the_epoch_and_a_resume_repeats_them(
    path: Path, tmp_path: Path
) -> None:
    path.write_text(lines(*range(100)))
    config = config_of(path, "data.train.new_share=0.25")
    rows = JobRows.load(config)
    rows.record_epochs(tmp_path)
    drawn = [rows.order.row_index(draw) for draw in range(10)]  # type: ignore[union-attr]
    append(path, lines(*range(100, 108)))
    drawn += [rows.order.row_index(draw) for draw in range(10, 90)]  # type: ignore[union-attr]
    new = [draw for draw, row in enumerate(drawn) if row >= 100]
    assert [drawn[draw] for draw in new] == list(range(100, 108)), "oldest first, each once"
    assert new == list(range(19, 48, 4)), "from the next look on, a quarter of the draws"
    old = [row for row in drawn if row < 100]
    order = DrawOrder(100, config.data_seed, True)
    assert old == [order.row_index(draw) for draw in range(len(old))]
    append(path, lines(108))
    drawn += [rows.order.row_index(draw) for draw in range(90, 240)]  # type: ignore[union-attr]
    looks = [extent for extent in read_extents(tmp_path) if extent.is_look]
    assert {extent.first_draw % 16 for extent in looks} == {0}
    append(path, lines(109, 110))
    resumed = LiveOrder(LiveTable(config, read_extents(tmp_path)), config.data_seed, True, 0.25)
    assert [resumed.row_index(draw) for draw in range(240)] == drawn
    epochs = [extent for extent in read_extents(tmp_path) if not extent.is_look]
    first = epochs[1].first_draw
    assert sorted(drawn[:first]) == sorted([*range(100), *range(100, 109)]), "every row of the epoch, and the new ones"


def test_an_extent_names_only_the_files_of_a_folder_that_have_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.jsonl").write_text(lines(0, 1, 2, 3, 4, 5, 6))
    config = config_of(folder, "data.train.new_share=0.5")
    rows = JobRows.load(config)
    rows.record_epochs(tmp_path)
    drawn = [rows.order.row_index(draw) for draw in range(15)]  # type: ignore[union-attr]
    append(folder / "b.jsonl", lines(7))
    drawn += [rows.order.row_index(draw) for draw in range(15, 60)]  # type: ignore[union-attr]
    named = [[Path(part.path).name for part in extent.files] for extent in read_extents(tmp_path)]
    assert named[:2] == [["a.jsonl", "b.jsonl", "c.jsonl"], ["b.jsonl"]]
    assert len(named) > 2
    assert not any(named[2:])
    table = LiveTable(config, read_extents(tmp_path))
    assert table.file_at(21)["bytes"] == (folder / "b.jsonl").stat().st_size
    resumed = LiveOrder(table, config.data_seed, True, 0.5)
    assert [resumed.row_index(draw) for draw in range(60)] == drawn


def test_a_file_that_is_no_jsonl_file_is_refused(path: Path) -> None:
    other = path.rename(path.with_name("rows"))
    with pytest.raises(UserError, match="cannot be followed"):
        LiveTable(config_of(other))
