"""Plans that lead a random schedule into the dangerous windows of a handover, and leave everything else to chance.

Owns: `PLANS`. A plan is a generator: it is resumed after each action of the schedule, waits for its moment, and does
one thing there. Refuses: everything in between (colocated_schedules.py), and checks (linked_cluster.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from linked_cluster import LinkedCluster
from virtual_cluster import VirtualWorker

from controller.coordinator.effects import Effect, SendRelease, SendVersion
from controller.coordinator.events import WorkerReleased

Plan = Iterator[None]


def kill_twice(cluster: LinkedCluster) -> Plan:
    """The trainer dies, starts again, and dies again in the handover of a batch that it replays."""
    while cluster.trainer.version < 1:
        yield
    cluster.kill_trainer()
    yield
    while not cluster.asked():
        yield
    paused = cluster.rng.choice(cluster.asked()).name
    cluster.paused_engines.add(paused)
    yield
    cluster.kill_trainer()
    for _ in range(cluster.rng.choice([2, 10, 40])):
        yield
    cluster.paused_engines.discard(paused)


def replay_far(cluster: LinkedCluster) -> Plan:
    """A death, or a resume, far behind the last checkpoint: several batches are replayed one after the other."""
    while cluster.trainer.version < 3:
        yield
    cluster.rng.choice([cluster.kill_trainer, cluster.restart])()


def delay_second_answer(cluster: LinkedCluster) -> Plan:
    """A worker is asked twice; its second answer arrives after the request of the next handover."""
    while (worker := _releasing(cluster)) is None:
        yield
    name, incarnation = worker.name, worker.incarnation
    if not cluster.reconnect(worker):
        return
    while not _has_sent_release(cluster, name):
        yield
    while _has_sent_release(cluster, name):
        yield
    cluster.held_links.add(f"from {name}")
    version = cluster.trainer.version
    while cluster.trainer.version == version or not _is_on_link(cluster, name, SendRelease):
        if not worker.is_alive or worker.incarnation != incarnation:
            break
        yield
    cluster.held_links.discard(f"from {name}")


def announce_behind_releases(cluster: LinkedCluster) -> Plan:
    """A worker is asked twice while it releases; the trainer dies, and the version of the next one is announced."""
    while (worker := _releasing(cluster)) is None:
        yield
    name, incarnation = worker.name, worker.incarnation
    cluster.paused_engines.add(name)
    if cluster.reconnect(worker):
        yield
        while not _is_on_link(cluster, name, SendRelease) and any(x[0] == name for x in cluster.letters):
            yield
        cluster.kill_trainer()
        for _ in range(200):
            if _is_on_link(cluster, name, SendVersion) or worker.incarnation != incarnation:
                break
            yield
        while _is_on_link(cluster, name, SendVersion):
            yield
    cluster.paused_engines.discard(name)


def _releasing(cluster: LinkedCluster) -> VirtualWorker | None:
    found = [worker for worker in cluster.asked() if cluster.engines[worker.name].is_releasing]
    return cluster.rng.choice(found) if found else None


def _has_sent_release(cluster: LinkedCluster, name: str) -> bool:
    return any(sender == name and isinstance(event, WorkerReleased) for sender, event, _ in cluster.letters)


def _is_on_link(cluster: LinkedCluster, name: str, kind: type[Effect]) -> bool:
    return any(isinstance(one[0], kind) for one in cluster.links.get(name, ()))


PLANS: dict[str, Callable[[LinkedCluster], Plan]] = {
    "kill_twice": kill_twice,
    "replay_far": replay_far,
    "delay_second_answer": delay_second_answer,
    "announce_behind_releases": announce_behind_releases,
}
"""By the name of a kind of schedule."""


def follow(cluster: LinkedCluster, names: list[str]) -> Plan:
    """Plans drawn from `names`, one after the other, without end."""
    while True:
        yield from PLANS[cluster.rng.choice(names)](cluster)
        yield
