"""Claims about routing: who gets a group, when a group stays together, who gets nothing, and what credits count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from desk import Desk, leased
from made_workers import made_worker

from controller.coordinator.effects import Effect, SendLeases
from controller.coordinator.eval_job import EvalJob
from controller.coordinator.events import RunStarted, WorkerSpeed
from controller.coordinator.groups import GroupTable
from controller.coordinator.routing import Router
from controller.coordinator.run_state import RunState
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.worker import Worker

BIG: dict[str, Any] = {
    "groups_per_step": 64,
    "group_size": 4,
    "num_steps": 4,
    "max_staleness": 0,
    "max_new_tokens": 100,
}


def measure(desk: Desk, **speeds: float) -> None:
    for worker, tokens_per_s in speeds.items():
        desk.do(WorkerSpeed(worker=worker, tokens_per_s=tokens_per_s))


def homes(effects: list[Effect]) -> dict[int, set[str]]:
    """Workers by group."""
    found: dict[int, set[str]] = {}
    for effect in effects:
        if isinstance(effect, SendLeases):
            for order in effect.leases:
                found.setdefault(order.group_id, set()).add(effect.worker)
    return found


def held(desk: Desk) -> Counter[str]:
    return Counter(worker for worker, _ in desk.held.values())


def started(*, workers: tuple[str, ...] = ("w0", "w1"), capacity: int = 16, **changes: Any) -> Desk:
    desk = Desk(**{**BIG, **changes})
    desk.start(workers=workers, capacity=capacity)
    return desk


def test_samples_of_a_group_share_a_worker() -> None:
    desk = started()
    assert held(desk) == {"w0": 16, "w1": 16}
    assert all(len(workers) == 1 for workers in homes(desk.effects).values())


def test_first_worker_to_load_a_version_leaves_the_others_their_share_of_what_it_admits() -> None:
    names = ("w0", "w1", "w2", "w3")
    desk = started(workers=names, capacity=64, groups_per_step=8, num_steps=9, max_staleness=4)
    for lease_id, (_, order) in list(desk.held.items()):
        desk.finish(order.group_id, order.sample_index)
        assert lease_id not in desk.held
    desk.ask(1)
    desk.publish(1)
    desk.load("w0", 1)
    assert held(desk) == {"w0": 8}, "8 groups of 4 may start, for 4 workers"
    for worker in names[1:]:
        desk.load(worker, 1)
    assert held(desk) == dict.fromkeys(names, 8)


def test_round_robin_deals_samples_in_turn() -> None:
    busy, idle = Worker("busy", load_tokens=9000.0), Worker("idle")
    router = view(busy, idle, routing="round_robin")
    group = GroupTable(4).add(0, 0)
    dealt = [router.for_sample(group, sample) for sample in group.samples]
    assert [worker.name for worker in dealt if worker] == ["busy", "idle", "busy", "idle"]


def test_fast_worker_gets_more_where_work_is_scarce() -> None:
    desk = Desk(**{**BIG, "groups_per_step": 8, "num_steps": 9, "max_staleness": 1})
    desk.do(RunStarted(lineage="l0"))
    desk.lineage = "l0"
    for worker in ("slow", "fast"):
        desk.join(worker)
    measure(desk, slow=10.0, fast=70.0)
    desk.publish(0)
    for worker in ("slow", "fast"):
        desk.load(worker, 0)
    assert held(desk) == {"slow": 8, "fast": 56}, "64 samples, dealt by speed"


def view(*workers: Worker, **changes: Any) -> Router:
    """A router over workers as given, all of them at version 0."""
    state = RunState(CoordinatorSettings(**{**BIG, **changes}))
    state.trainer.version = 0
    for worker in workers:
        worker.is_present, worker.capacity, worker.num_slots = True, 16, 8
        worker.weights.version = max(0, worker.weights.version)
        state.workers[worker.name] = worker
    return Router(state)


def test_new_group_goes_where_the_least_work_is_expected() -> None:
    chosen = view(Worker("a", load_tokens=900.0), Worker("b", load_tokens=300.0)).for_group()
    assert chosen is not None
    assert chosen.name == "b"


def test_work_is_weighed_by_measured_speed() -> None:
    """900 tokens at 100 a second are done before 300 at 10 a second."""
    fast, slow = Worker("fast", load_tokens=900.0, speed=100.0), Worker("slow", load_tokens=300.0, speed=10.0)
    assert view(slow, fast).for_group() is fast


def test_worker_not_measured_yet_counts_as_usual() -> None:
    router = view(Worker("a", speed=100.0), Worker("b", speed=50.0), Worker("new"))
    assert [router.speed(worker) for worker in router.workers] == [100.0, 50.0, 75.0]


def test_worker_behind_is_passed_over_even_when_it_idles() -> None:
    ahead, behind = made_worker("ahead", load_tokens=500.0, version=1), Worker("behind")
    assert view(behind, ahead).for_group() is ahead


def test_started_sample_is_passed_over_by_a_worker_behind_even_when_it_idles() -> None:
    ahead, behind = made_worker("ahead", load_tokens=500.0, version=1), Worker("behind")
    router, group = view(behind, ahead), GroupTable(4).add(0, 0)
    assert router.is_behind(behind)
    assert not router.is_behind(ahead)
    assert router.for_sample(group, group.samples[0]) is ahead
    group.home = group.samples[1].moving_to = "behind"
    assert router.for_sample(group, group.samples[1]) is ahead, "not even where it was to move, or its group lives"
    ahead.outstanding = set(range(16))
    full = view(behind, ahead)
    assert full.for_sample(group, group.samples[2]) is None, "it waits until one is free"


def test_worker_pinned_to_an_evaluation_is_behind_on_purpose() -> None:
    pinned = made_worker("pinned", pin=EvalJob(0, 0, "v0", "l0", "periodic", 1, [0]))
    assert view(made_worker("ahead", load_tokens=500.0, version=1), pinned).for_group() is pinned


def test_queue_of_a_slow_worker_is_short() -> None:
    """Credits beyond the slots count by speed: 8 slots each, and of 8 queue places the slow one gets 2."""
    desk = Desk(**BIG)
    desk.lineage = "l0"
    desk.do(RunStarted(lineage="l0"))
    for worker in ("slow", "fast"):
        desk.join(worker, capacity=16)
    measure(desk, slow=25.0, fast=100.0)
    desk.publish(0)
    for worker in ("slow", "fast"):
        desk.load(worker, 0)
    assert held(desk) == {"slow": 8, "fast": 16}, "10 places, and a group of 4 fits twice"


def test_worker_behind_gets_nothing_until_it_caught_up() -> None:
    desk = Desk(groups_per_step=1, group_size=1, num_steps=50, max_staleness=20)
    desk.start(workers=("w0", "w1"), capacity=4)
    for group_id in range(2):
        desk.finish(group_id)
    desk.ask(1)
    desk.publish(1)
    desk.load("w0", 1)
    behind = [order.group_id for worker, order in desk.held.values() if worker == "w1"]
    assert behind
    for group_id in behind:
        assert "w1" not in {effect.worker for effect in desk.finish(group_id) if isinstance(effect, SendLeases)}
    assert "w1" in {effect.worker for effect in desk.load("w1", 1) if isinstance(effect, SendLeases)}


def test_lone_worker_takes_work_while_it_loads() -> None:
    desk = Desk(groups_per_step=1, group_size=1, num_steps=50, max_staleness=20)
    desk.start(capacity=4)
    desk.finish(0)
    desk.ask(1)
    desk.publish(1)
    assert leased(desk.finish(1)), "announced and not loaded: nobody is ahead of it"


def test_group_is_split_where_its_home_is_too_far_behind() -> None:
    """A sample that comes back leaves its home once that is more than `affinity` groups' work behind the idlest."""
    for affinity, wanted in ((0.0, "w1"), (50.0, "w0")):
        desk = Desk(**{**BIG, "groups_per_step": 4, "affinity": affinity, "migration": False})
        desk.start(workers=("w0", "w1"), capacity=16)
        for lease_id, (worker, order) in list(desk.held.items()):
            if worker == "w1":
                desk.report(lease_id, group_id=order.group_id, sample_index=order.sample_index, worker="w1")
                desk.held.pop(lease_id, None)
        lease_id = next(lease_id for lease_id, (worker, _) in desk.held.items() if worker == "w0")
        effects = desk.give_back(lease_id, 0, [0, 0], "segment")
        (sent,) = [effect for effect in effects if isinstance(effect, SendLeases)]
        assert sent.worker == wanted


def test_single_worker_gets_all_its_credits_whatever_its_speed() -> None:
    for speed in (0.0, 3.0, 1e6):
        desk = Desk(**BIG)
        desk.do(RunStarted(lineage="l0"))
        desk.lineage = "l0"
        desk.join("w0", capacity=16)
        measure(desk, w0=speed)
        desk.publish(0)
        desk.load("w0", 0)
        assert held(desk) == {"w0": 16}


@pytest.mark.parametrize("routing", ["least_tokens", "round_robin"])
def test_expected_work_of_an_empty_worker_is_nothing(routing: Any) -> None:
    desk = started(routing=routing, groups_per_step=2, num_steps=1)
    for _, order in list(desk.held.values()):
        desk.finish(order.group_id, order.sample_index)
    workers = desk.coordinator._state.workers.values()
    assert all(not worker.outstanding and worker.load_tokens == 0.0 for worker in workers)


# ------------------------------------------------------------ single decisions
# In a `view` every worker has 16 credits, 8 of them slots.


def holding(name: str, num_samples: int, **facts: Any) -> Worker:
    return Worker(name, outstanding=set(range(num_samples)), **facts)


def test_the_queue_counts_in_proportion_to_speed_and_the_slots_always_do() -> None:
    workers = [holding("fast", 3, speed=100.0), holding("half", 1, speed=50.0), Worker("slow", speed=1.0)]
    assert [view(*workers).free(worker) for worker in workers] == [16 - 3, 12 - 1, 8 + 1]
    assert [view(*workers, routing="round_robin").free(worker) for worker in workers] == [13, 15, 16]


def test_a_worker_is_done_when_its_load_and_the_new_work_are_sampled_at_its_speed() -> None:
    worker = Worker("a", load_tokens=900.0, speed=100.0)
    assert view(worker).wait_s(worker, 100.0) == 10.0
    assert view(worker).wait_s(worker) == 9.0


def test_a_router_is_full_when_no_worker_has_a_credit_left() -> None:
    full, free = holding("full", 16), holding("free", 15)
    assert view(full).is_full is True
    assert view(full, free).is_full is False
    assert view(free, full).is_full is False
    assert view().is_full is True


@pytest.mark.parametrize(
    ("group_size", "num_held", "routing", "is_taken"),
    [
        (4, 12, "least_tokens", True), (4, 13, "least_tokens", False),
        (8, 8, "least_tokens", True), (8, 9, "least_tokens", False),
        (9, 15, "least_tokens", True), (9, 16, "least_tokens", False),
        (4, 15, "round_robin", True), (4, 16, "round_robin", False),
    ],
)  # fmt: skip
def test_a_group_starts_where_all_of_it_has_room_or_on_a_worker_that_could_never_hold_two(
    group_size: int, num_held: int, routing: Any, is_taken: bool
) -> None:
    worker = holding("a", num_held)
    assert (view(worker, group_size=group_size, routing=routing).for_group() is worker) == is_taken


@pytest.mark.parametrize("routing", ["least_tokens", "round_robin"])
def test_a_worker_with_its_share_of_what_may_start_gets_no_further_group(routing: Any) -> None:
    """16 samples may start, 8 for each of two equal workers."""
    for num_held, is_taken in ((7, True), (8, False)):
        worker, other = holding("a", num_held), holding("other", 16)
        router = view(worker, other, groups_per_step=4, group_size=4, routing=routing)
        assert (router.for_group() is worker) == is_taken


def test_shares_are_by_speed() -> None:
    """Of 16 samples 12 are the share of a worker that is three times as fast as the other."""
    for num_held, is_taken in ((11, True), (12, False)):
        fast, slow = holding("fast", num_held, speed=30.0), holding("slow", 16, speed=10.0)
        router = view(fast, slow, groups_per_step=4, group_size=4)
        assert (router.for_group() is fast) == is_taken


def test_an_unbounded_run_has_no_shares() -> None:
    worker = holding("a", 12)
    assert view(worker, groups_per_step=1, max_staleness=None).for_group() is worker


def test_groups_that_have_started_leave_less_to_share() -> None:
    worker, other = holding("a", 7), holding("other", 16)
    router = view(worker, other, groups_per_step=4, group_size=4)
    for group_id in range(3):
        router._state.table.add(group_id, 0)
    assert router.for_group() is worker, "three that run and room for one more: still 16 samples"
    router = view(worker, other, groups_per_step=4, group_size=4)
    router._state.num_consumed = 3
    assert router.for_group() is None, "three that were used and room for one more: 4 samples, 2 for each"


def test_of_workers_that_are_done_at_the_same_time_the_one_with_more_credits_is_first() -> None:
    one, two = holding("one", 3), holding("two", 2)
    assert view(one, two).for_group() is two
    group = GroupTable(4).add(0, 0)
    assert view(one, two).for_sample(group, group.samples[0]) is two


def test_a_sample_that_is_to_move_goes_there_and_its_group_stays_at_home() -> None:
    home, other = Worker("home", load_tokens=50.0), Worker("other")
    router, group = view(home, other, max_new_tokens=100, affinity=1.0), GroupTable(4).add(0, 0)
    group.home = "home"
    assert router.for_sample(group, group.samples[0]) is home
    group.samples[1].moving_to = "other"
    assert router.for_sample(group, group.samples[1]) is other
    group.samples[1].moving_to = "gone"
    assert router.for_sample(group, group.samples[1]) is home


def test_a_group_stays_at_home_until_that_is_behind_by_more_than_its_worth() -> None:
    """One group of 4 answers, of a mean of `mean` tokens, at the speed of the worker that would be sooner."""
    mean = view(Worker("a"))._state.lengths.mean
    for behind, stays in ((4 * mean, True), (4 * mean + 1, False)):
        home, other = Worker("home", load_tokens=behind, speed=10.0), Worker("other", speed=10.0)
        router, group = view(home, other, affinity=1.0), GroupTable(4).add(0, 0)
        group.home = "home"
        assert (router.for_sample(group, group.samples[0]) is home) == stays


def test_a_sample_that_needs_a_newer_version_goes_to_the_soonest_worker_that_has_it() -> None:
    pin = EvalJob(0, 0, "v0", "l0", "periodic", 1, [0])
    pinned = Worker("pinned", pin=pin)
    busy, busier = Worker("busy", version=1, load_tokens=100.0), Worker("busier", version=1, load_tokens=200.0)
    group = GroupTable(4).add(0, 1)
    assert view(pinned, busier, busy).for_sample(group, group.samples[0]) is busy
    assert view(pinned).for_sample(group, group.samples[0]) is None
    old = GroupTable(4).add(0, 0)
    assert view(pinned, busier, busy).for_sample(old, old.samples[0]) is pinned


def test_dealing_in_turn_passes_over_a_worker_with_more_than_its_share_while_another_has_less() -> None:
    """16 samples may start: 8 for each."""
    ahead, other = holding("ahead", 8), holding("other", 7)
    group = GroupTable(4).add(0, 0)
    router = view(ahead, other, groups_per_step=4, group_size=4, routing="round_robin")
    assert [router.for_sample(group, sample) for sample in group.samples[:2]] == [other, other]
    full = holding("full", 8)
    router = view(ahead, full, groups_per_step=4, group_size=4, routing="round_robin")
    assert [router.for_sample(group, sample) for sample in group.samples[:3]] == [ahead, full, ahead]
    assert view(holding("none", 16), routing="round_robin").for_sample(group, group.samples[3]) is None


def test_dealing_in_turn_knows_no_worker_that_is_behind() -> None:
    behind, ahead = Worker("behind"), Worker("ahead", version=1)
    assert not view(behind, ahead, routing="round_robin").is_behind(behind)
    assert view(behind, ahead, routing="round_robin").for_group() is behind


def test_a_slow_worker_whose_queue_is_as_long_as_its_speed_allows_gets_nothing_though_it_has_credits() -> None:
    """Speed 1 of 100: 8 slots and one place in the queue."""
    slow, fast, group = holding("slow", 9, speed=1.0), holding("fast", 16, speed=100.0), GroupTable(4).add(0, 0)
    for routing, is_taken in (("least_tokens", False), ("round_robin", True)):
        router = view(slow, fast, routing=routing)
        assert router.is_full is not is_taken
        assert (router.for_sample(group, group.samples[0]) is slow) == is_taken
    assert view(slow, fast, group_size=9).for_group() is None
    idle = Worker("idle", speed=1.0)
    assert view(slow, idle, fast).is_full is False
    group.home = "slow"
    assert view(slow, idle, fast).for_sample(group, group.samples[0]) is idle


def test_the_last_credit_of_a_worker_counts() -> None:
    last, group = holding("last", 15), GroupTable(4).add(0, 0)
    group.samples[0].moving_to = "last"
    for other in (Worker("other"), holding("other", 16)):
        assert view(last, other).for_sample(group, group.samples[0]) is last
    assert view(last, routing="round_robin").for_sample(group, group.samples[1]) is last


def test_the_new_work_counts_at_the_speed_of_each_worker() -> None:
    """Ten tokens at 1 a second are done before a hundred at 20, and long after them with a group on top."""
    short, fast = Worker("short", load_tokens=10.0, speed=1.0), Worker("fast", load_tokens=300.0, speed=20.0)
    assert view(short, fast).wait_s(short) < view(short, fast).wait_s(fast)
    assert view(short, fast).for_group() is fast
    group = GroupTable(4).add(0, 0)
    assert view(short, fast).for_sample(group, group.samples[0]) is fast


def test_dealing_goes_round_in_the_order_in_which_workers_joined() -> None:
    router = view(Worker("c"), Worker("a"), Worker("b"), routing="round_robin")
    dealt = [router.for_sample(group, sample) for group in (GroupTable(6).add(0, 0),) for sample in group.samples]
    assert "".join(worker.name for worker in dealt if worker) == "cabcab"


def test_without_room_for_a_new_group_only_what_runs_is_shared() -> None:
    """Two groups of 4 run, two were used: 4 samples for each worker."""
    ahead, other = holding("ahead", 5), holding("other", 3)
    router = view(ahead, other, groups_per_step=4, group_size=4, routing="round_robin")
    first, _ = router._state.table.add(0, 0), router._state.table.add(1, 0)
    router._state.num_consumed = 2
    assert [router.for_sample(first, sample) for sample in first.samples[:2]] == [other, other]
