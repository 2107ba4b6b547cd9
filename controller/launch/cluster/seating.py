"""Determines whether all pools fit on the existing nodes, their expected placement, and what is missing. Pure; ray is
not imported.

The placement is done by Ray, which may choose other nodes with the same resources.

Pools are placed one after another, each by its strategy. If one order of the pools fails, the others are tried: a
placement that only needs CPUs must not use the last CPU of a node with GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from controller.launch.cluster.pools import Pool, resource_words

TINY = 1e-6
"""Ray counts resources in ten-thousandths."""
MAX_NODES_NAMED = 6
"""Maximum nodes listed in a sentence about missing resources."""


@dataclass(frozen=True)
class Node:
    """One live node of the cluster: its address and free resources."""

    node_id: str
    address: str
    free: Mapping[str, float]
    is_controllers: bool = False


@dataclass(frozen=True)
class Seating:
    """Expected placement of processes."""

    seats: Mapping[str, str]
    """Node id by the name of a process."""
    shortages: tuple[str, ...] = ()
    """Why a process could not be placed; empty if all are placed."""


@dataclass
class _Room:
    """A node with its remaining resources."""

    node: Node
    free: dict[str, float] = field(default_factory=dict)

    def holds(self, each: Mapping[str, float], count: int = 1) -> bool:
        return all(self.free.get(name, 0.0) + TINY >= amount * count for name, amount in each.items())

    def how_many(self, each: Mapping[str, float]) -> int:
        return min(int((self.free.get(name, 0.0) + TINY) / amount) for name, amount in each.items())

    def take(self, each: Mapping[str, float]) -> None:
        for name, amount in each.items():
            self.free[name] = self.free.get(name, 0.0) - amount


def seat(pools: Sequence[Pool], nodes: Sequence[Node]) -> Seating:
    """Place every process of every pool, or say what is missing."""
    best: Seating | None = None
    for order in itertools.permutations(pools):
        found = _seat_in_order(order, nodes)
        if not found.shortages:
            return found
        if best is None or len(found.seats) > len(best.seats):
            best = found
    return best or Seating({})


def _seat_in_order(pools: Sequence[Pool], nodes: Sequence[Node]) -> Seating:
    rooms = [_Room(node, dict(node.free)) for node in nodes]
    seats: dict[str, str] = {}
    shortages: list[str] = []
    for pool in pools:
        found = list(itertools.islice(_choose(pool, rooms), len(pool.members)))
        seats |= {name: room.node.node_id for name, room in zip(pool.members, found, strict=False)}
        if len(found) < len(pool.members):
            shortages.append(_shortage(pool, len(found), rooms))
    if shortages:
        shortages += _missing_altogether(pools, nodes)
    return Seating(seats, tuple(shortages))


def _choose(pool: Pool, rooms: list[_Room]) -> Iterator[_Room]:
    """Choose a node for each member in turn and reserve its resources; ends when no node has enough."""
    each, count = pool.each, len(pool.members)
    if pool.strategy == "STRICT_PACK":
        whole = [room for room in rooms if room.holds(each, count)]
        for room in sorted(whole, key=lambda room: _waste(room, each))[:1]:
            for _ in range(count):
                room.take(each)
                yield room
        return
    is_spread, given = pool.strategy in ("SPREAD", "STRICT_SPREAD"), dict.fromkeys(range(len(rooms)), 0)
    while True:
        fitting = [index for index, room in enumerate(rooms) if room.holds(each)]
        if pool.strategy == "STRICT_SPREAD":
            fitting = [index for index in fitting if not given[index]]
        if not fitting:
            return

        def preference(index: int) -> tuple[float, ...]:
            roominess = -rooms[index].how_many(each)
            spread = given[index] if is_spread else -given[index]
            return (spread, _waste(rooms[index], each), roominess)

        index = min(fitting, key=preference)
        given[index] += 1
        rooms[index].take(each)
        yield rooms[index]


def _waste(room: _Room, each: Mapping[str, float]) -> float:
    """1 if a placement without GPU would use a node with a free GPU."""
    return float("GPU" not in each and room.free.get("GPU", 0.0) > TINY)


def _shortage(pool: Pool, num_seated: int, rooms: Sequence[_Room]) -> str:
    total = len(pool.members)
    how = {"STRICT_PACK": ", all on one node", "STRICT_SPREAD": ", each on a separate node"}.get(pool.strategy, "")
    wanted = f"{total} place{'s' if total > 1 else ''} of {pool.words}{how}"
    left = "; ".join(
        f"{room.node.address}: {resource_words({name: max(0.0, room.free.get(name, 0.0)) for name in pool.each})}"
        for room in rooms[:MAX_NODES_NAMED]
    )
    more = f", and {len(rooms) - MAX_NODES_NAMED} more nodes" if len(rooms) > MAX_NODES_NAMED else ""
    room = f"room for only {num_seated}" if num_seated else "no room for any"
    return f"pool {pool.name} needs {wanted}, but there is {room} (free resources: {left}{more})"


def _missing_altogether(pools: Sequence[Pool], nodes: Sequence[Node]) -> list[str]:
    needed: dict[str, float] = {}
    for pool in pools:
        for name, amount in pool.each.items():
            needed[name] = needed.get(name, 0.0) + amount * len(pool.members)
    missing = {
        name: short
        for name, amount in needed.items()
        if (short := amount - sum(node.free.get(name, 0.0) for node in nodes)) > TINY
    }
    return [f"the whole cluster lacks {resource_words(missing)}"] if missing else []


def seat_lines(pools: Sequence[Pool], nodes: Sequence[Node], seats: Mapping[str, str]) -> list[str]:
    """One line per node: its processes, and their share of the free resources."""
    lines = []
    for node in nodes:
        here = {pool.name: [name for name in pool.members if seats.get(name) == node.node_id] for pool in pools}
        names = (["controller"] if node.is_controllers else []) + [name for pool in pools for name in here[pool.name]]
        taken: dict[str, float] = {}
        for pool in pools:
            for name, amount in pool.each.items():
                taken[name] = taken.get(name, 0.0) + amount * len(here[pool.name])
        shares = [f"{amount:g} of {node.free.get(name, 0.0):g} {name}" for name, amount in taken.items() if amount]
        lines.append(
            f"{node.address:<15}  {', '.join(names) or 'none'}" + (f"  ({', '.join(shares)})" if shares else "")
        )
    return lines
