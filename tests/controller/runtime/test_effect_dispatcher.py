"""What is remembered before anything is sent, and what each effect of the coordinator does."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.red_team import REFUSED, SAFE
from areal_like.secret_values import SEALED_LOGS
from areal_like.verdict import Verdict
from areal_like.wire import messages as m
from controller.coordinator.effects import (
    DropGroup,
    Effect,
    EndRun,
    EndWorker,
    EvalDone,
    EvalDropped,
    Note,
    PurgePayloads,
    RecordIncident,
    SendAck,
    SendBatch,
    SendCancel,
    SendLeases,
    SendNoMoreBatches,
    SendRecall,
    SendRelease,
    SendRewrite,
    SendSwap,
    SendVersion,
    StoreFinished,
)
from controller.coordinator.events import Tick, WorkerLost
from controller.coordinator.sample_outcome import SampleOutcome
from controller.data.eval_layout import EvalLayout, SetSize
from controller.ledger.ledger import PurgeReport
from controller.runtime.effect_dispatcher import EffectDispatcher
from controller.runtime.inbound import InboundEvent
from controller.runtime.outcome import Outcome, RunEnd
from controller.runtime.trainer_progress import TrainerProgress
from controller.telemetry.eval_answers import NUM_ANSWERS, EvalAnswers
from controller.telemetry.eval_values import EvalValues

DROPPED = DropGroup(group_id=3, reason="stale", detail="late")
ACK = SendAck(worker="w", lease_ids=(1,))


class Bench:
    """A coordinator that answers each event with the next planned effects; records what is done, in order."""

    def __init__(self, *planned: list[Effect], slices: Any = None) -> None:
        self.planned = list(planned)
        self.done: list[tuple[Any, ...]] = []
        self.times: list[float] = []
        self.lost: list[Any] = []
        self.is_sampling = True
        self.watched = {"rollout"}
        self.num_scored = 2
        self.end, self.trainer = RunEnd(), TrainerProgress(SimpleNamespace(trained=0))  # type: ignore[arg-type]
        self.coordinator = SimpleNamespace(version=0, handle=self.next_effects, counts=lambda: "counts")
        tally = SimpleNamespace(
            lengths=SimpleNamespace(record=self.note("lengths")), sources=SimpleNamespace(record=lambda effect: None),
            values=EvalValues(["judge"]), signs=SimpleNamespace(record=lambda *sample, is_cut: None),
            eval_metrics={4: {"accuracy": 0.5}},
            add_evaluation=lambda version, values: self.num_scored, answers=EvalAnswers(),
        )  # fmt: skip
        display = SimpleNamespace(note=self.note("show"), accuracy=self.note("accuracy"))
        components = SimpleNamespace(
            coordinator=self.coordinator,
            ledger=SimpleNamespace(apply=self.apply, purge=self.purge),
            worker_admin=SimpleNamespace(scale=self.note("scale")),
            supervisor=SimpleNamespace(end=self.note("end"), watches_role=lambda role: role in self.watched),
            rows=SimpleNamespace(
                eval=lambda row: {"prompt": f"{row}+1="}, layout=EvalLayout({"": SetSize(9, 9, 9)})
            ),
            end=self.end,
            watch=SimpleNamespace(evaluated=self.note("evaluated")),
            slices=slices,
            tracer=SimpleNamespace(
                span=lambda name, **facts: contextlib.nullcontext(), instant=self.note("instant")
            ),
            telemetry=SimpleNamespace(
                display=display, journal=SimpleNamespace(measure=self.note("measure")), tally=tally
            ),
        )  # fmt: skip
        out = SimpleNamespace(
            leases=lambda effect: self.note("leases")() or self.is_sampling, send=self.note("send"),
            version=self.note("version"), release=self.note("release"), take_lost=self.take_lost,
            batch=lambda effect, counts: self.batch(effect, counts), forget_ended_evals=self.note("forget"),
        )  # fmt: skip
        steps = SimpleNamespace(
            published=self.note("published"), starts=self.note("starts"), shipped=self.note("shipped")
        )
        self.dispatcher = EffectDispatcher(
            components,  # type: ignore[arg-type]
            out,  # type: ignore[arg-type]
            trainer=self.trainer,
            steps=steps,  # type: ignore[arg-type]
            clock=lambda: 7.0,
        )

    def note(self, what: str) -> Any:
        return lambda *args, **facts: self.done.append((what, *args, *facts.items()))

    def next_effects(self, event: Any, now_s: float) -> list[Effect]:
        self.times.append(now_s)
        return self.planned.pop(0) if self.planned else []

    def apply(self, entries: list[Any]) -> None:
        self.done.append(("apply", *(entry.effect for entry in entries)))

    def purge(self, covered_step: int) -> PurgeReport:
        self.done.append(("purge", covered_step))
        return PurgeReport(num_samples=4, num_files=1, freed_bytes=100)

    def take_lost(self) -> list[Any]:
        lost, self.lost = self.lost, []
        return lost

    def batch(self, effect: SendBatch, counts: str) -> Any:
        trajectories = [SimpleNamespace(num_sampled=2), SimpleNamespace(num_sampled=3)]
        new, old = (SimpleNamespace(trajectories=trajectories, is_reused=one) for one in (False, True))
        self.done.append(("batch", effect.step, counts))
        return SimpleNamespace(position=SimpleNamespace(staleness=(0, 1)), samples=[new, old, new])

    def handle(self, *metrics: dict[str, float]) -> list[tuple[Any, ...]]:
        """One burst, of as many events as there are metrics."""
        self.dispatcher.handle([InboundEvent(Tick(), metrics=one) for one in metrics or ({},)])
        return self.done


def test_all_that_a_burst_must_remember_is_one_transaction_before_anything_is_sent() -> None:
    bench = Bench([DROPPED, ACK], [DROPPED])
    assert bench.handle({}, {}) == [
        ("apply", DROPPED, DROPPED),
        ("lengths", DROPPED),
        ("measure", "dropped", ("group_id", 3), ("reason", "stale"), ("detail", "late")),
        ("lengths", DROPPED),
        ("measure", "dropped", ("group_id", 3), ("reason", "stale"), ("detail", "late")),
        ("send", "w", m.SampleAck(lease_ids=(1,))),
    ]
    assert bench.times == [7.0, 7.0]


def test_a_burst_with_nothing_to_remember_writes_nothing() -> None:
    assert Bench([ACK]).handle() == [("send", "w", m.SampleAck(lease_ids=(1,)))]


def test_after_a_write_that_failed_nothing_is_handled() -> None:
    bench = Bench([DROPPED, ACK], [ACK])
    bench.dispatcher._ledger = SimpleNamespace(apply=lambda entries: 1 / 0)  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        bench.handle()
    assert bench.handle() == []
    assert len(bench.times) == 1


def test_a_worker_found_out_of_reach_while_sending_is_an_event_of_its_own() -> None:
    bench = Bench([ACK], [DROPPED])
    bench.lost = [WorkerLost(worker="w", reason="unreachable")]
    assert [what for what, *_ in bench.handle()] == ["send", "apply", "lengths", "measure"]


def test_a_step_is_reported_once_however_often_its_version_is_announced() -> None:
    bench = Bench()
    versions = iter([1, 1, 2])

    def publish(event: Any, now_s: float) -> list[Effect]:
        bench.coordinator.version = next(versions)
        return []

    bench.coordinator.handle = publish
    assert bench.handle({"loss": 1.0}, {"loss": 2.0}, {}) == [("published", 1, {"loss": 1.0})]


@pytest.mark.parametrize(
    ("effect", "peer", "message"),
    [
        (SendCancel(worker="w", lease_ids=(1,)), "w", m.CancelLeases(lease_ids=(1,))),
        (SendRecall(worker="w", lease_ids=(2,)), "w", m.RecallLeases(lease_ids=(2,))),
        (SendSwap(worker="w", version=3, lineage="l0"), "w", m.SwapVersion(version=3, lineage="l0")),
        (SendRewrite(version=5, lineage="l0"), "trainer", m.RewriteVersion(version=5, lineage="l0")),
    ],
)
def test_what_is_for_a_process_is_sent_to_it(effect: Effect, peer: str, message: m.Message) -> None:
    assert Bench([effect]).handle() == [("send", peer, message)]


def test_the_trainers_last_step_is_remembered_and_sent() -> None:
    bench = Bench([SendNoMoreBatches(last_step=6, reason="stopped")])
    assert bench.handle() == [("send", "trainer", m.NoMoreBatches(last_step=6, reason="stopped"))]
    assert bench.trainer.last_step == 6


@pytest.mark.parametrize("is_sampling", [True, False])
def test_a_step_starts_with_the_first_lease_of_training(is_sampling: bool) -> None:
    bench = Bench([SendLeases(worker="w", leases=())])
    bench.is_sampling = is_sampling
    assert bench.handle() == [("leases",), ("starts",)][: 1 + is_sampling]


def test_a_version_is_announced() -> None:
    effect = SendVersion(worker="w", version=1, lineage="l0", manifest_path="v1")
    assert Bench([effect]).handle() == [("version", effect)]


def test_memory_is_asked_for() -> None:
    effect = SendRelease(worker="w", number=4, incarnation="a")
    assert Bench([effect]).handle() == [("release", effect)]


def test_a_worker_is_terminated_and_the_user_knows_why() -> None:
    assert Bench([EndWorker(worker="w", reason="it keeps its memory")]).handle() == [
        ("show", "w is terminated: it keeps its memory", "warning"), ("end", "w", "it keeps its memory"),
    ]  # fmt: skip


@pytest.mark.parametrize("is_replay", [True, False])
def test_a_batch_is_sent_measured_and_marked(is_replay: bool) -> None:
    effect = SendBatch(step=2, lineage="l0", groups=(), is_replay=is_replay)
    assert Bench([effect]).handle() == [
        ("batch", 2, "counts"),
        ("shipped", 2, ("staleness", [0, 1]), ("num_samples", 2), ("num_tokens", 10), ("is_replay", is_replay)),
        ("instant", "batch_sent", ("step", 2), ("groups", 0)),
    ]


def evaluated(num_scored: int) -> list[tuple[Any, ...]]:
    bench = Bench([EvalDone(version=4, requested_version=3, kind="periodic", values=(1.0, 0.0, None))])
    bench.num_scored = num_scored
    return bench.handle()


def test_an_evaluation_is_measured_by_its_scores_and_the_user_knows_how_many_are_missing() -> None:
    measured = [
        ("measure", "eval_values", ("version", 4), ("num_samples", 1), ("values", [1, 0, None])),
        (
            "measure", "eval", ("version", 4), ("accuracy", 0.5), ("num_scored", 2), ("num_rows", 3),
            ("eval", "periodic"), ("answers", []),
        ),
        ("accuracy", 4, {"accuracy": 0.5}, 2),
            ("evaluated", 4, {"accuracy": 0.5}),
    ]  # fmt: skip
    missing = ("show", "1 of 3 evaluated answers got no score", "warning")
    assert evaluated(2) == [("forget",), missing, *measured]
    assert [what for what, *_ in evaluated(3)] == ["forget", "measure", "measure", "accuracy", "evaluated"]
    assert evaluated(0) == [("forget",), ("show", "3 of 3 evaluated answers got no score", "warning")]


def test_answers_to_the_red_team_have_shares_of_their_own_and_no_part_in_the_accuracy() -> None:
    done = EvalDone(version=4, requested_version=4, kind="final", values=(1.0, 0.0, 1.0))
    bench = Bench([answered(1)], [answered(2)], [done], [done])
    layout = EvalLayout({"": SetSize(1, 1, 1), "red_team": SetSize(2, 2, 2)}, red_team="red_team")
    bench.dispatcher._rows.layout = layout  # type: ignore[misc]
    verdicts = [
        Verdict(kind="scored", value=safe, components={REFUSED: refused, SAFE: safe})
        for refused, safe in ((0.0, 0.0), (1.0, 1.0))
    ]
    words = [SimpleNamespace(trajectories=(), verdict=one, timings={}, response_text="") for one in verdicts]
    bench.dispatcher.handle(
        [InboundEvent(Tick(), finished=one) for one in [*words, None, None]]  # type: ignore[arg-type]
    )
    measured = [dict(facts) for what, *facts in bench.done if what == "measure" and facts.pop(0) == "eval"]
    assert len(measured) == 2  # the same evaluation may end a second time as the final one
    for row in measured:
        assert (row["num_rows"], row["red_team_refused"], row["red_team_unsafe"]) == (1, 0.5, 0.5)
    values = next(dict(facts[1:]) for what, *facts in bench.done if what == "measure" and facts[0] == "eval_values")
    assert values["values"] == [1, None, None]
    assert values["held_out"] == {SAFE: [None, 0, 1]}


def answered(row: int, purpose: Any = "eval") -> StoreFinished:
    outcome = SampleOutcome(
        lease_id=row, group_id=row, sample_index=0, num_tokens=1, first_version=4, last_version=4,
        verdict_kind="scored", value=0.0,
    )  # fmt: skip
    return StoreFinished(purpose=purpose, outcome=outcome, value=0.5, is_kept=True)


def test_answers_to_the_first_rows_of_an_evaluation_are_measured_with_it() -> None:
    done = EvalDone(version=4, requested_version=4, kind="final", values=(1.0,) * 4)
    bench = Bench([answered(2)], [answered(0)], [answered(1, "train")], [answered(NUM_ANSWERS)], [done])
    verdict = Verdict(kind="scored", value=0.5, components={"judge": 0.25, "other": 1.0})
    words = [SimpleNamespace(trajectories=(), verdict=verdict, timings={}, response_text=f"=#{n}") for n in range(5)]
    bench.dispatcher.handle([InboundEvent(Tick(), finished=one) for one in words])  # type: ignore[arg-type]
    values, row = [dict(facts[1:]) for what, *facts in bench.done if what == "measure"]
    assert values["held_out"] == {"judge": [0.25, None, 0.25, 0.25]}
    answers = row["answers"]
    assert [(one["row"], one["prompt"], one["answer"], one["value"]) for one in answers] == [
        (0, "0+1=", "=#1", 0.5), (2, "2+1=", "=#0", 0.5),
    ]  # fmt: skip


def test_an_evaluation_that_is_given_up_is_said() -> None:
    assert Bench([EvalDropped(version=4, kind="periodic", reason="no worker")]).handle() == [
        ("forget",), ("show", "evaluation of version 4 was abandoned: no worker", "warning"),
    ]  # fmt: skip


def test_payloads_are_purged_up_to_the_step_that_is_covered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert Bench([PurgePayloads(covered_step=8)]).handle() == [("purge", 8)]
    assert "removed the stored tokens of 4 samples up to step 8 (100 bytes)" in caplog.text


def test_the_text_of_a_note_is_not_in_the_clear_in_the_trace_of_an_encrypted_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "encryption.json").write_text("{}")  # its key cannot be read
    monkeypatch.setenv(SEALED_LOGS, str(tmp_path))
    said = Bench([Note(kind="migrated", text="words")]).handle()
    (traced,) = [facts for what, *facts in said if what == "instant"]
    assert "words" not in str(traced)


@pytest.mark.parametrize(
    ("kind", "is_recorded", "is_traced", "is_shown"),
    [
        ("worker_lost", True, True, True), ("duplicate", False, False, False),
        ("migrated", False, True, False), ("quarantined", True, False, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_ending", [True, False])
def test_a_note_goes_where_its_kind_says_and_is_not_shown_at_the_end(
    kind: Any, is_recorded: bool, is_traced: bool, is_shown: bool, is_ending: bool
) -> None:
    bench = Bench([Note(kind=kind, text="words")])
    if is_ending:
        bench.end.decide(Outcome("stopped", "asked to"))
    incident = RecordIncident(kind=kind, text="words")
    assert bench.handle() == [
        *([("apply", incident), ("lengths", incident)] if is_recorded else []),
        ("measure", "note", ("note", kind), ("text", "words")),
        *([("instant", kind, ("text", "words"))] if is_traced else []),
        *([("show", "words", "warning")] if is_shown and not is_ending else []),
    ]


@pytest.mark.parametrize(
    ("status", "watched", "has_error"),
    [("failed", {"trainer"}, True), ("failed", {"rollout"}, False), ("stopped", {"trainer"}, False)],
)
def test_a_run_that_fails_with_no_worker_left_ends_with_the_last_ones_words(
    status: Any, watched: set[str], has_error: bool
) -> None:
    bench = Bench([EndRun(status=status, reason="no worker is left")])
    bench.watched, bench.end.death = watched, RuntimeError("last words")  # type: ignore[assignment]
    bench.handle()
    outcome = bench.end.outcome
    assert outcome is not None
    assert (outcome.status, outcome.reason, outcome.error) == (
        status, "no worker is left", bench.end.death if has_error else None,
    )  # fmt: skip


def test_an_effect_that_nobody_knows_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="unhandled effect Effect"):
        Bench([Effect()]).handle()


def test_an_evaluation_is_compared_in_parts_and_a_weak_one_is_named():
    fields = {"design_effect": 1.0, "slices": []}
    slices = SimpleNamespace(record=None, finish=lambda version, values: fields, new_weak=lambda found: ["weak in x"])
    done = EvalDone(version=4, requested_version=4, kind="final", values=(1.0, 0.0))
    happened = Bench([done], slices=slices).handle()
    facts = [("version", 4), ("eval", "final"), ("design_effect", 1.0), ("slices", [])]
    assert ("measure", "slices", *facts) in happened
    assert ("measure", "note", ("note", "slice_weak"), ("text", "weak in x")) in happened
    assert ("show", "weak in x", "warning") in happened
    nothing = SimpleNamespace(record=None, finish=lambda version, values: None, new_weak=None)
    assert not any(one[:2] == ("measure", "slices") for one in Bench([done], slices=nothing).handle())


def test_an_error_in_the_comparison_of_slices_is_said_once_and_ends_nothing():
    def finish(version: int, values: object) -> None:
        raise OverflowError("int too large")

    slices = SimpleNamespace(record=None, finish=finish, new_weak=None)
    done = EvalDone(version=4, requested_version=4, kind="final", values=(1.0, 0.0))
    happened = Bench([done, done], slices=slices).handle()
    shown = [one for one in happened if one[0] == "show" and "no longer compared by slices: OverflowError" in one[1]]
    assert len(shown) == 1
    assert any(one[:2] == ("measure", "eval") for one in happened)
