"""Random schedules of colocated runs: links in both directions, deaths of trainer and workers, resumes that replay.

Contains the faults of a schedule, and a command that runs a large number of schedules:

    PYTHONPATH=. python tests/controller/support/colocated_schedules.py [NUMBER] [FIRST_SEED] [KIND]

It prints the seed and the error of every schedule that fails;
`tests/controller/coordinator/test_colocated_schedules.py` runs a few hundred of them.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections import Counter

import msgspec
from handover_plans import PLANS, follow
from linked_cluster import LinkedCluster
from schedules import random_settings

from controller.coordinator.settings import CoordinatorSettings

STEADY = (
    "deliver", "deliver", "deliver", "deliver_burst", "receive", "receive", "receive", "receive", "work", "work",
    "work", "generate", "generate", "request_batch", "finish_step", "tick", "restart_worker", "come_back", "resend",
    "leave", "start_trainer", "report_progress", "answer_recalls", "halt_link", "let_links_go_on", "see_end",
)  # fmt: skip
RARE = {"halt_link": 0.2, "let_links_go_on": 0.1, "tick": 0.3, "resend": 0.5, "leave": 0.3, "see_end": 0.3}
"""Weights of actions that come less often than the others."""
PROFILES: dict[str, tuple[str, ...]] = {
    "steady": (),
    "resumes": ("crash",),
    "trainer_deaths": ("kill_trainer", "kill_trainer_at_handover"),
    "handovers": ("kill_trainer", "kill_trainer_at_handover", "silence_at_handover", "silence_at_handover"),
    "silences": ("silence", "silence_at_handover"),
    "trainer_out_of_reach": ("lose_touch_with_trainer", "lose_touch_with_trainer"),
    "worker_deaths": ("kill_worker", "drain_worker", "fail_to_load", "get_stuck"),
    "quarantines": ("fail_to_load", "fail_to_load", "hang_in_load", "kill_worker", "crash", "kill_trainer"),
    "everything": (
        "crash", "kill_trainer", "kill_trainer_at_handover", "silence", "silence_at_handover",
        "lose_touch_with_trainer", "kill_worker", "drain_worker", "fail_to_load", "get_stuck", "hang_in_load",
        "duplicate", "drain_one",
    ),
}  # fmt: skip
"""Faults by the name of a kind of schedule."""
KINDS = (*PROFILES, "everything", "everything", *PLANS, *PLANS, "all_plans", "all_plans")
"""Kinds to draw from: half of the schedules follow plans (handover_plans.py)."""


def colocated_settings(rng: random.Random) -> CoordinatorSettings:
    """Tiny runs, so that most of the time is handover; half of them without a deadline, which would hide deadlocks."""
    return msgspec.structs.replace(
        random_settings(rng), mode="sync", is_colocated=True, groups_per_step=rng.choice([1, 2, 3]),
        group_size=rng.choice([1, 2]), load_deadline_s=rng.choice([8.0, 1e6]), max_load_attempts=1000,
        num_steps=rng.randint(4, 12), group_timeout_s=1e6,
        num_eval_rows=rng.choice([0, 0, 2]), max_sample_losses=100,
    )  # fmt: skip


def run_colocated(seed: int, kind: str = "", *, num_actions: int = 500) -> LinkedCluster:
    """One seeded random schedule with faults, then calm until the end. Raises AssertionError on a violation."""
    rng = random.Random(seed)
    kind = kind or rng.choice(KINDS)
    plans = [kind] if kind in PLANS else list(PLANS) if kind == "all_plans" else []
    faults = PROFILES["steady" if kind in PLANS else rng.choice([*PROFILES]) if plans else kind]
    cluster = _make(rng)
    weights = [RARE.get(name, 1.0) * rng.choice([0.2, 1.0, 1.0, 4.0]) for name in STEADY]
    weights += [rng.choice([0.1, 0.3, 1.0]) for _ in faults]
    plan = follow(cluster, plans) if plans else None
    try:
        for _ in range(rng.choice([0, 0, 5, 15])):  # some steps are trained already
            cluster.calm_round()
        for action in rng.choices((*STEADY, *faults), weights, k=num_actions):
            if cluster.end is not None:
                break
            getattr(cluster, action)()
            if plan is not None and cluster.end is None:
                next(plan)
        cluster.run_to_end()
        cluster.check_end()
    finally:
        cluster.close()
    return cluster


def _make(rng: random.Random) -> LinkedCluster:
    settings = colocated_settings(rng)
    num_workers = rng.choice([1, 2, 2, 3])
    return LinkedCluster(
        msgspec.structs.replace(settings, num_workers=num_workers), rng, num_workers=num_workers,
        capacity=rng.choice([1, 1, 1, 2, 9]), segment_tokens=rng.choice([0, 0, 2]), failure_rate=rng.choice([0.0, 0.1]),
        checkpoint_every=rng.choice([1, 3, 6]),
    )  # fmt: skip


def main() -> int:
    """Run many schedules and report; the exit status is 1 where one of them failed."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    kind = sys.argv[3] if len(sys.argv) > 3 else ""
    failures: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    logging.disable(logging.WARNING)
    started_s = time.monotonic()
    for seed in range(first, first + number):
        try:
            cluster = run_colocated(seed, kind)
        except (AssertionError, KeyError) as error:
            complaint = str(error) or "assertion inside the coordinator"
            failures[complaint[:40]] += 1
            if failures.total() <= 10:
                print(f"seed {seed}: {complaint[:300]}", flush=True)
        else:
            if (seed - first) % 1000 == 999:
                print(f"{seed - first + 1} schedules, {time.monotonic() - started_s:.0f} s", flush=True)
            totals.update(
                events=cluster.num_events, releases=cluster.num_releases, trainer_deaths=cluster.num_trainer_deaths,
                lineages=len(cluster.ledger.lineages), ended=cluster.num_ended,
            )  # fmt: skip
            totals[cluster.end.status if cluster.end else "no end"] += 1
            totals[f"on_stale {cluster.settings.on_stale}"] += 1
    taken_s = time.monotonic() - started_s
    print(f"{number} schedules in {taken_s:.0f} s, {failures.total()} failed: {dict(failures)}; {dict(totals)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
