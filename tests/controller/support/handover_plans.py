"""Plans that cause faults at the critical moments of a handover, in schedules that are random otherwise.

A plan is a generator: it is resumed after each action of the schedule, waits for its moment, and does one thing then.
The other actions are in colocated_schedules.py, the checks in linked_cluster.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

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


def resume_in_quarantine(cluster: LinkedCluster) -> Plan:
    """The run is resumed while a worker is quarantined."""
    name = yield from _quarantine(cluster)
    if name:
        cluster.restart()


def replace_after_two_failures(cluster: LinkedCluster) -> Plan:
    """A worker cannot load a version, nor at the second attempt; then another process takes its name."""
    name = yield from _quarantine(cluster)
    if not name:
        return
    incarnation = cluster.workers[name].incarnation
    weights = cluster.coordinator._state.workers[name].weights
    cluster.engines[name].is_failing = True
    for _ in range(200):
        if weights.load_attempts > 1 and not cluster.engines[name].is_failing:
            break
        yield
    if cluster.workers[name].is_alive and cluster.workers[name].incarnation == incarnation:
        cluster._die(cluster.workers[name], "killed", is_permanent=False)


def quarantine_behind_a_hung_load(cluster: LinkedCluster) -> Plan:
    """A worker never loads another version; the trainer dies, or the run is resumed, while it is quarantined."""
    cluster.hang_in_load()
    for _ in range(200):
        if _quarantined(cluster):
            break
        yield
    if _quarantined(cluster) and cluster.rng.random() < 0.7:
        cluster.rng.choice([cluster.kill_trainer, cluster.restart])()


def die_before_the_handover(cluster: LinkedCluster) -> Plan:
    """The trainer dies, or the run is resumed, while its batch is held back until the engines are empty."""
    while cluster.coordinator._state.devices.held_batch is None:
        yield
    for _ in range(cluster.rng.choice([0, 0, 1, 3])):
        yield
    cluster.rng.choice([cluster.kill_trainer, cluster.kill_trainer, cluster.restart])()
    for _ in range(cluster.rng.choice([5, 40])):
        yield


def _quarantine(cluster: LinkedCluster) -> Generator[None, None, str]:
    """Have the next load of a worker fail. Returns its name once it is quarantined; empty where it is not in time."""
    worker = cluster._alive()
    if worker is None:
        return ""
    cluster.engines[worker.name].is_failing = True
    for _ in range(200):
        if worker.name in _quarantined(cluster):
            return worker.name
        yield
    return ""


def _quarantined(cluster: LinkedCluster) -> list[str]:
    return [worker.name for worker in cluster.coordinator._state.workers.values() if worker.weights.quarantine]


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
    "resume_in_quarantine": resume_in_quarantine,
    "replace_after_two_failures": replace_after_two_failures,
    "quarantine_behind_a_hung_load": quarantine_behind_a_hung_load,
    "die_before_the_handover": die_before_the_handover,
}
"""By the name of a kind of schedule."""


def follow(cluster: LinkedCluster, names: list[str]) -> Plan:
    """Plans drawn from `names`, one after the other, without end."""
    while True:
        yield from PLANS[cluster.rng.choice(names)](cluster)
        yield
