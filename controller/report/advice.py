"""Predicts the effect of a change of the configuration by a simple model, and formulates advice.

`Pace` is the model. What is wrong is determined in waits.py.

The model. Trainer, rollout workers and scoring work at the same time as far as the staleness bound allows. A step takes
as long as its slowest part, the largest of

    trainer_s
    rollout_s * workers / new workers / slot gain
    score_s * scoring processes / new ones
    cpu_s / cores, if everything runs on the cores of one machine: all work divided evenly

with each part's working time in a step as measured. It is an estimate: it does not consider memory bandwidth and the
tail of the longest answers, and counts waiting inside a process (for a disk, a lock) as work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from areal_like.config import DEFAULT_TRANSFER
from controller.config.launchers import LAUNCHERS, LOCAL
from controller.report.data import RunData
from controller.report.finding import capital, percent, plural, sentences
from controller.report.shares import Shares, whole

SLOT_EXPONENT = 1 / 3
"""Tokens per second grow with slots to this power: eight times as many slots gave 2.0 and 2.3 times as many tokens on
long-tailed lengths (two runs of benchmarks/engine.py; in the published one 4.2k and 9.8k tokens per second). A GPU
gains more.
"""
MAX_SLOT_FACTOR = 64
"""Largest factor of slots for which the model is used; a larger one is too far from the measurement."""
MAX_WORKER_FACTOR = 16
WORTH = 0.05
"""A gain below this is within the noise between two runs."""
SLOTS_FULL = 0.7
"""Below this share slots are empty because there are not enough samples; more slots would be empty too."""
WORTH_MENTION = 0.1
"""Rollout workers with a smaller idle share are not limited by the bound: the rest is swaps and ends of steps."""
MANY = 3.0
"""A gain below this is printed in percent, above it as a multiple."""
BEST_SHARE = 0.98
"""Share of the maximum rate that the recommended number of workers must reach."""
MODEL = "Model: a step takes as long as its slowest part"


@dataclass(frozen=True)
class Pace:
    """Measured seconds of work per step, and the resources used."""

    step_s: float
    trainer_s: float
    rollout_s: float
    """With all workers working, none idle."""
    workers: int = 1
    slots: int = 1
    """Slots of one worker."""
    score_s: float = 0.0
    """With all scoring processes working."""
    scorers: int = 1
    trainer_threads: int = 1
    rollout_threads: int = 1
    cores: int | None = None
    """Cores of the machine that everything runs on; None: separate devices, or not known."""

    @property
    def is_known(self) -> bool:
        """Whether the data is sufficient for a prediction."""
        parts = (self.step_s, self.trainer_s, self.rollout_s)
        return all(math.isfinite(part) for part in parts) and self.step_s > 0 and self.rollout_s > 0

    def predict(self, *, workers: int | None = None, slot_gain: float = 1.0, scorers: int | None = None) -> float:
        """Predicted seconds of a step after the change."""
        rollout_s = self.rollout_s * self.workers / slot_gain  # time of one worker doing all the work
        needed = [
            self.trainer_s,
            rollout_s / (workers or self.workers),
            self.score_s * self.scorers / (scorers or self.scorers),
        ]
        if self.cores:
            cpu_s = self.trainer_s * self.trainer_threads + rollout_s * self.rollout_threads
            needed.append(cpu_s / self.cores)
        return max(needed)

    def gain(self, *, workers: int | None = None, slot_gain: float = 1.0, scorers: int | None = None) -> float:
        """Relative gain in steps per second over the model's prediction for the present; never negative."""
        after_s = self.predict(workers=workers, slot_gain=slot_gain, scorers=scorers)
        return max(0.0, self.predict() / after_s - 1.0) if after_s > 0 else 0.0

    @property
    def overlap_gain(self) -> float:
        """Relative gain in steps per second if all parts worked at the same time, over the measured present."""
        return max(0.0, self.step_s / self.predict() - 1.0) if self.predict() > 0 else 0.0

    def enough_workers(self) -> int:
        """The smallest number of workers that comes close to the maximum rate."""
        most = self.workers * MAX_WORKER_FACTOR
        best_s = self.predict(workers=most)
        return next(n for n in range(1, most + 1) if n == most or self.predict(workers=n) * BEST_SHARE <= best_s)

    def enough_slots(self, most: int) -> int:
        """Slots of a worker, doubled until the trainer is the slowest part; at most `most`."""
        slots = self.slots
        while slots < min(most, self.slots * MAX_SLOT_FACTOR) and self.predict(slot_gain=self.slot_gain(slots)) > max(
            self.trainer_s, self.predict(slot_gain=1e9)
        ):
            slots *= 2
        return min(slots, max(most, self.slots))

    def slot_gain(self, slots: int) -> float:
        """Ratio of tokens per second with `slots` to the present rate."""
        return (slots / self.slots) ** SLOT_EXPONENT


def pace_of(data: RunData, shares: Shares) -> Pace:
    """The run's pace; unknown parts are NaN, and `is_known` is then False."""
    step_s = shares.step_s
    workers = whole(data, "rollout.num_workers", 1) or 1
    if math.isfinite(shares.rollout_workers) and shares.rollout_workers >= 1:
        workers = min(workers, round(shares.rollout_workers))
    return Pace(
        step_s=step_s,
        trainer_s=(1.0 - shares.trainer_wait) * step_s,
        rollout_s=shares.rollout_working * step_s,
        workers=workers,
        slots=whole(data, "rollout.engine.num_slots", 1) or 1,
        score_s=0.0 if math.isnan(shares.scoring_busy) else shares.scoring_busy * step_s,
        scorers=whole(data, "reward.num_workers", 1) * whole(data, "reward.num_services", 1) or 1,
        trainer_threads=_threads(data, "trainer.threads"),
        rollout_threads=_threads(data, "rollout.threads"),
        cores=data.cores if shares_cores(data) else None,
    )


def shares_cores(data: RunData) -> bool:
    """Return whether trainer and rollout workers compute on the cores of one machine."""
    devices = (data.setting("rollout.engine.device", "cpu"), data.setting("trainer.device", "cpu"))
    return devices == ("cpu", "cpu")


def more_generation(data: RunData, shares: Shares, pace: Pace) -> tuple[str, str]:
    """(advice, prediction) if generation is the slowest part."""
    ways, remarks, hopes = [], [], []
    slots = _more_slots(data, shares, pace)
    if slots > pace.slots:
        ways.append(
            f"raise rollout.engine.num_slots from {pace.slots} to {slots} (this requires memory for the KV cache, but "
            "no "
            "additional cores)"
        )
        hopes.append(f"{_plus(pace.gain(slot_gain=pace.slot_gain(slots)))} with {slots} slots")
    workers = pace.enough_workers()
    if workers > pace.workers and (gain := pace.gain(workers=workers)) >= WORTH:
        where = "" if shares_cores(data) else " on separate devices"
        ways.append(f"raise rollout.num_workers from {pace.workers} to {workers}{where}")
        hopes.append(f"{_plus(gain)} with {plural(workers, 'worker')}")
    elif pace.cores:
        remarks.append(
            f"more workers on the same {plural(pace.cores, 'core')} would not help, because all cores are busy; use "
            "more cores or a different device"
        )
    way, remark = _bound_words(data, shares)
    ways += [way] if way else []
    remarks += [remark] if remark else []
    return sentences(capital(", or ".join(ways)), *map(capital, remarks)), _prediction(hopes, pace)


def looser_bound(data: RunData, pace: Pace) -> tuple[str, str]:
    """(advice, prediction) if trainer and rollout workers both wait for work: the bound prevents them from overlapping.

    With a sufficient bound they overlap completely, and the slower of the two is never idle.
    """
    bound = data.setting("staleness.max_staleness")
    mode = data.setting("mode", "async")
    gain = pace.overlap_gain if pace.is_known else 0.0
    hope = _prediction([f"{_plus(gain)} if both work at the same time"] if gain >= WORTH else [], pace)
    if mode in ("sync", "one_step_off"):
        return f"Choose mode: async (with mode: {mode}, trainer and rollout workers wait for each other)", hope
    if not isinstance(bound, int) or isinstance(bound, bool):
        return "Check the timeline to find the process that the others wait for", ""
    return f"Raise staleness.max_staleness from {bound} to {max(bound + 1, 2 * bound)}", hope


def fewer_rollouts(data: RunData, shares: Shares, pace: Pace) -> tuple[str, str]:
    """(advice, prediction) if the trainer is the slowest part and the bound limits rollout workers."""
    ways = []
    enough = workers_at_work(shares, pace)
    if enough < pace.workers:
        ways.append(f"reduce rollout.num_workers from {pace.workers} to {enough}, which would be enough")
    threads = _threads(data, "trainer.threads")
    if pace.cores and threads < pace.cores:
        ways.append(f"let the trainer use the idle cores (increase trainer.threads above {threads})")
    elif not shares_cores(data):
        ways.append("move devices from the rollout pool to the trainer")
    ways.append("reduce the time of a training step (increase trainer.micro_batch_tokens, or reduce groups_per_step)")
    advice = "; ".join(ways) + ". More rollout workers or a higher max_staleness would only make samples older"
    if not pace.is_known:
        return capital(advice), ""
    least_s = max(pace.rollout_s, (pace.trainer_s + pace.rollout_s * pace.workers) / pace.cores if pace.cores else 0.0)
    gain = pace.step_s / least_s - 1.0
    hope = f"{_plus(gain)} with a trainer as fast as the rollout workers" if gain >= WORTH else ""
    fewer = f"no loss with {plural(enough, 'rollout worker')}" if enough < pace.workers else ""
    return capital(advice), _prediction([one for one in (hope, fewer) if one], pace)


def faster_transfers(data: RunData) -> list[str]:
    """Advice to use a faster transfer of weights, if there is one for this run."""
    is_shared = data.setting("trainer.weights.kind", DEFAULT_TRANSFER) == DEFAULT_TRANSFER
    if is_shared or not _is_one_machine(data):
        return []
    return [f"transfer weights through shared memory (trainer.weights.kind: {DEFAULT_TRANSFER})"]


def _is_one_machine(data: RunData) -> bool:
    """Whether all processes of the run share the memory of one machine; False for a launcher that is not known here."""
    kind = str(data.setting("launch.kind", LOCAL.name))
    return kind in LAUNCHERS and LAUNCHERS[kind].is_one_machine


def has_reward_service(data: RunData) -> bool:
    """Whether services score the answers of the run; otherwise its workflow gives the rewards."""
    reward = data.setting("reward")
    if not isinstance(reward, dict) or "scorers" not in reward:
        return True  # the configuration is damaged or incomplete
    return any(reward.get(key) for key in ("scorers", "environment", "addresses"))


def scoring_logs(data: RunData) -> str:
    """The logs that contain the failures of scoring."""
    if not has_reward_service(data):
        return "the logs of the rollout workers"
    if data.setting("reward.addresses"):
        return "the logs of the reward services"
    return "logs/reward.log" if whole(data, "reward.num_services", 1) <= 1 else "logs/reward-*.log"


def workers_at_work(shares: Shares, pace: Pace) -> int:
    """Number of rollout workers that would do the same work without idling."""
    if not math.isfinite(shares.rollout_working):
        return pace.workers
    return max(1, math.ceil(pace.workers * shares.rollout_working / BEST_SHARE))


def more_scoring(pace: Pace, *, failures: str) -> tuple[str, str]:
    """(advice, prediction) if scoring is the slowest part. failures: the logs of failures; empty if there are none."""
    first = f"Fix the scorer first (the failures are in {failures})" if failures else ""
    without_s = replace(pace, score_s=0.0).predict() if pace.is_known else 0.0
    scorers = pace.scorers
    if pace.score_s > without_s > 0:
        scorers = min(pace.scorers * MAX_WORKER_FACTOR, math.ceil(pace.scorers * pace.score_s / without_s))
    more = f" from {pace.scorers} to {scorers}" if scorers > pace.scorers else ""
    way = (
        f"Make the scorer faster, or raise reward.num_workers{more} (scoring that only waits for a service needs no "
        "additional core)"
    )
    gain = pace.gain(scorers=scorers) if pace.is_known else 0.0
    hope = [f"{_plus(gain)} if scores arrived without delay"] if gain >= WORTH else []
    return sentences(first, way), _prediction(hope, pace)


# ------------------------------------------------------------ inside


def _more_slots(data: RunData, shares: Shares, pace: Pace) -> int:
    """Slots of a worker that would be filled: only if the present slots are full, and as far as the bound admits
    samples.
    """
    if math.isfinite(shares.slots_full) and shares.slots_full < SLOTS_FULL:
        return pace.slots
    bound = data.setting("staleness.max_staleness")
    in_step = whole(data, "groups_per_step", 0) * whole(data, "group_size", 0)
    if not in_step:
        return pace.slots
    in_flight = (bound + 1) * in_step if isinstance(bound, int) and not isinstance(bound, bool) else 2 * in_step
    slots = pace.enough_slots(max(1, in_flight // pace.workers))
    is_worth_it = slots >= 1.5 * pace.slots and pace.gain(slot_gain=pace.slot_gain(slots)) >= WORTH
    return slots if is_worth_it else pace.slots


def _bound_words(data: RunData, shares: Shares) -> tuple[str, str]:
    """Sentence about a higher max_staleness: whether it would help."""
    bound = data.setting("staleness.max_staleness")
    if not isinstance(bound, int) or isinstance(bound, bool):
        return "", ""
    way = f"raise staleness.max_staleness from {bound} to {max(bound + 1, 2 * bound)}"
    if math.isfinite(shares.slots_full) and shares.slots_full < SLOTS_FULL:
        why = (
            f"only {percent(shares.slots_full)} of the slots are in use; new groups could start while the longest "
            "answers are still being generated"
        )
        return f"{way} ({why})", ""
    if shares.rollout_idle >= WORTH_MENTION:
        return way, ""
    return (
        "",
        f"increasing max_staleness above {bound} would not help, because the bound does not delay any rollout worker",
    )


def _threads(data: RunData, path: str) -> int:
    configured = data.setting(path, "auto")
    if isinstance(configured, int) and not isinstance(configured, bool) and configured > 0:
        return configured
    return data.cores or 1 if data.setting("mode") == "sync" else 1


def _plus(gain: float) -> str:
    return f"+{100 * gain:.0f} %" if gain < MANY else f"{1 + gain:.0f} times as many"


def _prediction(hopes: list[str], pace: Pace) -> str:
    if not hopes or not pace.is_known:
        return ""
    cores = f". This assumes that {pace.cores} cores share all work evenly" if pace.cores else ""
    return f"Estimated steps per second: {', '.join(hopes)}. {MODEL}{cores}."
