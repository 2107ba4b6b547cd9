"""Random schedules for the virtual cluster: the actions, the frequency of faults, and small random settings.

The checks are in virtual_cluster.py and ledger_model.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
from virtual_cluster import VirtualCluster

from controller.coordinator.effects import Effect
from controller.coordinator.settings import CoordinatorSettings

STEADY = ("deliver", "deliver", "deliver", "deliver_burst", "generate", "generate", "load_version", "request_batch")
FAULTLESS = (
    *STEADY, "finish_step", "report_progress", "tick", "restart_worker", "come_back", "resend",
    "tell_speed", "answer_recalls", "leave", "start_trainer", "write_again",
)  # fmt: skip
FAULTS = (
    "kill_worker", "silence", "duplicate", "fail_to_load", "damage_version", "drain_one", "drain_worker",
    "kill_trainer", "reject_one", "crash",
)  # fmt: skip
ACTIONS = (*FAULTLESS, *FAULTS)
ELASTIC = ("join_external", "drain_external")
"""Actions of schedules in which workers join and leave."""


def random_settings(rng: random.Random) -> CoordinatorSettings:
    """Small runs over all modes and policies."""
    mode = rng.choice(["async", "async", "async", "one_step_off", "sync"])
    return CoordinatorSettings(
        groups_per_step=rng.randint(1, 3),
        group_size=rng.randint(1, 3),
        num_steps=rng.randint(2, 5),
        mode=mode,
        max_staleness=rng.choice([0, 0, 1, 2, 4, None]),
        on_stale=rng.choice(["wait", "wait", "wait", "drop", "keep"]),
        group_timeout_s=rng.choice([20.0, 1e6, 1e6]),
        on_failure=rng.choice(["drop_sample", "drop_group", 0.0]),
        filter_zero_signal=rng.random() < 0.3,
        max_filtered_batches=0,
        num_workers=2,
        num_eval_rows=rng.choice([0, 0, 2]),
        eval_every_steps=rng.choice([0, 1, 2]),
        max_sample_losses=20,
        load_retry_s=2.0,
        routing=rng.choice(["least_tokens", "least_tokens", "round_robin"]),
        affinity=rng.choice([0.0, 1.0, 1.0]),
        migration=rng.random() < 0.8,
        min_gain_s=rng.choice([0.1, 2.0]),
        queue_samples=rng.choice([0, 0, 1]),
        max_new_tokens=rng.choice([8, 40]),
    )


def run_schedule(
    seed: int,
    *,
    settings: CoordinatorSettings | None = None,
    num_actions: int = 150,
    more: tuple[str, ...] = (),
    make: Callable[..., VirtualCluster] = VirtualCluster,
    mirror: Callable[[list[tuple[Effect, list[int] | None]]], None] | None = None,
) -> VirtualCluster:
    """One seeded random schedule with faults, then calm until the end. more: further actions."""
    rng = random.Random(seed)
    settings = settings or random_settings(rng)
    fault, crash, reject = rng.choice([(0.0, 0.0, 0.0), (0.15, 0.05, 0.05), (0.4, 0.2, 0.05), (0.8, 0.05, 0.0)])
    num_workers = rng.randint(1, 3)
    cluster = make(
        msgspec.structs.replace(settings, num_workers=num_workers),
        rng,
        num_workers=num_workers,
        capacity=rng.choice([1, 2, 4, 9]),
        segment_tokens=rng.choice([0, 0, 2]),
        failure_rate=rng.choice([0.0, 0.1]),
        equal_rate=rng.choice([0.0, 0.3]),
        mirror=mirror,
    )
    weights = [1.0] * len(FAULTLESS) + [fault] * (len(FAULTS) - 2) + [reject, crash]
    for action in rng.choices((*ACTIONS, *more), weights + [1.0] * len(more), k=num_actions):
        if cluster.end is not None:
            break
        getattr(cluster, action)()
    cluster.run_to_end()
    cluster.check_end()
    return cluster
