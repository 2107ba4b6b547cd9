"""Single decisions of the router: what a worker's credits count, its share, and who is first among several.

In a `view` every worker has 16 credits, 8 of them slots.
"""

from __future__ import annotations

from typing import Any

import pytest
from made_workers import made_worker
from routing_view import view

from controller.coordinator.eval_job import EvalJob
from controller.coordinator.groups import GroupTable
from controller.coordinator.worker import Worker


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
        router._state.groups.table.add(group_id, 0)
    assert router.for_group() is worker, "three that run and room for one more: still 16 samples"
    router = view(worker, other, groups_per_step=4, group_size=4)
    router._state.groups.num_consumed = 3
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
    mean = view(Worker("a"))._state.routing.lengths.mean
    for behind, stays in ((4 * mean, True), (4 * mean + 1, False)):
        home, other = Worker("home", load_tokens=behind, speed=10.0), Worker("other", speed=10.0)
        router, group = view(home, other, affinity=1.0), GroupTable(4).add(0, 0)
        group.home = "home"
        assert (router.for_sample(group, group.samples[0]) is home) == stays


def test_a_sample_that_needs_a_newer_version_goes_to_the_soonest_worker_that_has_it() -> None:
    pin = EvalJob(0, 0, "v0", "l0", "periodic", 1, [0])
    pinned = made_worker("pinned", pin=pin)
    busy, busier = (
        made_worker("busy", version=1, load_tokens=100.0),
        made_worker("busier", version=1, load_tokens=200.0),
    )
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
    behind, ahead = Worker("behind"), made_worker("ahead", version=1)
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
    first, _ = router._state.groups.table.add(0, 0), router._state.groups.table.add(1, 0)
    router._state.groups.num_consumed = 2
    assert [router.for_sample(first, sample) for sample in first.samples[:2]] == [other, other]
