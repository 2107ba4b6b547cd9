"""Claims about the roster: whatever happens to workers, it knows what looking at all of them would tell."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from roster_oracle import kept, looked_up

from controller.coordinator.routing import _Queue
from controller.coordinator.worker import Lease, Worker, Workers


def disturb(rng: random.Random, workers: Workers) -> None:
    """Anything that may happen to a worker."""
    worker = rng.choice(list(workers.values()))
    match rng.randrange(9):
        case 7 if worker.free > 0:
            workers.book(worker, Lease(rng.randrange(1000), "train", 0, 0, worker.name, 0, 0))
        case 7 | 8:
            for lease_id in list(worker.outstanding)[:1]:
                workers.unbook(worker, Lease(lease_id, "train", 0, 0, worker.name, 0, 0))
        case number:
            change(rng, worker, number)
            workers.changed(worker)


def change(rng: random.Random, worker: Worker, number: int) -> None:
    match number:
        case 0:
            worker.is_present = rng.random() < 0.9
        case 1:
            worker.weights.version = rng.randrange(-1, 4)
        case 2:
            worker.weights.quarantine = rng.choice(["", "", "", "broken"])
        case 3:
            worker.is_draining = rng.random() < 0.1
        case 4:
            worker.speed = rng.choice([0.0, 1.0, 2.0, 5.0])
        case 5:
            worker.weights.pin = rng.choice([None, None, None, SimpleNamespace()])
        case 6:
            worker.capacity = rng.randrange(4)


@pytest.mark.parametrize("seed", range(20))
def test_roster_tells_what_looking_at_every_worker_would(seed):
    rng = random.Random(seed)
    workers = Workers()
    for number in range(rng.randrange(1, 6)):
        workers[f"w{number}"] = Worker(f"w{number}", is_present=True, capacity=2)
    for _ in range(300):
        disturb(rng, workers)
        assert kept(workers) == looked_up(workers)


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


def test_a_lease_that_ends_takes_its_expected_tokens_off_the_load() -> None:
    workers = Workers()
    worker = workers["a"] = Worker("a", capacity=4, load_tokens=50.0)
    first, second = (Lease(i, "train", 0, i, "a", 0, 0, expected_tokens=20.0 + i) for i in (1, 2))
    for lease in (first, second):
        workers.book(worker, lease)
    workers.unbook(worker, first)
    assert worker.load_tokens == 29.0
    workers.unbook(worker, first)
    assert worker.load_tokens == 29.0
    workers.unbook(worker, second)
    assert worker.load_tokens == 0.0
