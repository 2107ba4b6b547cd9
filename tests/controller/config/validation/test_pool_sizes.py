"""How many processes, GPUs and CPUs a config means, and which sizes cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from valid_config import make

from controller.config.derived import advise, derive
from controller.config.validation.pool_sizes import fit_problem, gpus_of_run, pool_problems, pool_sizes
from controller.config.validation.run import cross_check

CUDA = {"rollout__engine": {"device": "cuda"}, "trainer__device": "cuda"}
SGLANG = {"rollout__engine": {"kind": "sglang", "device": "cuda", "sglang": {"tp_size": 2}}, "trainer__device": "cuda"}
COLOCATED = {"mode": "sync", "placement": "colocated"}


def sizes(**changes: Any) -> dict[str, tuple[int, int, int]]:
    return {pool.name: (pool.num_processes, pool.gpus, pool.cpus) for pool in pool_sizes(make(**changes))}


def test_a_pool_counted_in_gpus_gives_its_workers() -> None:
    assert sizes(**CUDA, rollout__pool_gpus=7)["rollout"] == (7, 7, 7)
    assert sizes(**SGLANG, rollout__pool_gpus=6)["rollout"] == (3, 6, 3)


def test_a_pool_counted_in_cpus_gives_its_workers() -> None:
    assert sizes(rollout__pool_cpus=6, rollout__threads=2)["rollout"] == (3, 0, 6)
    assert sizes(rollout__pool_cpus=6)["rollout"] == (6, 0, 6)


def test_gpus_of_a_run_are_the_sum_and_of_a_colocated_one_the_larger() -> None:
    assert gpus_of_run(make(**CUDA, rollout__num_workers=7)) == 8
    assert gpus_of_run(make(**CUDA, **COLOCATED, rollout__num_workers=2)) == 2
    assert gpus_of_run(make()) == 0


def test_what_does_not_fit_is_said_in_one_sentence_with_what_would() -> None:
    assert fit_problem(make(**CUDA, rollout__num_workers=7), 8) is None
    problem = fit_problem(make(**SGLANG, rollout__num_workers=4), 8)
    assert "the run requires 9 GPUs (rollout: 4 workers x 2 GPUs; trainer: 1 rank x 1 GPU)" in str(problem)
    assert "this machine has 8" in str(problem)
    assert "rollout.num_workers: 3" in str(problem)
    assert fit_problem(make(**CUDA, **COLOCATED), 1) is None


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({**SGLANG, "rollout__pool_gpus": 7}, "rollout.pool_gpus", "cannot be divided"),
        (
            {**CUDA, "rollout__pool_gpus": 4, "rollout__num_workers": 3},
            "rollout.pool_gpus",
            "4 workers of 1 GPU, but num_workers is 3",
        ),
        ({"rollout__pool_gpus": 4}, "rollout.pool_gpus", "run on cpu"),
        ({"rollout__pool_cpus": 3, "rollout__threads": 2}, "rollout.pool_cpus", "cannot be divided"),
        ({**CUDA, "rollout__pool_gpus": 2, "rollout__pool_cpus": 2}, "rollout.pool_gpus", "or in CPUs"),
        ({"placement": "colocated"}, "placement", "at the same time"),
        ({**COLOCATED, "trainer__weights": {"kind": "distributed"}}, "trainer.weights.kind", "memory to receive"),
        (
            {**COLOCATED, "trainer__weights": {"swap": "rolling"}},
            "trainer.weights.swap",
            "rolling swap is not possible",
        ),
        (
            {**COLOCATED, "trainer__device": "cuda"},
            "placement",
            "requires the trainer and the engines to use the same kind of device",
        ),
        ({**COLOCATED, "trainer__backend": "fsdp"}, "trainer.backend", "cpu_offload"),
        (
            {**COLOCATED, "rollout__engine": {"kind": "sglang", "sglang": {"attach": ["http://127.0.0.1:30000"]}}},
            "rollout.engine.sglang.attach",
            "may restart",
        ),
        (
            {**COLOCATED, **SGLANG, "rollout__engine": {**SGLANG["rollout__engine"], "sglang": {"release_idle_s": 5}}},
            "rollout.engine.sglang.release_idle_s",
            "memory is already released whenever the trainer uses the device",
        ),
    ],
)
def test_a_size_or_placement_that_cannot_be_is_refused(changes: dict[str, Any], key: str, words: str) -> None:
    (problem,) = cross_check(make(**changes))
    assert problem.keys[0] == key
    assert words in str(problem)
    assert problem.remedy


def test_sglang_may_share_devices_in_turns_and_on_a_cpu_it_is_said_to_keep_its_memory() -> None:
    on_gpus = make(**COLOCATED, **SGLANG)
    assert cross_check(on_gpus) == []
    assert gpus_of_run(on_gpus) == 2
    on_a_cpu = make(**COLOCATED, rollout__engine={"kind": "sglang"})
    assert cross_check(on_a_cpu) == []
    words = "placement: on a CPU, SGLang servers do not release memory"
    assert any(advice.startswith(words) for advice in advise(on_a_cpu))
    assert not any(advice.startswith(words) for advice in advise(on_gpus))


def test_the_pools_are_among_the_derived_numbers() -> None:
    shown = {number.name: (number.value, number.formula) for number in derive(make(**SGLANG, rollout__pool_gpus=6))}
    assert shown["rollout pool"] == ("6 GPUs", "3 workers x 2 GPUs")
    assert shown["trainer pool"] == ("1 GPU", "1 rank x 1 GPU")
    assert shown["GPUs of the run"][0] == "7"


def test_a_resolved_config_with_a_pool_size_is_valid_again() -> None:
    config = make(**SGLANG, rollout__pool_gpus=6)
    again = type(config).model_validate(config.model_dump(mode="json"))
    assert again.rollout.num_workers == 3
    assert cross_check(again) == []


class TestWhatRaySetsAside:
    def test_is_what_a_pool_takes(self) -> None:
        ray = {"rollout": {"cpus": 2.5}, "trainer": {"cpus": 8, "gpus": 2}, "reward": {"cpus": 0.5}}
        cluster = {"launch": {"kind": "ray", "ray": ray}, "trainer__device": "cuda", "rollout__num_workers": 3}
        assert sizes(**cluster) == {"rollout": (3, 0, 7.5), "trainer": (1, 2, 8), "reward": (1, 0, 0.5)}
        assert pool_sizes(make(**cluster))[0].words == "3 workers x 2.5 CPUs"

    def test_means_nothing_on_one_machine(self) -> None:
        assert sizes(launch__ray={"rollout": {"cpus": 4}})["rollout"] == (1, 0, 1)

    def test_gives_the_workers_of_a_pool_counted_in_cpus(self) -> None:
        ray = {"kind": "ray", "ray": {"rollout": {"cpus": 2}}}
        assert make(launch=ray, rollout__pool_cpus=8).rollout.num_workers == 4
        config = make(launch=ray, rollout={"pool_cpus": 8, "num_workers": 8})
        assert (
            "8 CPUs can be divided into 4 workers of 2 CPUs, but num_workers is 8" in next(pool_problems(config)).what
        )
        odd = make(launch={"kind": "ray", "ray": {"rollout": {"cpus": 2.5}}}, rollout__pool_cpus=8)
        assert "3 workers of 2.5 CPUs need 7.5 CPUs, not 8" in [problem.what for problem in pool_problems(odd)]

    def test_gives_the_workers_of_a_pool_counted_in_gpus(self) -> None:
        ray = {"kind": "ray", "ray": {"rollout": {"gpus": 0.5}}}
        assert make(launch=ray, rollout={"pool_gpus": 2, "engine": {"device": "cuda"}}).rollout.num_workers == 4


SCALE = {"min_workers": 1, "max_workers": 4}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"rollout__num_workers": 5}, "rollout.autoscale", "starts with 5 workers, which is not between"),
        ({"rollout__num_workers": 1, "scale": {"min_workers": 2}}, "rollout.autoscale", "min_workers (2)"),
        ({**CUDA, "rollout__num_workers": 2}, "rollout.autoscale.max_workers", "would share a GPU with another"),
        (COLOCATED, "rollout.autoscale", "their number cannot change"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(changes: dict[str, Any], key: str, words: str) -> None:
    scale = {**SCALE, **changes.get("scale", {})}
    config = make(**{name: value for name, value in changes.items() if name != "scale"}, rollout__autoscale=scale)
    found = [one for one in cross_check(config) if one.keys[0] == key]
    assert any(words in problem.what for problem in found), found


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__num_workers": 2},
        {"rollout__num_workers": 4},
        {**CUDA, "rollout__num_workers": 4},
        {**CUDA, "rollout__num_workers": 2, "launch__kind": "ray", "launch__ray": {"rollout": {"gpus": 1}}},
    ],
)
def test_limits_around_the_number_of_workers_are_valid(changes: dict[str, Any]) -> None:
    problems = [one for one in cross_check(make(**changes, rollout__autoscale=SCALE)) if "autoscale" in one.keys[0]]
    assert problems == []
