"""One run from files: open, evaluate, steps, checkpoints, export.

It defines their order, writes the rows of metrics.jsonl, and decides when a checkpoint is due. Formulas are in
objectives.py; the task defines what a row means. The display and status.json belong to the controller, which reads
metrics.jsonl.

A step is a pure function of the seed, the rows and the previous checkpoint, so that a run that is killed at any moment
and resumed computes the same bits as one that is not. Everything happens on one thread; a request to stop takes effect
between two steps.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from areal_like.errors import PolicyDiverged
from areal_like.metrics import JsonlLog
from areal_like.process import freeze_heap
from trainer.checkpoints import checkpoint
from trainer.checkpoints.atomic_folder import atomic_folder
from trainer.checkpoints.checkpoint import CheckpointState, Facts, Retention
from trainer.checkpoints.companion_files import copy_companions
from trainer.export import named_tensors, write_model
from trainer.host_copy import HostCopy, assemble
from trainer.model.lora import adapter_off
from trainer.offline.encoding import LoadedRows
from trainer.offline.opening import Opened, newest_checkpoint, open_model, starting_folder
from trainer.offline.packing import Schedule, micro_batches
from trainer.offline.spec import OfflineSpec
from trainer.offline.tasks import Prepared, prepare_task
from trainer.sft import MAX_BAD_UPDATES
from trainer.training_state import (
    generator_states,
    restore_generators,
    restore_training_state,
    torch_generators,
    write_training_state,
)

log = logging.getLogger(__name__)

LINEAGE = "l0"


class OfflineTraining:
    """Runs from the newest checkpoint, or the beginning, to the end or until `is_stopping()`. Call `run` once."""

    def __init__(self, spec: OfflineSpec, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._spec, self._is_stopping = spec, is_stopping
        self._run_dir = Path(spec.run_dir)
        self._started_s = self._saved_s = time.monotonic()
        self._copy = HostCopy()
        self._num_bad = 0
        self.version = 0
        self.counters: dict[str, float] = {"steps": 0.0, "tokens": 0.0, "skipped_updates": 0.0}

    def run(self) -> None:
        """Execute the run. Raises UserError, OperationError (the disk), PolicyDiverged."""
        self._journal = JsonlLog(self._run_dir / "metrics.jsonl")
        try:
            self._open()
            freeze_heap()
            if self._take_steps():
                self._finish()
        finally:
            self._journal.close()

    def _open(self) -> None:
        spec = self._spec
        self._start = starting_folder(spec)
        self._rows = prepare_task(spec, self._start)
        train = self._rows.train
        self.schedule = Schedule(len(train.items), spec.batch_size, spec.epochs, spec.seed, spec.max_steps)
        found = newest_checkpoint(self._run_dir)
        self._opened = self._model_in(self._start if found is None else found[0])
        self._policy, self._task = self._opened.policy, self._rows.make_task(self._opened.setup)
        if self._task.needs_start:
            is_start = found is None or self._opened.adapter is not None
            start = self._policy if is_start else self._model_in(self._start).policy
            with adapter_off(start.model):
                for rows in (train, self._rows.eval):
                    self._task.refer_to(start, () if rows is None else rows.items)
        if found is not None:
            self._restore(*found)
        self._announce(self._rows, self._opened)

    def _model_in(self, source: Path) -> Opened:
        return open_model(
            self._spec, source, self._start, num_steps=self.schedule.num_steps, max_context=self._rows.max_tokens
        )

    def _restore(self, folder: Path, state: CheckpointState) -> None:
        restore_training_state(folder, self._policy)
        restore_generators(state.generators)
        self.version = state.version
        self.counters |= state.counters
        if state.config_digest != self._digest():
            log.warning("settings differ from those the checkpoint was made with: the run continues with the new ones")
        log.info("resumed step %d from %s", state.version, folder)

    def _announce(self, rows: Prepared, opened: Opened) -> None:
        """Report to the controller: rows, steps, dropped rows."""
        files: dict[str, LoadedRows] = {"train": rows.train} | ({} if rows.eval is None else {"eval": rows.eval})
        counts = {f"{name}_rows": len(found.items) for name, found in files.items()}
        counts |= {f"{name}_rows_too_long": len(found.too_long) for name, found in files.items()}
        self._write(
            "offline", objective=self._spec.objective, num_steps=self.schedule.num_steps, version=self.version,
            setup=opened.attention_words, **counts,
        )  # fmt: skip
        for found in files.values():
            if words := found.words(rows.max_tokens):
                log.warning("%s", words)
                self._write("note", note="rows_too_long", text=words)

    # ------------------------------------------------------------ steps

    def _take_steps(self) -> bool:
        """Run the remaining steps. Returns False if it was stopped before the last one, with a checkpoint."""
        if self.version == 0 and self._spec.eval.at_start:
            self._evaluate()
        while self.version < self.schedule.num_steps:
            if self._is_stopping():
                self._save("a stop")
                return False
            self._step()
            self._look()
        return True

    def _look(self) -> None:
        """Run an evaluation or save a checkpoint after a step, if due."""
        settings, is_last = self._spec.trainer.checkpoint, self.version == self.schedule.num_steps
        every = self._spec.eval.every_steps
        if every and self.version % every == 0 and not is_last:
            self._evaluate()
        is_due = bool(settings.every_steps) and self.version % settings.every_steps == 0
        if not is_due and settings.every_s is not None:
            is_due = time.monotonic() - self._saved_s >= settings.every_s
        if is_due and not is_last:
            self._save("due")

    def _step(self) -> None:
        step, started_s = self.version + 1, time.perf_counter()
        items = [self._rows.train.items[row] for row in self.schedule.rows_of(step)]
        weight = self._task.weight_of(items)
        sums: Counter[str] = Counter()
        self._policy.zero_grad()
        batches = list(micro_batches(items, self._spec.trainer.micro_batch_tokens))
        for place, members in enumerate(batches):
            loss, part = self._task.loss(self._policy, members, weight)
            self._policy.backward(loss, is_last=place == len(batches) - 1)
            sums.update(part)
        result = self._policy.update(step)
        self._count_bad(step, is_bad=not result.is_applied)
        self.version = step
        num_tokens, step_s = sum(item.num_tokens for item in items), time.perf_counter() - started_s
        self.counters["steps"] += 1
        self.counters["tokens"] += num_tokens
        self._write(
            "step", step=step, epoch=self.schedule.epoch_of(step), **self._task.figures(sums),
            grad_norm=result.grad_norm, grad_norm_max=result.grad_norm, lr=result.lr, num_rows=len(items),
            tokens=num_tokens, micro_batches=len(batches), skipped_updates=float(not result.is_applied),
            updates=float(result.is_applied), step_s=step_s, trainer_tokens_per_s=num_tokens / max(step_s, 1e-9),
            wall_s=time.monotonic() - self._started_s,
        )  # fmt: skip

    def _count_bad(self, step: int, *, is_bad: bool) -> None:
        self._num_bad = self._num_bad + 1 if is_bad else 0
        self.counters["skipped_updates"] += is_bad
        if is_bad:
            log.warning("step %d: the gradient was not finite, the update was skipped", step)
        if self._num_bad >= MAX_BAD_UPDATES:
            what = f"the gradient was not finite in {self._num_bad} steps in a row, up to step {step}"
            raise PolicyDiverged(step - self._num_bad, what)

    def _evaluate(self) -> None:
        if self._rows.eval is None:
            return
        sums: Counter[str] = Counter()
        with torch.no_grad():
            for members in micro_batches(self._rows.eval.items, self._spec.trainer.micro_batch_tokens):
                sums.update(self._task.evaluate(self._policy, members))
        self._write("eval", version=self.version, **self._task.eval_figures(sums))

    # ------------------------------------------------------------ checkpoints and export

    def _finish(self) -> None:
        """Run the last evaluation, save the last checkpoint and export the model."""
        self._evaluate()
        self._save("the end")
        target = self._run_dir / "final"
        with atomic_folder(target) as partial:
            model, dtype = self._policy.model, self._spec.model.dtype
            if (adapter := self._opened.adapter) is None:
                write_model(model, partial, dtype=dtype)
            else:
                adapter.export(partial, model, named_tensors(model), dtype=dtype)
            copy_companions(self._start, partial)
            self._rows.complete(partial)
        log.info("exported %s", target)

    def _save(self, reason: str) -> None:
        if checkpoint.checkpoint_folder(self._run_dir, self.version).is_dir() or self.version == 0:
            return
        started_s = time.perf_counter()
        parts, adapter = self._policy.parts(), self._opened.adapter
        copied = self._copy.take(parts if adapter is None else adapter.kept(parts))
        copied.wait()
        tensors = assemble([(copied.places, copied.buffer_U)])
        state = CheckpointState(
            version=self.version, lineage=LINEAGE, run_id=self._spec.run_id, config_digest=self._digest(),
            counters=dict(self.counters), generators=generator_states(), origin_dtype=self._spec.model.dtype,
        )  # fmt: skip
        settings, generators = self._spec.trainer.checkpoint, torch_generators()

        def write(partial: Path) -> Facts:
            facts = write_training_state(partial, tensors, generators, self._opened.files, self._start)
            self._rows.complete(partial)
            return facts

        folder, num_bytes = checkpoint.save(
            self._run_dir,
            state,
            write,
            Retention(keep=settings.keep, every_s=settings.keep_every_s),
        )
        self._saved_s = time.monotonic()
        write_s = time.perf_counter() - started_s
        log.info("checkpoint of step %d (%s): %s", self.version, reason, folder)
        self._write(
            "checkpoint", version=self.version, path=str(folder), stall_s=write_s, write_s=write_s, num_bytes=num_bytes
        )

    def _write(self, kind: str, **facts: Any) -> None:
        self._journal.append({"kind": kind, "time_s": time.time(), **facts})

    def _digest(self) -> str:
        facts = self._spec.model_dump(mode="json", exclude={"run_id", "parent_pid", "run_dir", "num_threads"})
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
