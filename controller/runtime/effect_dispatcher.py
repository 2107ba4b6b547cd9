"""Passes events to the coordinator and carries out its effects.

Makes one ledger transaction for a burst of events, then sends the messages. Effects are decided in coordinator.py,
messages are interpreted in message_intake.py and made in outbound.py.

An acknowledgement is never sent before its commit (`exactly-once`). After a failed write the coordinator's state is
ahead of the ledger: from then on no event is handled any more, otherwise a resumed run would find facts without their
causes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from areal_like.secret_values import sealed_for_log
from areal_like.wire import messages as m
from controller.coordinator.effects import (
    AddWorker,
    DropGroup,
    Effect,
    EndRun,
    EndWorker,
    EvalDone,
    EvalDropped,
    Note,
    PurgePayloads,
    RecordIncident,
    RetireWorker,
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
from controller.coordinator.notes import HANDLING
from controller.ledger.ledger import LedgerEntry
from controller.runtime.components import RunComponents
from controller.runtime.inbound import InboundEvent, entry_of
from controller.runtime.outbound import Outgoing
from controller.runtime.outcome import Outcome
from controller.runtime.trainer_progress import TrainerProgress
from controller.telemetry.eval_answers import NUM_ANSWERS
from controller.telemetry.step_reporter import StepReporter

log = logging.getLogger(__name__)


class EffectDispatcher:
    """Handles bursts of events. Call `handle` for each."""

    def __init__(
        self,
        components: RunComponents,
        outgoing: Outgoing,
        *,
        trainer: TrainerProgress,
        steps: StepReporter,
        clock: Callable[[], float],
    ) -> None:
        self._coordinator, self._ledger, self._rows = components.coordinator, components.ledger, components.rows
        self._supervisor, self._end, self._tracer = components.supervisor, components.end, components.tracer
        telemetry = components.telemetry
        self._display, self._journal, self._tally = telemetry.display, telemetry.journal, telemetry.tally
        self._watch, self._slices = components.watch, components.slices
        self._worker_admin = components.worker_admin
        self._out, self._trainer, self._steps, self._clock = outgoing, trainer, steps, clock
        self._is_unsettled = False
        """The coordinator's state is ahead of the ledger: during a transaction, and permanently after a failed write.
        """

    def handle(self, burst: Sequence[InboundEvent]) -> None:
        """Handle the events of one burst: one transaction for ledger effects, then all other effects, in order."""
        if self._is_unsettled:
            return
        self._is_unsettled = True
        entries: list[LedgerEntry] = []
        others: list[Effect] = []
        steps: list[tuple[int, InboundEvent]] = []
        for received in burst:
            before = self._coordinator.version
            for effect in self._coordinator.handle(received.event, self._clock()):
                if effect.is_ledger:
                    entries.append(entry_of(effect, received))
                else:
                    others.append(effect)
                if isinstance(effect, Note) and HANDLING[effect.kind].is_recorded:
                    entries.append(LedgerEntry(effect=RecordIncident(kind=effect.kind, text=effect.text)))
            if received.metrics and self._coordinator.version != before:  # a repeated announcement is not a second step
                steps.append((self._coordinator.version, received))
        if entries:
            with self._tracer.span("ledger", entries=len(entries)):
                self._ledger.apply(entries)
        self._is_unsettled = False
        for entry in entries:
            self._tally.lengths.record(effect := entry.effect)
            self._tally.sources.record(effect)
            if isinstance(effect, StoreFinished) and effect.purpose == "eval":
                self._keep_answer(effect, entry)
            elif isinstance(effect, StoreFinished):
                is_cut = any(one.finish_reason == "length" for one in entry.trajectories)
                self._tally.signs.record(effect, entry.verdict, entry.response_text, is_cut=is_cut)
            elif isinstance(effect, DropGroup):
                self._journal.measure("dropped", group_id=effect.group_id, reason=effect.reason, detail=effect.detail)
        for version, received in steps:
            self._steps.published(version, received.metrics)
        for effect in others:
            self._carry_out(effect)
        if lost := self._out.take_lost():
            self.handle([InboundEvent(event) for event in lost])

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendLeases():
                if self._out.leases(effect):
                    self._steps.starts()
            case SendAck():
                self._out.send(effect.worker, m.SampleAck(lease_ids=effect.lease_ids))
            case SendCancel():
                self._out.send(effect.worker, m.CancelLeases(lease_ids=effect.lease_ids))
            case SendRecall():
                self._out.send(effect.worker, m.RecallLeases(lease_ids=effect.lease_ids))
            case SendVersion():
                self._out.version(effect)
            case SendSwap():
                self._out.send(effect.worker, m.SwapVersion(version=effect.version, lineage=effect.lineage))
            case SendRelease():
                self._out.release(effect)
            case EndWorker():
                self._display.note(f"{effect.worker} is terminated: {effect.reason}", "warning")
                self._supervisor.end(effect.worker, effect.reason)
            case AddWorker() | RetireWorker():
                self._worker_admin.scale(effect)
            case SendBatch():
                self._send_batch(effect)
            case SendRewrite():
                self._out.send("trainer", m.RewriteVersion(version=effect.version, lineage=effect.lineage))
            case SendNoMoreBatches():
                self._trainer.last_step = effect.last_step
                self._out.send("trainer", m.NoMoreBatches(last_step=effect.last_step, reason=effect.reason))
            case EvalDone():
                self._eval_done(effect)
            case EvalDropped():
                self._out.forget_ended_evals()
                self._display.note(f"evaluation of version {effect.version} was abandoned: {effect.reason}", "warning")
            case PurgePayloads():
                report = self._ledger.purge(effect.covered_step)
                log.info(
                    "removed the stored tokens of %d samples up to step %d (%d bytes)",
                    report.num_samples,
                    effect.covered_step,
                    report.freed_bytes,
                )
            case Note():
                self._journal.measure("note", note=effect.kind, text=effect.text)
                log.info("%s: %s", effect.kind, effect.text)
                if HANDLING[effect.kind].is_traced:
                    self._tracer.instant(effect.kind, text=sealed_for_log(effect.text))
                # exits at the end of the run are not reported
                if HANDLING[effect.kind].is_shown and self._end.outcome is None:
                    self._display.note(effect.text, "warning")
            case EndRun():
                # If no worker is left, the last one's own message is more informative.
                has_no_rollout_workers = effect.status == "failed" and not self._supervisor.watches_role("rollout")
                death = self._end.death if has_no_rollout_workers else None
                self._end.decide(Outcome(effect.status, effect.reason, death))
            case _:
                raise AssertionError(f"unhandled effect {type(effect).__name__}")

    def _send_batch(self, effect: SendBatch) -> None:
        batch = self._out.batch(effect, self._coordinator.counts())
        new = [sample for sample in batch.samples if not sample.is_reused]  # throughput counts each sample once
        self._steps.shipped(
            effect.step,
            staleness=list(batch.position.staleness),
            num_samples=len(new),
            num_tokens=sum(one.num_sampled for sample in new for one in sample.trajectories),
            is_replay=effect.is_replay,
        )
        self._tracer.instant("batch_sent", step=effect.step, groups=len(effect.groups))

    def _keep_answer(self, effect: StoreFinished, entry: LedgerEntry) -> None:
        outcome, answer = effect.outcome, entry.response_text
        if entry.verdict is not None:
            self._tally.values.record(outcome.first_version, outcome.group_id, entry.verdict.components)
        if self._slices is not None and not self._rows.layout.is_red_team(outcome.group_id):
            self._slices.record(outcome.first_version, outcome.group_id, outcome.num_tokens, answer, effect.value)
        item = self._rows.layout[outcome.group_id]
        if item.row < NUM_ANSWERS and item.sample == 0 and item.set_name == self._rows.layout.names[0]:
            row = self._rows.eval(outcome.group_id)
            self._tally.answers.record(outcome.first_version, item.row, row, answer, effect.value)

    def _eval_done(self, effect: EvalDone) -> None:
        self._out.forget_ended_evals()
        layout = self._rows.layout
        num_rows = sum(not layout.is_red_team(number) for number in range(len(effect.values)))
        counted = layout.counted(effect.values)
        num_scored = self._tally.add_evaluation(effect.version, counted)
        answers = self._tally.answers.finish(effect.version)
        if num_scored < num_rows:
            self._display.note(f"{num_rows - num_scored} of {num_rows} evaluated answers got no score", "warning")
        if not num_scored:
            return
        values = self._tally.values.finish(effect.version, counted, num_samples=layout.num_samples)
        metrics = self._tally.eval_metrics[effect.version]
        metrics.update(self._tally.values.red_team(effect.version))
        self._journal.measure("eval_values", version=effect.version, **values)  # before `eval`, which is looked at
        self._journal.measure(
            "eval", version=effect.version, **metrics, num_scored=num_scored, num_rows=num_rows,
            eval=effect.kind, answers=answers,
        )  # fmt: skip
        self._display.accuracy(effect.version, metrics, num_scored)
        self._compare_slices(effect, counted)
        self._watch.evaluated(effect.version, metrics)

    def _compare_slices(self, effect: EvalDone, values: Sequence[float | None]) -> None:
        """Slices only describe the policy, so an error in them is a note and ends nothing."""
        if self._slices is None:
            return
        try:
            fields = self._slices.finish(effect.version, values)
            weak = self._slices.new_weak(fields) if fields is not None else []
        except Exception as error:  # rows of the user may contain anything
            self._slices = None
            words = f"eval.slices: evaluations are no longer compared by slices: {type(error).__name__}: {error}"
            log.exception("comparing the slices of version %d failed", effect.version)
            self._journal.measure("note", note="slices_failed", text=words)
            self._display.note(words, "warning")
            return
        if fields is None:
            return
        self._journal.measure("slices", version=effect.version, eval=effect.kind, **fields)
        for words in weak:
            self._journal.measure("note", note="slice_weak", text=words)
            self._display.note(words, "warning")
