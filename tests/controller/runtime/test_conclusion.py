"""What an end leaves behind: files, lines on screen, the exit status or the error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import LedgerError, OperationError, ProcessDied
from controller.runtime import conclusion
from controller.runtime.conclusion import SessionResult, conclude, count_run
from controller.runtime.outcome import Outcome


class Session:
    """A session whose processes have ended, after one step; records what is written, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.is_evaluation = False
        self.findings: list[str] = []
        self.folder: Any = SimpleNamespace(
            root=root,
            logs=root / "logs",
            summary=root / "summary.json",
            config=root / "config.yaml",
            write_state=self.note("state"),
        )
        self.config: Any = SimpleNamespace(
            metrics=SimpleNamespace(trace=False, report=True),
            encryption=None,
            emulation=None,
            group_size=2,
            num_steps=7,
            staleness=SimpleNamespace(bound=3),
        )
        self.end = SimpleNamespace(is_hurried=False)
        self.sink_counts: dict[str, Any] = {}
        self.late: list[str] = []
        self.telemetry: Any = SimpleNamespace(
            tally=SimpleNamespace(accuracy={1: 0.5}, steps=1, summary=self.summary),
            status=SimpleNamespace(end=self.note("status")),
            sinks=SimpleNamespace(counts=lambda: self.sink_counts, end=lambda summary: self.late),
        )
        for name in ("merge_traces", "write_summary"):
            monkeypatch.setattr(conclusion, name, self.note(name))
        monkeypatch.setattr(conclusion, "print_summary", lambda summary, root, console: self.note("print")(summary))
        monkeypatch.setattr(
            conclusion, "next_steps", lambda summary, root, config: [f"next: {root.name}, {config.name}"]
        )
        monkeypatch.setattr(conclusion, "draw_report", lambda root: f"report of {root.name}")
        monkeypatch.setattr(conclusion, "audit", self.audit)
        self.run_id, self.ledger = "r", SimpleNamespace(last_digest=b"\x07")
        self.seals: list[tuple[str, str]] = []
        monkeypatch.setattr(conclusion, "write_seal", self.seal)
        self.shares: dict[str, float] = {}
        monkeypatch.setattr(conclusion, "summary_shares", lambda folder, summary: self.shares)

    def note(self, what: str) -> Any:
        return lambda *args, **facts: self.done.append((what, *args, *facts.items()))

    def summary(self, counts: dict[str, Any], **facts: Any) -> dict[str, Any]:
        return {**counts, **facts}

    def seal(self, folder: Any, *, run_id: str, last_digest: str) -> None:
        assert folder is self.folder
        self.seals.append((run_id, last_digest))
        if run_id == "no room":
            raise OSError("disk full")

    def audit(self, root: Path) -> Any:
        if self.findings == ["unreadable"]:
            raise LedgerError("no table")
        return SimpleNamespace(findings=self.findings)

    def conclude(self, outcome: Outcome, counts: dict[str, Any] | None = None) -> int:
        result = SessionResult(outcome, {"groups": 3} if counts is None else counts, prepare_s=2.0)
        return conclude(self, result, 9.0)  # type: ignore[arg-type]

    def written(self) -> dict[str, Any]:
        (summary,) = [args[1] for what, *args in self.done if what == "write_summary"]
        return dict(summary)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Session:
    return Session(monkeypatch, tmp_path)


def test_a_completed_run_has_a_summary_on_disk_and_on_screen_and_a_report(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert session.conclude(Outcome("completed", "all steps are done")) == 0
    wanted = {"groups": 3, "audit": "clean", "status": "completed", "wall_s": 9.0, "prepare_s": 2.0}
    assert session.done == [("write_summary", session.folder.summary, wanted), ("print", wanted)]
    name = session.folder.root.name
    assert capsys.readouterr().out == f"report of {name}\n\nnext: {name}, config.yaml\n"


@pytest.mark.parametrize("status", ["completed", "exhausted", "stopped", "failed"])
def test_every_ended_run_is_sealed_but_no_evaluation(session: Session, status: Any) -> None:
    for session.run_id in ("r", "no room"):
        if status == "failed":
            with pytest.raises(OperationError):
                session.conclude(Outcome(status, "disk full"))
        else:
            session.conclude(Outcome(status, "on request"))
    assert session.seals == [("r", "07"), ("no room", "07")]
    session.is_evaluation = True
    if status != "failed":
        session.conclude(Outcome(status, "on request"))
    assert len(session.seals) == 2


def test_the_summarys_shares_are_those_of_the_diagnosis(session: Session) -> None:
    session.shares = {"trainer_wait_share": 0.125}
    session.conclude(Outcome("completed", "all steps are done"), {"trainer_wait_share": 0.5, "groups": 3})
    assert session.written()["trainer_wait_share"] == 0.125


@pytest.mark.parametrize(("status", "exit_status"), [("exhausted", 0), ("stopped", 0)])
def test_an_early_end_that_was_asked_for_is_no_failure_and_says_so(
    session: Session, capsys: pytest.CaptureFixture[str], status: Any, exit_status: int
) -> None:
    assert session.conclude(Outcome(status, "on request")) == exit_status
    line = capsys.readouterr().out.splitlines()[-1]
    continued = f"the run was stopped (on request); continue with: areal-like resume {session.folder.root}"
    assert line == (continued if status == "stopped" else "on request")


def test_a_failure_raises_what_ended_the_run_after_the_end_of_the_process_log(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ProcessDied("trainer", "killed", "last\x1b words")
    with pytest.raises(ProcessDied) as raised:
        session.conclude(Outcome("failed", "trainer: killed", error))
    assert raised.value is error
    _, reason, place, tail = capsys.readouterr().out.splitlines()
    assert (reason, place) == ("trainer: killed", f"--- last lines of {session.folder.logs / 'trainer.log'}")
    assert "words" in tail
    assert "\x1b" not in tail


def test_a_failure_without_an_error_becomes_one_and_is_said_once(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OperationError, match="no worker is left"):
        session.conclude(Outcome("failed", "no worker is left"))
    assert "no worker" not in capsys.readouterr().out


def test_a_stop_that_ended_in_an_error_does_not_advise_to_continue(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OperationError):
        session.conclude(Outcome("stopped", "on request", OperationError("disk full")))
    assert capsys.readouterr().out.splitlines()[1:] == ["on request"]


@pytest.mark.parametrize(
    ("steps", "accuracy", "status", "is_printed"),
    [(0, {}, "failed", False), (1, {}, "failed", True), (0, {1: 0.5}, "failed", True), (0, {}, "exhausted", True)],
)
def test_a_page_of_zeros_does_not_hide_an_error(
    session: Session, steps: int, accuracy: dict[int, float], status: Any, is_printed: bool
) -> None:
    session.telemetry.tally.steps, session.telemetry.tally.accuracy = steps, accuracy
    outcome = Outcome(status, "words")
    if status == "failed":
        with pytest.raises(OperationError):
            session.conclude(outcome)
    else:
        session.conclude(outcome)
    assert session.written()["status"] == status
    assert [what for what, *_ in session.done if what == "print"] == ["print"] * is_printed


def test_a_session_that_never_got_to_its_server_has_no_summary(session: Session) -> None:
    assert session.conclude(Outcome("stopped", "on request"), counts={}) == 0
    assert session.done == []


@pytest.mark.parametrize("is_traced", [True, False])
def test_traces_of_all_processes_are_merged_where_there_are_any(session: Session, is_traced: bool) -> None:
    session.config.metrics.trace = is_traced
    session.conclude(Outcome("completed", ""), counts={})
    assert session.done == [("merge_traces", session.folder.root)] * is_traced


@pytest.mark.parametrize("case", ["evaluation", "hurried", "not wanted"])
def test_no_report_is_drawn(session: Session, capsys: pytest.CaptureFixture[str], case: str) -> None:
    session.is_evaluation = case == "evaluation"
    session.end.is_hurried = case == "hurried"
    session.config.metrics.report = case != "not wanted"
    assert session.conclude(Outcome("completed", "")) == 0
    name = session.folder.root.name
    assert capsys.readouterr().out == ("" if session.is_evaluation else f"\nnext: {name}, config.yaml\n")
    assert ("audit" in session.written()) == (case != "evaluation")


def test_an_evaluation_without_a_single_score_has_failed(session: Session) -> None:
    session.is_evaluation, session.telemetry.tally.accuracy = True, {}
    words = f"no answer was scored; see {session.folder.logs}"
    with pytest.raises(OperationError, match="no answer was scored"):
        session.conclude(Outcome("completed", ""))
    assert session.done[:2] == [("status", "failed"), ("state", "failed", ("reason", words))]
    assert session.written()["status"] == "failed"
    session.done.clear()
    session.is_evaluation = False
    assert session.conclude(Outcome("completed", "")) == 0, "a training run may have none"


@pytest.mark.parametrize(
    ("findings", "words"),
    [(["a", "b"], "a; b"), (list("abcdefg"), "a; b; c; d; e"), (["unreadable"], "not possible: no table")],
)
def test_findings_of_the_audit_are_in_the_summary(session: Session, findings: list[str], words: str) -> None:
    session.findings = findings
    session.conclude(Outcome("completed", ""))
    assert session.written()["audit"] == words


def test_lost_rows_of_sinks_are_in_the_summary(session: Session) -> None:
    session.sink_counts = {"wandb": {"lost": 3}}
    session.conclude(Outcome("completed", ""))
    assert session.written()["sinks"] == {"wandb": {"lost": 3}}


@pytest.mark.parametrize(("published", "start", "version"), [(3, 1, 3), (-1, 1, 1)])
@pytest.mark.parametrize(("words", "is_evaluation"), [("", False), ("as on 64 GPUs", True)])
def test_a_run_is_counted_by_fates_sessions_and_restarts(
    session: Session, monkeypatch: pytest.MonkeyPatch, published: int, start: int, version: int, words: str,
    is_evaluation: bool,
) -> None:  # fmt: skip
    session.is_evaluation = is_evaluation
    state = SimpleNamespace(batches=("b",), num_lives=2, num_trainer_restarts=4)
    monkeypatch.setattr(conclusion, "fates", lambda counts, batches, **facts: {"of": (counts, batches), **facts})
    session.ledger = SimpleNamespace(load=lambda: state)  # type: ignore[attr-defined]
    session.config.emulation = SimpleNamespace(words=words) if words else None
    coordinator: Any = SimpleNamespace(version=published, counts=lambda: "counts")
    assert count_run(session, coordinator, SimpleNamespace(version=start)) == {  # type: ignore[arg-type]
        "of": ("counts", ("b",)), "group_size": 2, "version": version, "lives": 2, "trainer_restarts": 4,
        **({} if is_evaluation else {"num_steps": 7, "staleness_bound": 3}),
        **({"emulated": words} if words else {}),
    }  # fmt: skip


def test_what_went_wrong_at_the_end_of_a_callback_is_shown(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.late = ["callback Mine: on_end raised OSError: disk full"]
    session.conclude(Outcome("completed", ""))
    assert "callback Mine: on_end raised OSError: disk full" in capsys.readouterr().out
