"""Processes of one run on a Ray cluster: one placement group per pool, one actor (seat) per process.

Connects, checks all nodes, reserves placements, and maps addresses of processes that move to another node. Restarts are
decided by the supervisor (Ray's own are disabled). Data is sent over ZeroMQ, not Ray.

The placements of a pool are reserved for the whole run. When a node fails, Ray moves its placements to another node
when one has the resources, also to one that joins later; until then the process waits. An added rollout worker gets a
placement group with one placement, which is removed with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal_like.errors import OperationError, UserError
from areal_like.import_check import USER_PATH
from areal_like.transport.credentials import credential_files
from controller.config.run_config import RunConfig
from controller.launch.cluster.connection import Cluster, import_ray
from controller.launch.cluster.node_check import check_nodes
from controller.launch.cluster.pools import Pool, pools_of, publish_location
from controller.launch.cluster.seat import SPEC_PLACE, Order, Place, Seat, Seated, with_host
from controller.launch.cluster.seat_process import SeatProcess
from controller.launch.cluster.seating import Node, seat, seat_lines
from controller.launch.launcher import Exit, Launcher, Say, Spawned
from controller.run_folder.run_folder import RunFolder

log = logging.getLogger(__name__)

PLACE_POLL_S = 0.1
"""Interval of checks whether Ray has reserved the placements."""
SEAT_CALLS = 4
"""Concurrent calls of a seat: news, a signal, the exit, and one spare."""


class RayLauncher(Launcher):
    """The processes of one run on a cluster. Must be used from one event loop."""

    def __init__(self, config: RunConfig, log_dir: Path, run_dir: Path, run_id: str) -> None:
        super().__init__(log_dir)
        self._config, self._run_dir, self._run_id = config, run_dir, run_id
        self._settings = config.launch.ray
        self._cluster = Cluster(self._settings.address)
        self._pools = pools_of(config)
        self._groups: dict[str, Any] = {}
        """Placement groups by pool."""
        self._added: dict[str, Any] = {}
        """Placement groups of added rollout workers, by name."""
        self._host = ""
        self._addresses: dict[str, str] = {}
        """Results of `address_for`, with the present host of the process."""
        self._reported: dict[str, str] = {}
        """The address as first returned, which is used in specs."""
        self._meeting = Meeting(())
        """Meeting of the trainer's ranks in their present incarnation."""

    @property
    def host(self) -> str:
        """launch.ray.host, or this node's address in the cluster."""
        return self._host

    async def open(self, say: Say) -> bool:
        """Connect, check every node, and reserve the placements. Raises UserError that says what is missing on which
        node.
        """
        await asyncio.to_thread(self._cluster.open, f"areal_like-{self._run_id}")
        _take_signals_back()
        os.chdir(self.user_path)  # Ray may have unpacked a job's working directory again and replaced the folder
        nodes = await asyncio.to_thread(self._cluster.nodes)
        plan = seat(self._pools, nodes)
        if plan.shortages:
            raise too_small(plan.shortages)
        problems = await asyncio.to_thread(check_nodes, self._config, self._cluster, nodes, self._run_dir)
        if problems:
            more = f" (and {len(problems) - 1} more: areal-like validate)" if len(problems) > 1 else ""
            raise UserError(problems[0].what + more, where=problems[0].keys[0], remedy=problems[0].remedy)
        self._host = self._settings.host or self._cluster.own_address
        await self._reserve()
        for line in seat_lines(self._pools, nodes, await asyncio.to_thread(self._seats)):
            say(f"node {line}")
        return True

    async def close(self) -> None:
        """Release all placements and disconnect."""
        await asyncio.to_thread(self._give_back)

    async def address_for(self, name: str) -> str:
        """Address of its node, with a free port. When the process moves, the port is kept and the host is the new
        node's.
        """
        node = await asyncio.to_thread(self._node_of, name)
        port = await asyncio.to_thread(self._cluster.free_port, node)
        address = with_host(f"tcp://host:{port}", node.address)
        self._addresses[name] = self._reported[name] = address
        return address

    def reap(self) -> list[Exit]:
        """Same as for all launchers; also releases the placement of an added worker."""
        ended = super().reap()
        for end in ended:
            if (group := self._added.pop(end.name, None)) is not None:
                _remove(group)
        return ended

    async def _spawn(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> Spawned:
        ray = import_ray()
        words, spec = _with_spec(argv)
        pool = self._pool(publish_location(name, self._pools)[0])
        group, index = self._place(name)
        actor = (
            ray.remote(Seat)
            .options(
                num_cpus=pool.each.get("CPU", 0.0),
                num_gpus=pool.each.get("GPU", 0.0),
                resources={key: amount for key, amount in pool.each.items() if key not in ("CPU", "GPU")},
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=SEAT_CALLS,
            )
            .remote()
        )
        meeting = self._meeting_of(name)

        async def order(place: Place) -> Order:
            return self._order(words, spec, environment, await meeting.address(name, place) if meeting else "")

        def on_seated(seated: Seated) -> None:
            self._moved(name, seated)

        return SeatProcess(actor, order, self.log_of(name), self._cluster, on_seated, needs=pool.words)

    # ------------------------------------------------------------ places

    async def _reserve(self) -> None:
        ray = import_ray()
        deadline_s = time.monotonic() + self._settings.placement_timeout_s
        for pool in self._pools:
            self._groups[pool.name] = ray.util.placement_group(
                [dict(pool.each) for _ in pool.members],
                strategy=pool.strategy,
                name=f"areal_like-{self._run_id}-{pool.name}",
            )
        for pool in self._pools:
            while not await asyncio.to_thread(_is_placed, self._groups[pool.name]):
                if time.monotonic() > deadline_s:
                    await self._say_who_has_no_place(pool)
                await asyncio.sleep(PLACE_POLL_S)

    async def _say_who_has_no_place(self, pool: Pool) -> None:
        nodes = await asyncio.to_thread(self._cluster.nodes)
        shortages = seat([pool], nodes).shortages
        waited = (
            f"Ray did not reserve the placements of pool {pool.name} within {self._settings.placement_timeout_s:g} s"
        )
        raise too_small((waited, *shortages))

    def _place(self, name: str) -> tuple[Any, int]:
        pool_name, index = publish_location(name, self._pools)
        if index is not None:
            return self._groups[pool_name], index
        if name not in self._added:
            self._added[name] = import_ray().util.placement_group(
                [dict(self._pool(pool_name).each)], strategy="PACK", name=f"areal_like-{self._run_id}-{name}"
            )
        return self._added[name], 0

    def _pool(self, name: str) -> Pool:
        return next(pool for pool in self._pools if pool.name == name)

    def _seats(self) -> dict[str, str]:
        """Node ids of the placements, by process."""
        found: dict[str, str] = {}
        for pool in self._pools:
            nodes = _nodes_of(self._groups[pool.name])
            found |= {name: nodes[index] for index, name in enumerate(pool.members) if index in nodes}
        return found

    def _node_of(self, name: str) -> Node:
        node_id = self._seats().get(name)
        found = next((node for node in self._cluster.nodes() if node.node_id == node_id), None)
        if found is None:
            raise OperationError(f"the node reserved for {name} is no longer in the cluster")
        return found

    def _give_back(self) -> None:
        for group in (*self._groups.values(), *self._added.values()):
            _remove(group)
        self._groups.clear()
        self._added.clear()
        self._cluster.close()

    # ------------------------------------------------------------ the order of a process

    def _meeting_of(self, name: str) -> Meeting | None:
        """The meeting of a rank; the first rank makes a new one for the ranks that follow."""
        ranks = next((pool.members for pool in self._pools if pool.name == "trainer"), ())
        if name not in ranks:
            return None
        if name == ranks[0]:
            self._meeting = Meeting(ranks)
        return self._meeting

    def _order(
        self,
        argv: tuple[str, ...],
        spec: dict[str, Any],
        environment: Mapping[str, str],
        ranks_address: str = "",
    ) -> Order:
        """The order of a process, with current addresses and the run's keys. ranks_address: where this rank meets the
        others.
        """
        spec = dict(spec)
        now = {self._reported[name]: self._addresses[name] for name in self._reported}
        if "reward_addresses" in spec:
            spec["reward_addresses"] = [now.get(address, address) for address in spec["reward_addresses"]]
        if ranks_address:
            spec["ranks_address"] = ranks_address
        weights = self._config.trainer.weights
        is_writer = spec.get("role") == "trainer" and spec.get("rank") == 0
        return Order(
            argv=argv,
            spec=json.dumps(spec),
            num_threads=int(environment["OMP_NUM_THREADS"]),
            user_path=environment[USER_PATH],
            keys={
                key: credential_files(Path(folder), has_server=key != "reward_curve_dir")
                for key in ("curve_dir", "reward_curve_dir")
                if (folder := spec.get(key))
            },
            weight_versions=weights.keep + 1 if is_writer and weights.transfer.is_store_on_trainer_node else 0,
        )

    def _moved(self, name: str, seated: Seated) -> None:
        """Handle that the process was placed: its address may have changed."""
        log.info("%s was placed on node %s (process %d)", name, seated.address, seated.pid)
        before = self._addresses.get(name)
        if before is None or urlsplit(before).hostname == seated.address.strip("[]"):
            return
        self._addresses[name] = with_host(before, seated.address)
        if name.startswith("reward"):
            for other, child in self._children.items():
                if other.startswith("rollout-") and isinstance(child.process, SeatProcess):
                    child.process.end_with(f"RewardMoved: {name} is on node {seated.address} now")


class Meeting:
    """The address at which the trainer's ranks meet: on the first rank's node, at a port that was free there.

    No rank starts before all have their placements; otherwise the early ones would run into the deadline of meeting the
    others.
    """

    def __init__(self, ranks: Sequence[str]) -> None:
        self._ranks, self._places = ranks, dict[str, Place]()
        self._is_complete = asyncio.Event()

    async def address(self, name: str, place: Place) -> str:
        """Wait until all ranks have reported their placements; return tcp://host:port. The deadline is the
        supervisor's.
        """
        self._places[name] = place
        if len(self._places) == len(self._ranks):
            self._is_complete.set()
        await self._is_complete.wait()
        first = self._places[self._ranks[0]]
        return with_host(f"tcp://host:{first.port}", first.address)


def _take_signals_back() -> None:
    """Restore the SIGTERM handler: Ray installs its own before Python's, which kills the process 3 s later."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)


def too_small(shortages: Sequence[str]) -> UserError:
    """Error that the cluster has not enough resources for the run."""
    remedy = "add nodes, or reduce rollout.num_workers, trainer.ranks, or the resources in launch.ray"
    return UserError("; ".join(shortages), where="launch.ray", remedy=remedy)


def _with_spec(argv: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The argv with a placeholder for the spec's file, and the spec."""
    words = list(argv)
    index = words.index("--spec") + 1
    spec: dict[str, Any] = json.loads(Path(words[index]).read_text())
    words[index] = SPEC_PLACE
    return tuple(words), spec


def _nodes_of(group: Any) -> dict[int, str]:
    """Node ids of a group's placements by index, without those that Ray has not placed."""
    table = import_ray().util.placement_group_table(group)
    return {int(index): node for index, node in table.get("bundles_to_node_id", {}).items() if node}


def _is_placed(group: Any) -> bool:
    return bool(import_ray().util.placement_group_table(group).get("state") == "CREATED")


def _remove(group: Any) -> None:
    ray = import_ray()
    try:
        ray.util.remove_placement_group(group)
    except ray.exceptions.RayError as error:
        log.warning("releasing a placement group failed: %s", error)


def make(config: RunConfig, folder: RunFolder) -> RayLauncher:
    """Make the launcher of a run on a cluster; ray is imported when it is opened."""
    return RayLauncher(config, folder.logs, folder.root, str(folder.read_state()["run_id"]))
