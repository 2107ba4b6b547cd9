"""What is proposed where a pool has a size that cannot be, or does not fit onto the machine."""

from __future__ import annotations

from typing import Any

import pytest
from valid_config import make

from controller.config.validation.pool_sizes import PoolSize, fit_problem, gpus_of_worker, pool_problems, units
from controller.config.validation.run import cross_check

CUDA = {"rollout__engine": {"device": "cuda"}, "trainer__device": "cuda"}
COLOCATED = {"mode": "sync", "placement": "colocated"}


def sglang(tp_size: int) -> dict[str, Any]:
    return {
        "rollout__engine": {"kind": "sglang", "device": "cuda", "sglang": {"tp_size": tp_size}},
        "trainer__device": "cuda",
    }


@pytest.mark.parametrize(
    ("size", "tp_size", "remedy"), [(7, 2, "6 or 8"), (3, 4, "4"), (9, 4, "8 or 12"), (11, 4, "8 or 12")]
)
def test_a_pool_that_cannot_be_divided_is_offered_the_sizes_on_both_sides(size: int, tp_size: int, remedy: str) -> None:
    (problem,) = pool_problems(make(**sglang(tp_size), rollout__pool_gpus=size))
    assert problem.what == f"{size} GPUs cannot be divided into workers of {tp_size} GPUs"
    assert problem.remedy == f"use {remedy}"


def test_a_pool_that_says_another_number_than_its_workers_keeps_one_of_the_two() -> None:
    (problem,) = pool_problems(make(**sglang(2), rollout__pool_gpus=6, rollout__num_workers=2))
    assert problem.keys == ("rollout.pool_gpus", "rollout.num_workers")
    assert problem.what == "6 GPUs can be divided into 3 workers of 2 GPUs, but num_workers is 2"
    assert list(pool_problems(make(**sglang(2), rollout__pool_gpus=6, rollout__num_workers=3))) == []


@pytest.mark.parametrize(
    ("changes", "num_gpus", "remedy"),
    [
        ({**CUDA, "rollout__num_workers": 8}, 8,
         "set rollout.num_workers: 7, or placement: colocated with mode: sync"),
        ({**CUDA, "rollout__num_workers": 2}, 1, "set placement: colocated with mode: sync"),
        ({**sglang(2), "rollout__num_workers": 4}, 6,
         "set rollout.num_workers: 2, or placement: colocated with mode: sync"),
        ({**CUDA, **COLOCATED, "rollout__num_workers": 3}, 2, "set rollout.num_workers: 2"),
        ({**CUDA, **COLOCATED, "trainer__ranks": 3}, 2, "reduce trainer.ranks"),
        ({**CUDA, **COLOCATED, "rollout__num_workers": 3, "trainer__ranks": 3}, 2,
         "set rollout.num_workers: 2, and reduce trainer.ranks"),
        ({**sglang(2), **COLOCATED, "rollout__num_workers": 1}, 1, "use a machine with more GPUs"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_fit_is_offered_the_workers_that_would(
    changes: dict[str, Any], num_gpus: int, remedy: str
) -> None:
    problem = fit_problem(make(**changes), num_gpus)
    assert problem is not None
    assert problem.keys == ("rollout.num_workers", "trainer.ranks")
    assert problem.remedy == remedy


def test_pools_of_a_colocated_run_do_not_want_their_gpus_together() -> None:
    separate = fit_problem(make(**CUDA, rollout__num_workers=2), 2)
    shared = fit_problem(make(**CUDA, **COLOCATED, rollout__num_workers=3), 2)
    alone = fit_problem(make(rollout__engine={"device": "cuda"}, rollout__num_workers=3), 2)
    assert separate is not None
    assert shared is not None
    assert alone is not None
    devices = "rollout: 2 workers x 1 GPU; trainer: 1 rank x 1 GPU"
    assert separate.what == f"the run requires 3 GPUs ({devices}), but this machine has 2"
    assert "1 rank x 1 GPU, on the same GPUs), but this machine has 2" in shared.what
    assert alone.what == "the run requires 3 GPUs (rollout: 3 workers x 1 GPU), but this machine has 2"


def test_a_run_whose_devices_are_named_one_by_one_may_share_them() -> None:
    assert fit_problem(make(rollout__engine={"device": "cuda:0"}, trainer__device="cuda:0"), 1) is None


@pytest.mark.parametrize(
    ("weights", "key", "remedy"),
    [
        ({"kind": "distributed"}, "trainer.weights.kind", "set trainer.weights.kind: shm, or stream between hosts"),
        ({"swap": "rolling"}, "trainer.weights.swap", "set swap: together"),
    ],
)
def test_weights_of_a_colocated_run_are_offered_a_way_that_works(
    weights: dict[str, Any], key: str, remedy: str
) -> None:
    (problem,) = cross_check(make(**COLOCATED, trainer__weights=weights))
    assert (problem.keys[0], problem.remedy) == (key, remedy)


@pytest.mark.parametrize(
    ("trainer", "is_refused"),
    [
        ({"backend": "torch"}, False), ({"backend": "fsdp", "fsdp": {"cpu_offload": True}}, False),
        ({"backend": "fsdp"}, True), ({"backend": "deepspeed"}, True),
    ],
)  # fmt: skip
def test_a_trainer_that_shares_its_devices_must_be_able_to_clear_them(
    trainer: dict[str, Any], is_refused: bool
) -> None:
    problems = cross_check(make(**COLOCATED, trainer=trainer))
    assert [problem.keys[0] for problem in problems] == ["trainer.backend"] * is_refused


def test_emulated_devices_cannot_be_shared() -> None:
    assert "placement" in {problem.keys[0] for problem in cross_check(make(**COLOCATED, emulation={}))}


def test_counts_are_written_with_their_unit() -> None:
    assert [units(count, "GPU") for count in (0, 1, 2, 2.5)] == ["0 GPUs", "1 GPU", "2 GPUs", "2.5 GPUs"]
    assert PoolSize("reward", 1, 0, 4).words == "1 service x 4 CPUs"
    assert PoolSize("trainer", 2, 1, 4).words == "2 ranks x 1 GPU"
    assert (PoolSize("trainer", 2, 1, 4).gpus, PoolSize("trainer", 2, 1, 4).cpus) == (2, 8)
    assert gpus_of_worker(make()) == 0
    assert gpus_of_worker(make(**CUDA)) == 1
    assert gpus_of_worker(make(**sglang(4))) == 4


def test_shared_reward_services_are_no_pool_of_the_run() -> None:
    shared = make(reward={"scorers": [{"kind": "math"}], "addresses": ["tcp://host:1"]})
    assert [problem for problem in cross_check(shared) if "pool" in str(problem)] == []
