"""Claims about pools and seats as pure arithmetic: no Ray."""

from __future__ import annotations

from typing import Any

import pytest

from controller.config.loading import load_config
from controller.launch.cluster.pools import Pool, pools_of, publish_location
from controller.launch.cluster.seating import Node, seat, seat_lines

RAY = ["launch.kind=ray", "runs_dir=/tmp/runs"]


def config(*overrides: str) -> Any:
    return load_config("quickstart", [*RAY, *overrides]).config


def node(name: str, **free: float) -> Node:
    return Node(name, f"10.0.0.{name}", free)


def pool(name: str, count: int, strategy: Any = "PACK", **each: float) -> Pool:
    return Pool(name, tuple(f"{name}-{index}" for index in range(count)), each, strategy)


def test_each_process_takes_what_its_device_and_threads_need():
    found = {pool.name: pool for pool in pools_of(config("rollout.num_workers=3", "reward.num_workers=4"))}
    assert found["rollout"].members == ("rollout-0", "rollout-1", "rollout-2")
    assert found["rollout"].each == {"CPU": 1.0}
    assert found["trainer"].members == ("trainer",)
    assert found["reward"].each == {"CPU": 4.0}


def test_gpus_follow_from_the_device_and_tensor_parallelism():
    gpu = config(
        "rollout.engine.device=cuda", "rollout.engine.kind=sglang", "rollout.engine.sglang.tp_size=4",
        "rollout.engine.python=/opt/sglang/bin/python", "trainer.device=cuda", "trainer.backend=fsdp",
        "trainer.ranks=2",
    )  # fmt: skip
    found = {pool.name: pool.each.get("GPU", 0.0) for pool in pools_of(gpu)}
    assert found == {"trainer": 1.0, "rollout": 4.0, "reward": 0.0}


def test_what_launch_ray_says_wins_and_resources_of_ones_own_are_added():
    found = pools_of(config("launch.ray.rollout={cpus: 0.5, gpus: 0.25, resources: {fast_disk: 1}}"))
    rollout = next(pool for pool in found if pool.name == "rollout")
    assert rollout.each == {"CPU": 0.5, "GPU": 0.25, "fast_disk": 1.0}
    nothing = pools_of(config("launch.ray.reward.cpus=0"))
    assert all(pool.each for pool in nothing), "Ray takes no empty place"


def test_shared_reward_services_take_no_place():
    assert "reward" not in [pool.name for pool in pools_of(config("reward.addresses=['tcp://127.0.0.1:5555']"))]


def test_preparation_sits_where_the_first_rank_will_and_an_added_worker_has_no_place():
    pools = pools_of(config("trainer.backend=fsdp", "trainer.ranks=2"))
    assert publish_location("prepare", pools) == publish_location("trainer", pools) == ("trainer", 0)
    assert publish_location("trainer-1", pools) == ("trainer", 1)
    assert publish_location("rollout-0", pools) == ("rollout", 0)
    assert publish_location("rollout-7", pools) == ("rollout", None)


def test_pack_fills_one_node_before_the_next_and_spread_takes_them_in_turn():
    nodes = [node("1", CPU=4), node("2", CPU=4)]
    packed = seat([pool("a", 4, CPU=1)], nodes).seats
    assert len(set(packed.values())) == 1
    spread = seat([pool("a", 4, "SPREAD", CPU=1)], nodes).seats
    assert sorted(spread.values()) == ["1", "1", "2", "2"]


def test_strict_strategies_are_kept():
    nodes = [node("1", CPU=3), node("2", CPU=3)]
    assert not seat([pool("a", 3, "STRICT_PACK", CPU=1)], nodes).shortages
    together = seat([pool("a", 4, "STRICT_PACK", CPU=1)], nodes)
    assert "all on one node" in together.shortages[0]
    apart = seat([pool("a", 3, "STRICT_SPREAD", CPU=1)], nodes)
    assert "there is room for only 2" in apart.shortages[0]


def test_places_without_a_gpu_leave_the_nodes_with_gpus_to_those_that_need_one():
    nodes = [node("1", CPU=2, GPU=2), node("2", CPU=2)]
    found = seat([pool("cpu", 2, CPU=1), pool("gpu", 2, CPU=1, GPU=1)], nodes)
    assert not found.shortages
    assert {found.seats["gpu-0"], found.seats["gpu-1"]} == {"1"}


def test_some_order_of_pools_that_fits_is_found():
    """Placed first, `small` would sit on node 1 and leave `large` no room."""
    nodes = [node("1", CPU=4, disk=1), node("2", CPU=1)]
    found = seat([pool("small", 1, CPU=1), pool("large", 1, CPU=4, disk=1)], nodes)
    assert not found.shortages
    assert found.seats == {"small-0": "2", "large-0": "1"}


def test_too_small_a_cluster_learns_what_is_missing_and_where():
    nodes = [node("1", CPU=8, GPU=1), node("2", CPU=8)]
    found = seat([pool("rollout", 3, CPU=1, GPU=1)], nodes)
    assert found.shortages[0].startswith("pool rollout needs 3 places of CPU 1, GPU 1, but there is room for only 1 ")
    assert "10.0.0.2: CPU 8, GPU 0" in found.shortages[0]
    assert found.shortages[-1] == "the whole cluster lacks GPU 2"


def test_room_that_is_there_but_cut_up_is_not_called_missing():
    nodes = [node("1", GPU=1), node("2", GPU=1)]
    (words,) = seat([pool("rollout", 1, GPU=2)], nodes).shortages
    assert "but there is no room for any" in words


def test_no_node_at_all_is_a_shortage():
    assert seat([pool("a", 1, CPU=1)], []).shortages


def test_a_line_per_node_says_who_sits_there():
    nodes = [Node("1", "10.0.0.1", {"CPU": 4}, is_controllers=True), node("2", CPU=4)]
    pools = [pool("trainer", 1, CPU=4), pool("rollout", 2, CPU=2)]
    lines = seat_lines(pools, nodes, seat(pools, nodes).seats)
    assert len(lines) == 2
    assert "controller" in lines[0]
    assert any("rollout-0, rollout-1" in line and "4 of 4 CPU" in line for line in lines)


@pytest.mark.parametrize("fraction", [0.1, 0.3])
def test_fractions_add_up_as_ray_counts_them(fraction: float):
    assert not seat([pool("a", round(0.9 / fraction), CPU=fraction)], [node("1", CPU=0.9)]).shortages
