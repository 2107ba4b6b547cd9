"""Combines the facts of a step when its batch is sent with the trainer's measurements, for metrics and display.

Writes the step rows of metrics.jsonl. Totals are in summary.py, layout in display.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from controller.telemetry.display import Display
from controller.telemetry.journal import Journal
from controller.telemetry.progress import Pace, Progress
from controller.telemetry.step_table import StepRow
from controller.telemetry.summary import Tally

PACE_STEPS = 20
"""Number of newest steps used to estimate the remaining time."""


@dataclass(frozen=True)
class Shipment:
    """A batch sent to the trainer; staleness by group."""

    staleness: list[int]
    num_samples: int
    num_tokens: int
    is_replay: bool
    sent_s: float


class StepReporter:
    """Reports finished steps."""

    def __init__(
        self,
        tally: Tally,
        display: Display,
        journal: Journal,
        *,
        num_steps: int,
        bound: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tally, self._display, self._journal = tally, display, journal
        self._num_steps, self._bound, self._clock = num_steps, bound, clock
        self._shipments: dict[int, Shipment] = {}
        self._first_s: float | None = None
        self._last = (clock(), 0.0, 0.0, 0.0)
        self._pace = Pace(PACE_STEPS)

    def shipped(self, step: int, *, staleness: list[int], num_samples: int, num_tokens: int, is_replay: bool) -> None:
        """Record that the batch of `step` was sent to the trainer."""
        self.starts()
        self._shipments[step] = Shipment(staleness, num_samples, num_tokens, is_replay, self._clock())

    def starts(self) -> None:
        """Record the first lease or, if a resumed run replays, the first batch: throughput is counted from here."""
        if self._first_s is None:
            self._first_s = self._clock()
            self._pace.at(self._first_s, self._tally.steps)
            self._last = (self._first_s, *self._totals())

    def wall_s(self) -> float:
        """Seconds since the first lease; 0 before it."""
        return 0.0 if self._first_s is None else self._clock() - self._first_s

    def eta_s(self) -> float | None:
        """Estimated seconds to the last step from the newest steps; None before the first step of this session."""
        return self._pace.left_s(self._clock(), self._num_steps - self._tally.steps)

    def progress(self) -> Progress:
        """Progress of the whole run, with the remaining time estimated from this session."""
        return Progress("steps", self._tally.steps, self._num_steps, self.eta_s())

    def _totals(self) -> tuple[float, float, float]:
        total = self._tally.total
        return total("rollout", "tokens"), total("trainer", "wait_s"), total("trainer", "busy_s")

    def published(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a finished step."""
        shipment = self._shipments.pop(step, None) or Shipment([], 0, 0, False, self._clock())
        for old in [key for key in self._shipments if key < step]:
            del self._shipments[old]
        now_s = self._clock()
        self.starts()
        self._tally.add_step(shipment.num_samples, shipment.num_tokens, shipment.staleness)
        assert self._first_s is not None
        self._tally.train_wall_s = now_s - self._first_s
        self._pace.at(now_s, self._tally.steps)
        then_s, tokens, wait_s, busy_s = self._last
        new_tokens, new_wait_s, new_busy_s = self._totals()
        self._last = (now_s, new_tokens, new_wait_s, new_busy_s)
        elapsed_s = max(now_s - then_s, 1e-9)
        waited_s, worked_s = max(0.0, new_wait_s - wait_s), max(0.0, new_busy_s - busy_s)
        row = StepRow(
            step=step,
            num_steps=self._num_steps,
            reward=metrics.get("reward_mean", float("nan")),
            loss=metrics.get("loss", float("nan")),
            grad_norm=metrics.get("grad_norm", float("nan")),
            staleness_mean=sum(shipment.staleness) / len(shipment.staleness) if shipment.staleness else 0.0,
            staleness_max=max(shipment.staleness, default=0),
            rollout_tokens_per_s=max(0.0, new_tokens - tokens) / elapsed_s,
            trainer_tokens_per_s=shipment.num_tokens / elapsed_s,
            wait_share=waited_s / (waited_s + worked_s) if waited_s + worked_s > 0 else 0.0,
            is_replay=shipment.is_replay,
            bound=self._bound,
            left_s=self.eta_s(),
        )
        self._display.step(row)
        self._journal.append(
            {
                **metrics,
                "kind": "step",
                "time_s": time.time(),
                "step": step,
                "wall_s": self._tally.train_wall_s,
                "staleness": shipment.staleness,
                "staleness_mean": row.staleness_mean,
                "staleness_max": row.staleness_max,
                "num_samples": shipment.num_samples,
                "num_sampled_tokens": shipment.num_tokens,
                "is_replay": shipment.is_replay,
                "samples_per_s": shipment.num_samples / elapsed_s,
                "rollout_tokens_per_s": row.rollout_tokens_per_s,
                "trainer_tokens_per_s": row.trainer_tokens_per_s,
                "trainer_wait_share": row.wait_share,
                **self._tally.lengths.row(),
                **self._tally.signs.row(),
            }
        )
