"""Claims about the roster: whatever happens to workers, it knows what looking at all of them would tell."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from areal_like.trajectory import NO_VERSION
from controller.coordinator.routing import _Queue
from controller.coordinator.worker import Lease, Worker, Workers


def looked_at(workers: Workers) -> dict[str, object]:
    """The same, the slow way."""
    present = [w for w in workers.values() if w.is_present and not w.quarantine and not w.is_draining]
    usable = [w for w in present if w.version >= 0]
    known = [w.speed for w in present if w.speed > 0]
    usual = sum(known) / len(known) if known else 1.0
    return {
        "present": [w.name for w in present],
        "usable": [w.name for w in usable],
        "open": [w.name for w in usable if w.free > 0],
        "speeds": (usual, max(known, default=1.0)),
        "newest": max((w.version for w in usable if w.pin is None), default=NO_VERSION),
        "capacity": float(sum(w.capacity for w in present)),
        "speed_capacity": pytest.approx(sum(w.capacity * (w.speed or usual) for w in present)),
    }


def reported(workers: Workers) -> dict[str, object]:
    names = {key: [w.name for w in getattr(workers, key)] for key in ("present", "usable", "open")}
    return {**names, **{key: getattr(workers, key) for key in ("speeds", "newest", "capacity", "speed_capacity")}}


def disturb(rng: random.Random, workers: Workers) -> None:
    """Anything that may happen to a worker."""
    worker = rng.choice(list(workers.values()))
    match rng.randrange(9):
        case 0:
            worker.is_present = rng.random() < 0.9
        case 1:
            worker.version = rng.randrange(-1, 4)
        case 2:
            worker.quarantine = rng.choice(["", "", "", "broken"])
        case 3:
            worker.is_draining = rng.random() < 0.1
        case 4:
            worker.speed = rng.choice([0.0, 1.0, 2.0, 5.0])
        case 5:
            worker.pin = rng.choice([None, None, None, SimpleNamespace()])
        case 6:
            worker.capacity = rng.randrange(4)
        case 7 if worker.free > 0:
            worker.outstanding.add(rng.randrange(1000))
            workers.credited(worker)
        case _:
            for lease_id in list(worker.outstanding)[:1]:
                worker.let_go(Lease(lease_id, "train", 0, 0, worker.name, 0))


@pytest.mark.parametrize("seed", range(20))
def test_roster_tells_what_looking_at_every_worker_would(seed):
    rng = random.Random(seed)
    workers = Workers()
    for number in range(rng.randrange(1, 6)):
        workers[f"w{number}"] = Worker(f"w{number}", is_present=True, capacity=2)
    for _ in range(300):
        disturb(rng, workers)
        assert reported(workers) == looked_at(workers)


@pytest.mark.parametrize("seed", range(10))
def test_queue_gives_what_the_least_of_all_would_be_while_keys_rise(seed):
    rng = random.Random(seed)
    load = {f"w{number}": rng.randrange(5) for number in range(6)}
    left = dict.fromkeys(load, 4)
    workers = [Worker(name) for name in load]
    queue = _Queue(workers, lambda worker: (float(load[worker.name]), 0))
    for _ in range(30):
        able = [worker for worker in workers if left[worker.name] > 0]
        expected = min(able, key=lambda worker: load[worker.name], default=None)
        assert queue.best(lambda worker: left[worker.name] > 0) is expected
        if expected is not None:
            load[expected.name] += rng.randrange(3)
            left[expected.name] -= 1
