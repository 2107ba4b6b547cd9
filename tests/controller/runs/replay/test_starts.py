"""Claims about the chain of the trainer's starts."""

from __future__ import annotations

from controller.runs.replay.starts import Start, chain_of, part_of


def chain(starts: list[tuple[str, int]], last: int) -> list[tuple[str, int, int]]:
    return [(one.lineage, one.base, one.last) for one in chain_of(starts, last)]


def test_one_start_is_the_whole_chain() -> None:
    assert chain([("l0", 0)], 7) == [("l0", 0, 7)]


def test_start_continues_the_newest_one_that_began_before_its_version() -> None:
    assert chain([("l0", 0), ("l1", 5), ("l2", 10)], 12) == [("l0", 0, 5), ("l1", 5, 10), ("l2", 10, 12)]
    assert chain([("l0", 0), ("l1", 5), ("l2", 5)], 9) == [("l0", 0, 5), ("l2", 5, 9)]


def test_start_before_any_checkpoint_forgets_all_earlier_ones() -> None:
    assert chain([("l0", 0), ("l1", 0)], 4) == [("l1", 0, 4)]


def test_start_from_an_older_checkpoint_leaves_out_those_after_it() -> None:
    """Checkpoint 10 was damaged when l2 began."""
    assert chain([("l0", 0), ("l1", 10), ("l2", 5)], 8) == [("l0", 0, 5), ("l2", 5, 8)]


def test_last_start_without_a_step_is_not_needed() -> None:
    assert chain([("l0", 0), ("l1", 6)], 6) == [("l0", 0, 6)]


def test_part_begins_and_ends_within_starts() -> None:
    whole = chain_of([("l0", 0), ("l1", 5), ("l2", 10)], 12)
    assert part_of(whole, 7, 11) == (Start("l1", 7, 10), Start("l2", 10, 11))
    assert part_of(whole, 5, 10) == (Start("l1", 5, 10),)
    assert part_of(whole, 0, 0) == ()
