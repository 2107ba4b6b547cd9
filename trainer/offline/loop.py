"""One run from files: open, evaluate, steps, checkpoints, export.

It defines their order, writes the rows of metrics.jsonl, and decides when a checkpoint is due. Formulas are in
objectives.py; the task defines what a row means. The display and status.json belong to the controller, which reads
metrics.jsonl.

A step is a pure function of the seed, the rows and the previous checkpoint, so that a run that is killed at any moment
and resumed computes the same bits as one that is not. Everything happens on one thread; a request to stop takes effect
between two steps.

With several ranks each runs this loop. All compute the same order of rows and the same division of a step, so they need
no orders; rank 0 alone writes files, and decides what depends on time or signals (`_agreed`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from trainer.gathered import gathered
from trainer.host_copy import HostCopy
from trainer.model.lora import adapter_off
from trainer.offline.encoding import LoadedRows
from trainer.offline.opening import Opened, join_ranks, newest_checkpoint, open_model, starting_folder
from trainer.offline.packing import Item, Schedule, own_micro_batches
from trainer.offline.spec import OfflineSpec
from trainer.offline.tasks import Prepared, prepare_task
from trainer.peer_errors import peer_errors_as_rank_lost
from trainer.ranks import Ranks
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
NOT_SETTINGS = {
    "name", "run_id", "parent_pid", "run_dir", "num_threads", "rank", "num_ranks", "ranks_address", "has_own_gpus",
}  # fmt: skip
"""Keys of the spec that differ from session to session."""


class OfflineTraining:
    """Runs from the newest checkpoint, or the beginning, to the end or until `is_stopping()`. Call `run` once."""

    def __init__(self, spec: OfflineSpec, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._spec, self._is_stopping = spec, is_stopping
        self._run_dir = Path(spec.run_dir)
        self._started_s = self._saved_s = time.monotonic()
        self._copy = HostCopy()
        self._num_bad = 0
        self._saved_version = 0
        self._journal: JsonlLog | None = None
        self.ranks: Ranks | None = None
        """None before this process has joined the others, or is known to be alone."""
        self.version = 0
        self.counters: dict[str, float] = {"steps": 0.0, "tokens": 0.0, "skipped_updates": 0.0}

    def run(self) -> None:
        """Execute the run. Raises UserError, OperationError (the disk), RankLost, PolicyDiverged."""
        is_shared = self._spec.num_ranks > 1
        if self._is_leader:
            self._journal = JsonlLog(self._run_dir / "metrics.jsonl")
        try:
            with peer_errors_as_rank_lost("training together") if is_shared else contextlib.nullcontext():
                self._open()
                freeze_heap()
                if self._take_steps():
                    self._finish()
            if self.ranks is not None:
                self.ranks.close()
        finally:
            if self._journal is not None:
                self._journal.close()

    def _open(self) -> None:
        spec = self._spec
        if spec.num_ranks > 1:
            self.ranks = join_ranks(spec)
        self._start, found = self._prepared()
        self._rows = prepare_task(spec, self._start)
        train = self._rows.train
        self.schedule = Schedule(len(train.items), spec.batch_size, spec.epochs, spec.seed, spec.max_steps)
        self._opened = self._model_in(self._start if found is None else found[0])
        self.ranks = self._opened.setup.ranks
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

    def _prepared(self) -> tuple[Path, tuple[Path, CheckpointState] | None]:
        """Return the starting model and the checkpoint to continue from. Rank 0 prepares and selects them."""
        spec, ranks = self._spec, self.ranks
        if ranks is None:
            return starting_folder(spec), newest_checkpoint(self._run_dir)
        found = None
        if ranks.is_leader:
            starting_folder(spec)
            found = newest_checkpoint(self._run_dir)
        ranks.wait_for_all("preparing the starting model")
        version = 0 if found is None else found[1].version
        version = int(ranks.sum(torch.tensor(float(version), device=ranks.device)))
        if not ranks.is_leader and version:
            folder = checkpoint.checkpoint_folder(self._run_dir, version)
            found = folder, checkpoint.read_state(folder)
        return starting_folder(spec), found

    def _model_in(self, source: Path) -> Opened:
        return open_model(
            self._spec, source, self._start, num_steps=self.schedule.num_steps, max_context=self._rows.max_tokens,
            ranks=self.ranks,
        )  # fmt: skip

    @property
    def _is_leader(self) -> bool:
        return self._spec.rank == 0

    def _agreed(self, wish: bool) -> bool:
        """Return rank 0's `wish`, the same on every rank."""
        ranks = self._opened.setup.ranks
        flag = torch.tensor(float(wish and self._is_leader), device=ranks.device)
        return bool(ranks.sum(flag))

    def _total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Add the sums of all ranks."""
        ranks = self._opened.setup.ranks
        if ranks.size == 1:
            return dict(sums)
        names = sorted(sums)
        values = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=ranks.device)
        return dict(zip(names, ranks.sum(values).tolist(), strict=True))

    def _restore(self, folder: Path, state: CheckpointState) -> None:
        restore_training_state(folder, self._policy)
        restore_generators(state.generators)
        self.version = self._saved_version = state.version
        self.counters |= state.counters
        if state.config_digest != self._digest():
            log.warning("the settings differ from those of the checkpoint; the run continues with the new settings")
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
            if self._agreed(self._is_stopping()):
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
            is_due = self._agreed(time.monotonic() - self._saved_s >= settings.every_s)
        if is_due and not is_last:
            self._save("due")

    def _step(self) -> None:
        step, started_s = self.version + 1, time.perf_counter()
        items = [self._rows.train.items[row] for row in self.schedule.rows_of(step)]
        weight = self._task.weight_of(items)
        sums: Counter[str] = Counter()
        self._policy.zero_grad()
        batches = list(self._own_micro_batches(items))
        for place, (members, is_dummy) in enumerate(batches):
            loss, part = self._task.loss(self._policy, members, weight)
            self._policy.backward(loss * 0.0 if is_dummy else loss, is_last=place == len(batches) - 1)
            sums.update(dict.fromkeys(part, 0.0) if is_dummy else part)
        result = self._policy.update(step)
        self._count_bad(step, is_bad=not result.is_applied)
        self.version = step
        num_tokens, step_s = sum(item.num_tokens for item in items), time.perf_counter() - started_s
        self.counters["steps"] += 1
        self.counters["tokens"] += num_tokens
        self._write(
            "step", step=step, epoch=self.schedule.epoch_of(step), **self._task.figures(self._total(sums)),
            grad_norm=result.grad_norm, grad_norm_max=result.grad_norm, lr=result.lr, num_rows=len(items),
            tokens=num_tokens, micro_batches=len(batches), skipped_updates=float(not result.is_applied),
            updates=float(result.is_applied), step_s=step_s, trainer_tokens_per_s=num_tokens / max(step_s, 1e-9),
            wall_s=time.monotonic() - self._started_s,
        )  # fmt: skip

    def _count_bad(self, step: int, *, is_bad: bool) -> None:
        self._num_bad = self._num_bad + 1 if is_bad else 0
        self.counters["skipped_updates"] += is_bad
        if is_bad:
            log.warning("step %d: the gradient was not finite; the update was skipped", step)
        if self._num_bad >= MAX_BAD_UPDATES:
            what = f"the gradient was not finite in {self._num_bad} steps in a row, up to step {step}"
            raise PolicyDiverged(step - self._num_bad, what)

    def _evaluate(self) -> None:
        if self._rows.eval is None:
            return
        sums: Counter[str] = Counter()
        with torch.no_grad():
            for members, is_dummy in self._own_micro_batches(self._rows.eval.items):
                part = self._task.evaluate(self._policy, members)
                sums.update(dict.fromkeys(part, 0.0) if is_dummy else part)
        self._write("eval", version=self.version, **self._task.eval_figures(self._total(sums)))

    def _own_micro_batches(self, items: Sequence[Item]) -> Iterator[tuple[list[Item], bool]]:
        return own_micro_batches(items, self._spec.trainer.micro_batch_tokens, self._opened.setup.ranks)

    # ------------------------------------------------------------ checkpoints and export

    def _finish(self) -> None:
        """Run the last evaluation, save the last checkpoint and export the model."""
        self._evaluate()
        self._save("the end")
        target, ranks = self._run_dir / "final", self._opened.setup.ranks
        whole = self._policy.full_weights() if ranks.has_group else None
        if not self._is_leader:
            return
        with atomic_folder(target) as partial:
            model, dtype = self._policy.model, self._spec.model.dtype
            if (adapter := self._opened.adapter) is None:
                write_model(model, partial, dtype=dtype, weights=whole)
            else:
                adapter.export(partial, model, whole or named_tensors(model), dtype=dtype)
            copy_companions(self._start, partial)
            self._rows.complete(partial)
        log.info("exported %s", target)

    def _save(self, reason: str) -> None:
        if self.version in (0, self._saved_version):
            return
        self._saved_version = self.version
        started_s = time.perf_counter()
        parts, adapter = self._policy.parts(), self._opened.adapter
        copied = self._copy.take(parts if adapter is None else adapter.kept(parts))
        ranks = self._opened.setup.ranks
        if not self._is_leader:
            assert ranks.saves is not None
            ranks.saves.serve(copied)
            return
        state = CheckpointState(
            version=self.version, lineage=LINEAGE, run_id=self._spec.run_id, config_digest=self._digest(),
            counters=dict(self.counters), generators=generator_states(), origin_dtype=self._spec.model.dtype,
        )  # fmt: skip
        settings, generators = self._spec.trainer.checkpoint, torch_generators()

        with gathered(copied, ranks.saves, self._opened.setup.settings.bucket_bytes) as tensors:

            def write(partial: Path) -> Facts:
                facts = write_training_state(partial, tensors, generators, self._opened.files, self._start)
                self._rows.complete(partial)
                return facts

            retention = Retention(keep=settings.keep, every_s=settings.keep_every_s)
            folder, num_bytes = checkpoint.save(self._run_dir, state, write, retention)
        self._saved_s = time.monotonic()
        write_s = time.perf_counter() - started_s
        log.info("saved the checkpoint of step %d (%s) to %s", self.version, reason, folder)
        self._write(
            "checkpoint", version=self.version, path=str(folder), stall_s=write_s, write_s=write_s, num_bytes=num_bytes
        )

    def _write(self, kind: str, **facts: Any) -> None:
        if self._journal is not None:
            self._journal.append({"kind": kind, "time_s": time.time(), **facts})

    def _digest(self) -> str:
        facts = self._spec.model_dump(mode="json", exclude=NOT_SETTINGS)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
