"""Measurements of a simulated job: which steps are counted, and the numbers of the outcome.

Events are in world.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from areal_like.emulation.replica import Replica
from areal_like.packing import partition
from controller.simulate.job import Job, Losses, Outcome

DEALT_STEPS = 8
"""Steps whose batch is distributed to the ranks by the real code; for later steps the mean imbalance is used."""


class Record:
    """Measurements, filled by the world during the simulation."""

    def __init__(self, job: Job) -> None:
        self._last = last = job.num_steps - job.num_tail_steps
        self.first = min(last - 1, max(1, last // 5))
        """Steps after this one are counted, up to `_last`."""
        self.imbalances: list[float] = []
        """Ratio of the largest rank's tokens to the mean, for the batches distributed by the real code."""
        self._waits_s: list[float] = []
        self._train_s: list[float] = []
        self._ends_s: list[float] = []
        self._tokens: list[int] = []
        self._samples: list[int] = []
        self._staleness: list[Counter[int]] = []
        self._trained_lengths: list[int] = []
        self._lost_lengths: list[int] = []
        self._spent: dict[int, np.ndarray] = {}
        """Work of the workers at the first and the last counted step."""

    def batch(self, lengths: Sequence[int], staleness: Counter[int], *, wait_s: float, train_s: float) -> None:
        """Record the start of a step. staleness: groups by staleness; wait_s: idle time of the trainer before it."""
        self._tokens.append(sum(lengths))
        self._samples.append(len(lengths))
        self._trained_lengths += lengths
        self._staleness.append(staleness)
        self._waits_s.append(wait_s)
        self._train_s.append(train_s)

    def lost(self, lengths: Sequence[int]) -> None:
        """Record the answers of a dropped group, with the lengths that they have or would have had."""
        self._lost_lengths += lengths

    def _losses(self) -> Losses | None:
        """Over the whole job, also its start; None: no group was dropped."""
        if not self._lost_lengths:
            return None
        trained, lost = np.asarray(self._trained_lengths), np.asarray(self._lost_lengths)
        drawn = np.concatenate((trained, lost))
        return Losses(
            share=len(lost) / len(drawn),
            token_share=float(lost.sum() / drawn.sum()),
            drawn_mean=float(drawn.mean()),
            trained_mean=float(trained.mean()),
            drawn_p99=float(np.percentile(drawn, 99)),
            trained_p99=float(np.percentile(trained, 99)),
        )

    def imbalance(self, lengths: Sequence[int], ranks: int) -> float:
        """Ratio of the largest rank's tokens to the mean, by the production code, for DEALT_STEPS batches."""
        if len(self.imbalances) < DEALT_STEPS:
            loads = [sum(lengths[i] for i in share) for share in partition(lengths, ranks)]
            self.imbalances.append(max(loads) * ranks / sum(loads))
        return sum(self.imbalances) / len(self.imbalances)

    def step_ended(self, now_s: float) -> None:
        """Record a published version."""
        self._ends_s.append(now_s)

    @property
    def wants_workers(self) -> bool:
        """Return whether `workers` must be called after this step."""
        return len(self._ends_s) in (self.first, self._last)

    def workers(self, replicas: Sequence[Replica]) -> None:
        """Record the workers' work so far; they must be brought up to date before."""
        spent = [(r.busy_s, r.prefill_s, r.paused_s, r.idle_s, r.tokens, r.steps) for r in replicas]
        self._spent[len(self._ends_s)] = np.asarray(spent).sum(axis=0)

    def outcome(self, num_workers: int) -> Outcome:
        """Make the outcome of the job."""
        done, first = self._last, self.first
        assert len(self._ends_s) >= done
        counted = slice(first, done)
        wall_s = self._ends_s[done - 1] - (self._ends_s[first - 1] if first else 0.0)
        busy_s, prefill_s, paused_s, idle_s, tokens, steps = (
            self._spent[done] - (self._spent[first] if first else 0.0)
        ).tolist()
        worker_s = wall_s * num_workers
        staleness: Counter[int] = Counter()
        for counts in self._staleness[counted]:
            staleness.update(counts)
        return Outcome(
            steps=done,
            wall_s=wall_s,
            first_step=first,
            total_s=self._ends_s[done - 1],
            tokens=float(sum(self._tokens[counted])),
            samples=sum(self._samples[counted]),
            trainer_wait_share=sum(self._waits_s[counted]) / wall_s,
            rollout_idle_share=idle_s / worker_s,
            rollout_paused_share=paused_s / worker_s,
            rollout_prefill_share=prefill_s / worker_s,
            train_s=float(np.mean(self._train_s[counted])),
            staleness=staleness,
            imbalance=float(np.mean(self.imbalances)) if self.imbalances else 1.0,
            mean_batch=tokens / steps if steps > 0 else 0.0,
            losses=self._losses(),
            generated_per_s=tokens / max(busy_s + prefill_s + paused_s, 1e-9) * num_workers,
        )
