"""Files of an encrypted run that are partly in the clear: texts are encrypted, and readers with the key show them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")

from areal_like.encryption.files import write_text
from areal_like.encryption.run_key import encrypt_folder
from areal_like.encryption.settings import EncryptionSettings
from areal_like.encryption.texts import HIDDEN
from areal_like.errors import UserError
from areal_like.metrics import JsonlLog, read_jsonl
from controller.cli.arguments import make_parser
from controller.dashboard.jsonl_tail import JsonlTail
from controller.report.data import RunData, read_settings
from controller.run_folder.restarts import read_restarts, record_restart
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.run_notes import read_notes, write_notes
from controller.runs.commands import run_command
from controller.runs.facts import read_facts, tail_rows
from controller.telemetry.eval_answers import EvalAnswers
from controller.telemetry.journal import rows_of
from controller.telemetry.summary import write_summary

CANARY = "Zebra-quartz-5519"
EVAL = {
    "kind": "eval", "time_s": 1.0, "version": 0, "accuracy": 0.5,
    "answers": [{"row": 0, "prompt": CANARY, "answer": CANARY, "value": 1.0}],
}  # fmt: skip
NOTE = {"kind": "note", "time_s": 2.0, "note": "worker_lost", "text": f"lost after {CANARY}"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("RUN_KEY", bytes(range(32)).hex())
    made = RunFolder.create(tmp_path, "run")
    encrypt_folder(made.root, EncryptionSettings(key_env="RUN_KEY"))
    write_notes(made.root, CANARY, [])
    write_text(made.config, f"notes: {CANARY}\nnum_steps: 3\n")
    made.write_state("failed", reason=f"no score for {CANARY}")
    log = JsonlLog(made.metrics)
    log.append(EVAL)
    log.append(NOTE)
    log.close()
    write_summary(made.summary, {"steps": 3, "answers": [{"prompt": CANARY}]})
    record_restart(made.root, f"the run failed (no score for {CANARY})", 3)
    return made


def test_no_text_is_in_a_file_and_numbers_are(folder):
    for path in folder.root.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    first = json.loads(folder.metrics.read_text().splitlines()[0])
    assert (first["kind"], first["accuracy"]) == ("eval", 0.5)
    assert json.loads(folder.summary.read_text())["steps"] == 3


def test_pages_and_samples_are_not_written_into_the_run(folder):
    for command in (
        ["report", str(folder.root), "--out", str(folder.root / "page")],
        ["compare", str(folder.root), str(folder.root), "--out", str(folder.root)],
        ["samples", str(folder.root), "--format", "jsonl", "--out", str(folder.root / "samples.jsonl")],
        ["samples", str(folder.root), "--format", "html"],
    ):
        with pytest.raises(UserError, match=r"in the clear, and .* encrypted .*outside of it with --out"):
            run_command(make_parser(lambda text: 2).parse_args(command))


def test_every_reader_shows_the_texts_with_the_key(folder):
    rows = [EVAL, NOTE]
    assert read_jsonl(folder.metrics) == rows
    assert list(rows_of(folder.metrics, "eval", "note")) == rows
    assert tail_rows(folder.metrics) == rows
    assert JsonlTail(folder.metrics).read()[0] == rows
    data = RunData.load(folder)
    assert [row["text"] for row in data.notes] == [NOTE["text"]]
    assert read_notes(folder.root).notes == CANARY
    assert [row["cause"] for row in read_restarts(folder.root)] == [f"the run failed (no score for {CANARY})"]
    assert folder.read_state()["reason"] == f"no score for {CANARY}"
    assert read_facts(folder).summary["answers"] == [{"prompt": CANARY}]
    assert read_settings(folder, []) == {"notes": CANARY, "num_steps": 3}
    answers = EvalAnswers()
    answers.restore(folder.metrics, 0)
    assert answers._done[0] == EVAL["answers"]


def test_without_the_key_numbers_are_shown_and_texts_are_not(folder, monkeypatch):
    monkeypatch.delenv("RUN_KEY")
    row, note = tail_rows(folder.metrics)
    assert row == {key: value for key, value in EVAL.items() if key != "answers"}
    assert note["text"] == HIDDEN
    assert folder.read_state()["reason"] == HIDDEN
    assert read_notes(folder.root).notes == ""
    assert [row["cause"] for row in read_restarts(folder.root)] == [HIDDEN]
    record_restart(folder.root, CANARY, 3)
    assert len(read_restarts(folder.root)) == 1, "a cause is not written in the clear"
    assert read_facts(folder).summary == {"steps": 3}
    problems: list[str] = []
    assert read_settings(folder, problems) == {}
    assert "RUN_KEY, which is not set" in problems[0]
    with pytest.raises(UserError, match="RUN_KEY, which is not set"):
        folder.write_state("stopped", reason="later")
