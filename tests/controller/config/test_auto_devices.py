"""`device: auto`, with a given number of GPUs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import yaml

from areal_like.config import dump_yaml
from areal_like.device_names import AUTO
from controller.config import machine_gpus
from controller.config.auto_devices import first_gpus
from controller.config.loading import build, load_config, shipped_configs, shipped_offline_configs
from controller.config.offline_loading import build_offline, load_offline
from controller.config.run_config import RunConfig
from trainer.config import SftSettings, TrainerSettings

DATA: dict[str, Any] = {"train": {"generator": "running_sum"}}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def have(count: int) -> None:
        monkeypatch.setattr(machine_gpus, "usable_gpus", lambda: count)

    return have


def make(**keys: Any) -> RunConfig:
    return RunConfig.model_validate({"data": DATA, **keys})


def of(
    workers: int = 1, engine: str = AUTO, trainer: str = AUTO, ranks: int = 1, tp: int = 1, **keys: Any
) -> RunConfig:
    return make(
        rollout={
            "num_workers": workers,
            "engine": {"device": engine, **({"kind": "sglang", "sglang": {"tp_size": tp}} if tp > 1 else {})},
        },
        trainer={"device": trainer, "ranks": ranks},
        **keys,
    )


def test_auto_is_the_default_and_cpu_without_a_gpu() -> None:
    assert TrainerSettings().device == SftSettings().device == AUTO
    config = make(warm_start={"data": DATA["train"]})
    assert config.warm_start is not None
    assert (config.trainer.device, config.rollout.engine.device, config.warm_start.sft.device) == ("cpu",) * 3


def test_without_a_gpu_auto_and_cpu_are_the_same_configuration() -> None:
    start = {"data": DATA["train"], "sft": {"device": "cpu"}}
    named = make(trainer={"device": "cpu"}, rollout={"engine": {"device": "cpu"}}, warm_start=start)
    assert make(warm_start={"data": DATA["train"]}) == named
    assert make(warm_start={"data": DATA["train"]}).model_dump() == named.model_dump()


@pytest.mark.parametrize(
    ("num_gpus", "keys", "trainer", "engine"),
    [
        (1, {}, "cuda:0", "cpu"),  # one GPU is the trainer's
        (2, {}, "cuda:0", "cuda:1"),
        (8, {"workers": 7}, "cuda:0", "cuda"),
        (8, {"workers": 8}, "cuda:0", "cpu"),  # a pool that does not fit whole
        (8, {"workers": 4, "ranks": 4}, "cuda:0", "cuda"),
        (1, {"ranks": 2}, "cpu", "cuda:0"),
        (5, {"workers": 2, "tp": 2}, "cuda:0", "cuda"),
        (4, {"workers": 2, "tp": 2}, "cuda:0", "cpu"),
        (1, {"trainer": "cpu"}, "cpu", "cuda:0"),
        (1, {"engine": "cpu"}, "cuda:0", "cpu"),
        (2, {"engine": "cuda"}, "cuda:1", "cuda"),
        (1, {"engine": "cuda"}, "cpu", "cuda"),
        (4, {"engine": "cuda:1", "ranks": 2}, "cuda:2", "cuda:1"),
        (3, {"engine": "cuda:1", "ranks": 2}, "cpu", "cuda:1"),
        (3, {"engine": "cuda", "workers": 2}, "cuda:0", "cuda"),
        (2, {"engine": "cuda", "workers": 2}, "cpu", "cuda"),
        (2, {"trainer": "cuda:1"}, "cuda:1", "cuda:0"),
        (4, {"trainer": "cuda:1", "workers": 3}, "cuda:1", "cuda"),
    ],
)
def test_a_pool_has_gpus_if_enough_are_left_for_all_of_it(
    gpus: Any, num_gpus: int, keys: dict[str, Any], trainer: str, engine: str
) -> None:
    gpus(num_gpus)
    config = of(**keys)
    assert (config.trainer.device, config.rollout.engine.device) == (trainer, engine)


def test_trainer_and_engines_never_share_a_gpu_and_use_only_those_of_the_machine(gpus: Any) -> None:
    sizes = itertools.product((1, 2, 4, 7), (1, 3), (1, 2), (1, 2), (AUTO, "cpu", "cuda:2"))
    for num_gpus, workers, ranks, tp, named in sizes:
        gpus(num_gpus)
        for key in ("trainer", "engine"):
            config = of(workers, ranks=ranks, tp=tp, **{key: named})
            first = [one.partition(":")[2] or "0" for one in config.rollout_devices if one != "cpu"]
            engines = {int(index) + offset for index in first for offset in range(tp)}
            trainers = {int(one.partition(":")[2] or 0) for one in config.trainer_devices if one != "cpu"}
            assert not engines & trainers, (num_gpus, workers, ranks, tp, key, named)
            chosen = (trainers if key == "engine" or named == AUTO else set()) | (
                engines if key == "trainer" or named == AUTO else set()
            )
            assert max(chosen, default=-1) < num_gpus, (num_gpus, workers, ranks, tp, key, named)


def test_colocated_pools_share_gpus_or_are_both_on_cpus(gpus: Any) -> None:
    gpus(1)
    config = of(mode="sync", placement="colocated")
    assert (config.trainer.device, config.rollout.engine.device) == ("cuda", "cuda")
    config = of(2, mode="sync", placement="colocated")
    assert (config.trainer.device, config.rollout.engine.device) == ("cpu", "cpu")
    config = of(trainer="cuda:0", mode="sync", placement="colocated")
    assert config.rollout.engine.device == "cuda:0"
    config = of(engine="cpu", mode="sync", placement="colocated")
    assert config.trainer.device == "cpu"


def test_on_a_cluster_reserved_gpus_decide_and_not_this_machines(gpus: Any) -> None:
    gpus(8)
    ray = {"kind": "ray", "ray": {"trainer": {"gpus": 1}}}
    config = of(launch=ray, runs_dir="/shared")
    assert (config.trainer.device, config.rollout.engine.device) == ("cuda", "cpu")
    config = make(launch=ray, runs_dir="/shared", rollout={"pool_gpus": 4})
    assert (config.rollout.engine.device, config.rollout.num_workers) == ("cuda", 4)
    ray = {"kind": "ray", "ray": {"rollout": {"gpus": 0}}}
    config = make(launch=ray, runs_dir="/shared")
    assert (config.trainer.device, config.rollout.engine.device) == ("cpu", "cpu")


def test_emulated_devices_are_cpus(gpus: Any) -> None:
    gpus(8)
    config = of(emulation={})
    assert (config.trainer.device, config.rollout.engine.device) == ("cpu", "cpu")


def test_the_warm_start_is_on_the_trainers_first_device(gpus: Any) -> None:
    gpus(3)
    config = of(engine="cuda:0", ranks=2, warm_start={"data": DATA["train"]})
    assert config.warm_start is not None
    assert config.trainer.device == config.warm_start.sft.device == "cuda:1"
    config = of(trainer="cpu", warm_start={"data": DATA["train"], "sft": {"device": "cuda:2"}})
    assert config.warm_start is not None
    assert config.warm_start.sft.device == "cuda:2"


def test_what_was_chosen_stays_on_a_machine_with_other_gpus(gpus: Any) -> None:
    """A run folder records the resolved config, which `resume` reads."""
    gpus(2)
    model = {"path": "somewhere"}
    recorded = yaml.safe_load(dump_yaml(of(model=model)))
    gpus(0)
    again, problems = build(recorded)
    assert problems == []
    assert again is not None
    assert (again.trainer.device, again.rollout.engine.device) == ("cuda:0", "cuda:1")


def test_an_unknown_engine_or_launcher_is_reported_and_not_raised(gpus: Any) -> None:
    gpus(2)
    config, problems = build({"data": DATA, "rollout": {"engine": {"kind": "no_such"}}})
    assert config is None
    assert problems[0].keys == ("rollout.engine.kind",)
    config, problems = build({"data": DATA, "launch": {"kind": "no_such"}})
    assert config is None
    assert problems[0].keys == ("launch.kind",)


@pytest.mark.parametrize("name", [name for name in shipped_configs() if name != "emulated"])
def test_every_shipped_config_names_its_devices(gpus: Any, name: str) -> None:
    gpus(8)
    loaded = load_config(name)
    named = loaded.document.data
    assert loaded.config.trainer.device == named["trainer"]["device"]
    assert loaded.config.rollout.engine.device == named["rollout"]["engine"]["device"]


@pytest.mark.parametrize("name", shipped_offline_configs())
def test_every_shipped_config_that_trains_from_files_names_its_device(gpus: Any, name: str) -> None:
    gpus(8)
    assert load_offline(name).config.trainer.device == "cpu"


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (1, "cuda"), (4, "cuda")])
def test_a_run_from_files_uses_a_gpu_where_there_is_one(gpus: Any, num_gpus: int, device: str) -> None:
    gpus(num_gpus)
    config, problems = build_offline({"model": {"path": "m"}, "data": {"train": "rows.jsonl"}})
    assert problems == []
    assert config is not None
    assert config.trainer.device == device


def test_workers_go_round_gpus_that_are_taken() -> None:
    assert first_gpus(3, 1, {1}) == [0, 2, 3]
    assert first_gpus(1, 4, {3}) == [4]
