"""What a simulated job is measured by, step by step.

Owns: `Record`: which steps count, and the figures of the outcome. Refuses: events (world.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from areal_like.emulation.replica import Replica
from areal_like.packing import partition
from controller.simulate.job import Job, Outcome

DEALT_STEPS = 8
"""Steps whose batch is really dealt to the ranks; later ones take their mean imbalance."""


class Record:
    """Filled by the world while it runs."""

    def __init__(self, job: Job) -> None:
        self._last = last = job.num_steps - job.num_tail_steps
        self.first = min(last - 1, max(1, last // 5))
        """The steps after this one are counted, up to `_last`."""
        self.imbalances: list[float] = []
        """Heaviest rank's tokens over the mean, of the batches that were really dealt."""
        self._waits_s: list[float] = []
        self._train_s: list[float] = []
        self._ends_s: list[float] = []
        self._tokens: list[int] = []
        self._samples: list[int] = []
        self._staleness: list[Counter[int]] = []
        self._spent: dict[int, np.ndarray] = {}
        """Of the workers, after the steps between which it is counted."""

    def batch(self, lengths: Sequence[int], staleness: Counter[int], *, wait_s: float, train_s: float) -> None:
        """The trainer begins a step. staleness: groups by it; wait_s: how long it had nothing to do."""
        self._tokens.append(sum(lengths))
        self._samples.append(len(lengths))
        self._staleness.append(staleness)
        self._waits_s.append(wait_s)
        self._train_s.append(train_s)

    def imbalance(self, lengths: Sequence[int], ranks: int) -> float:
        """Heaviest rank's tokens over the mean, by the dealing that runs in production; of DEALT_STEPS batches."""
        if len(self.imbalances) < DEALT_STEPS:
            loads = [sum(lengths[i] for i in share) for share in partition(lengths, ranks)]
            self.imbalances.append(max(loads) * ranks / sum(loads))
        return sum(self.imbalances) / len(self.imbalances)

    def step_ended(self, now_s: float) -> None:
        """A version is published."""
        self._ends_s.append(now_s)

    @property
    def wants_workers(self) -> bool:
        """`workers` is due after this step."""
        return len(self._ends_s) in (self.first, self._last)

    def workers(self, replicas: Sequence[Replica]) -> None:
        """What they have spent so far; bring them to now before."""
        spent = [(r.busy_s, r.prefill_s, r.paused_s, r.idle_s, r.tokens, r.steps) for r in replicas]
        self._spent[len(self._ends_s)] = np.asarray(spent).sum(axis=0)

    def outcome(self, num_workers: int) -> Outcome:
        """Of the whole job."""
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
            generated_per_s=tokens / max(busy_s + prefill_s + paused_s, 1e-9) * num_workers,
        )
