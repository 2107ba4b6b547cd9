"""Which versions and checkpoints of the trainer count, in which order they may be reported."""

from __future__ import annotations

import pytest
from desk import Desk, batch_of, has, only, state_of

from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import Note, PurgePayloads, RecordCheckpoint, SendVersion
from controller.coordinator.events import CheckpointTaken, Published, RunStarted
from controller.coordinator.settings import CoordinatorSettings


def trained(steps: int) -> Desk:
    """A run that has published this version."""
    desk = Desk(groups_per_step=1, max_staleness=9)
    desk.start()
    for step in range(1, steps + 1):
        desk.finish(step - 1)
        desk.ask(step)
        desk.publish(step)
    return desk


def is_ignored(desk: Desk, version: int, lineage: str = "l0") -> bool:
    before = desk.coordinator.progress
    effects = desk.do(Published(version=version, lineage=lineage, manifest_path="again"))
    notes = [effect for effect in effects if isinstance(effect, Note) and effect.kind == "ignored"]
    assert bool(notes) == (desk.coordinator.progress == before)
    if notes:
        assert notes[0].text == f"version {version} of lineage {lineage} was published out of order"
        assert not has(effects, SendVersion)
    return bool(notes)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_version_that_was_published_is_no_news(version: int) -> None:
    assert is_ignored(trained(2), version)


def test_a_version_counts_once_its_batch_was_sent() -> None:
    desk = trained(1)
    assert is_ignored(desk, 2)
    desk.finish(1)
    desk.ask(2)
    assert is_ignored(desk, 3)
    assert is_ignored(desk, 2, lineage="l9")
    assert not is_ignored(desk, 2)


@pytest.mark.parametrize(("version", "ignored"), [(1, True), (2, False), (3, True)])
def test_the_first_version_of_a_resumed_run_is_that_of_its_checkpoint(version: int, ignored: bool) -> None:
    settings = CoordinatorSettings(groups_per_step=1, group_size=1, num_steps=9)
    memory = state_of(num_drawn=2, batches=(batch_of(1, 0), batch_of(2, 1)))
    desk = Desk(Coordinator.restore(settings, memory))
    desk.do(RunStarted(lineage="l1", checkpoint_version=2))
    assert is_ignored(desk, version, "l1") == ignored


def checkpoint(desk: Desk, version: int) -> tuple[bool, int | None]:
    """Whether it is recorded, and up to which step payloads may go."""
    effects = desk.do(CheckpointTaken(version=version, path=f"c{version}"))
    if not has(effects, RecordCheckpoint):
        assert only(effects, Note).text == f"checkpoint {version} was reported twice or out of order"
        return False, None
    return True, only(effects, PurgePayloads).covered_step


def test_payloads_are_kept_for_the_oldest_of_the_checkpoints_that_are_kept() -> None:
    desk = trained(4)
    keep = desk.coordinator.settings.keep_checkpoints
    assert keep == 2, "the rows below are for two"
    assert [checkpoint(desk, version) for version in (1, 1, 5, 2, 3, 4)] == [
        (True, 0), (False, None), (False, None), (True, 1), (True, 2), (True, 3),
    ]  # fmt: skip
