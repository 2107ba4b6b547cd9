"""When the trainer's work is done: only then the end of its process is no loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from controller.runtime.trainer_progress import TrainerProgress


def progress(trained: int, last_step: int | None = None, saved: int | None = None) -> TrainerProgress:
    coordinator: Any = SimpleNamespace(trained=trained)
    made = TrainerProgress(coordinator, last_step)
    if saved is not None:
        made.saved_version = saved
    return made


@pytest.mark.parametrize(
    ("trained", "last_step", "saved", "is_done"),
    [(3, 3, 3, True), (4, 3, 5, True), (2, 3, 3, False), (3, 3, 2, False), (9, None, 9, False), (0, 0, 0, True),
     (0, 0, None, False), (-1, 0, 0, False)],
)  # fmt: skip
def test_work_is_done_when_the_last_step_is_known_trained_and_saved(
    trained: int, last_step: int | None, saved: int | None, is_done: bool
) -> None:
    assert progress(trained, last_step, saved).is_done() == is_done


def test_nothing_is_saved_and_no_step_the_last_before_it_is_said() -> None:
    made = progress(5)
    assert (made.last_step, made.saved_version) == (None, -1)
