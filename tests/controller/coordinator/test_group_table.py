"""Claims about the table of live groups: floors, counts, the order of waiting samples, deadlines."""

from __future__ import annotations

from controller.coordinator.groups import Group, GroupTable


def ready(table: GroupTable, group: Group, *firsts: int) -> None:
    """All samples of a group are finished, with these first versions."""
    for sample, first in zip(group.samples, firsts, strict=True):
        sample.is_finished, sample.first_version, sample.last_version = True, first, first
    table.refresh(group)
    table.mark_ready(group)


def test_a_group_is_complete_when_all_its_samples_are_finished() -> None:
    group = GroupTable(2).add(0, 3)
    assert (group.num_finished, group.is_complete, group.ceiling) == (0, False, None)
    group.samples[1].is_finished, group.samples[1].first_version = True, 5
    assert (group.num_finished, group.is_complete, group.ceiling) == (1, False, 5)
    group.samples[0].is_finished, group.samples[0].first_version = True, 4
    assert (group.num_finished, group.is_complete, group.ceiling) == (2, True, 4)


def test_a_sample_goes_on_at_the_version_of_its_last_token_and_never_below_its_groups() -> None:
    group = GroupTable(1).add(0, 3)
    (sample,) = group.samples
    assert [group.min_version(sample)] == [3]
    sample.last_version = 5
    assert group.min_version(sample) == 5


def test_counts_follow_floors_from_admission_to_removal() -> None:
    table = GroupTable(2)
    first, second = table.add(0, 1), table.add(1, 1)
    assert (first.floor, dict(table.num_by_floor), table.num_running) == (1, {1: 2}, 2)
    first.samples[0].first_version = 4
    table.refresh(first)
    assert (first.floor, dict(table.num_by_floor)) == (1, {1: 2}), "a sample without tokens counts with its admission"
    ready(table, first, 4, 3)
    assert (first.floor, dict(table.num_by_floor)) == (3, {1: 1, 3: 1})
    assert (table.num_ready, table.num_running, table.ready_by_floor) == (1, 1, {3: {0}})
    ready(table, second, 3, 3)
    assert (table.num_ready, table.num_running, table.ready_by_floor) == (2, 0, {3: {0, 1}})
    table.remove(first)
    assert (table.num_ready, table.ready_by_floor, dict(table.num_by_floor)) == (1, {3: {1}}, {3: 1})
    table.remove(second)
    assert (table.num_ready, table.ready_by_floor, dict(table.num_by_floor), table.live) == (0, {}, {}, {})


def test_removal_of_a_running_group_leaves_the_ready_ones_alone() -> None:
    table = GroupTable(1)
    done, running = table.add(0, 2), table.add(1, 2)
    ready(table, done, 2)
    table.remove(running)
    assert (table.num_ready, table.num_running, table.ready_by_floor) == (1, 0, {2: {0}})


def test_waiting_samples_come_by_floor_then_group_then_index() -> None:
    table = GroupTable(2)
    late, early, third = table.add(0, 2), table.add(1, 1), table.add(2, 2)
    for group, index in ((third, 0), (late, 1), (late, 0), (early, 1)):
        table.push_pending(group, group.samples[index])
    order = []
    while found := table.pop_pending():
        order.append((found[0].group_id, found[1].index))
    assert order == [(1, 1), (0, 0), (0, 1), (2, 0)]
    assert not table.has_pending


def test_waiting_samples_that_are_leased_finished_or_gone_are_passed_over() -> None:
    table = GroupTable(3)
    gone, group = table.add(0, 0), table.add(1, 0)
    for one in (gone, group):
        for sample in one.samples:
            table.push_pending(one, sample)
    table.remove(gone)
    group.samples[0].lease_id = 0
    group.samples[1].is_finished = True
    assert table.has_pending
    assert table.pop_pending() == (group, group.samples[2])
    assert table.pop_pending() is None


def test_a_group_is_late_at_its_deadline_once_and_only_while_it_runs() -> None:
    table = GroupTable(1)
    first, done, second, gone = (table.add(number, 0) for number in range(4))
    for group, now_s in ((first, 0.0), (done, 1.0), (second, 2.0), (gone, 3.0)):
        table.start_timer(group, now_s, 10.0)
    assert (first.leased_at_s, second.leased_at_s) == (0.0, 2.0)
    ready(table, done, 0)
    table.remove(gone)
    assert table.expired(9.5) == []
    assert table.expired(10.0) == [first]
    assert table.expired(11.5) == []
    assert table.expired(20.0) == [second]
    assert table.expired(99.0) == []


def test_timers_of_ended_groups_go_as_soon_as_they_are_in_front() -> None:
    table = GroupTable(1)
    groups = [table.add(number, 0) for number in range(3)]
    for group in groups:
        table.start_timer(group, 0.0, 1800.0)
        table.remove(group)
    assert table.expired(1.0) == []
    assert table._timers == []
