"""Claims about `sampling.forced_lengths`: what is sent to workers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_run import PlainRows
from valid_config import make

from areal_like.errors import UserError
from areal_like.wire import messages as m
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.config.validation.run import cross_check
from controller.coordinator.effects import LeaseOrder, SendLeases
from controller.data.forced_lengths import forced_lengths
from controller.preflight.preflight import look
from controller.runtime.outbound import Outgoing, TaskSettings


class Recorder:
    """A hub that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, peer: str, message: Any) -> bool:
        self.sent.append(message)
        return True


def config(text: str | None, **more: Any) -> RunConfig:
    return make(sampling__forced_lengths=text, sampling__max_new_tokens=90, **more)


def tasks_of(chosen: RunConfig, *names: tuple[m.Purpose, int, int]) -> list[m.SampleTask]:
    hub = Recorder()
    settings = TaskSettings(
        seed=chosen.seed, train_sampling=chosen.train_sampling, eval_sampling=chosen.eval_sampling,
        forced_lengths=forced_lengths(chosen),
    )  # fmt: skip
    orders = tuple(
        LeaseOrder(lease_id=at, group_id=group, sample_index=index, purpose=purpose, min_version=0, prefix_tokens=0)
        for at, (purpose, group, index) in enumerate(names)
    )
    out = Outgoing(
        hub, None, PlainRows(), settings, is_live=lambda lease_id: True, on_unreachable=lambda name: None  # type: ignore[arg-type]
    )  # fmt: skip
    assert out.leases(SendLeases(worker="rollout-0", leases=orders))
    return [task for message in hub.sent for task in message.tasks]


def test_a_sample_has_its_length_from_its_name_and_nothing_else_ends_it() -> None:
    names: list[tuple[m.Purpose, int, int]] = [("train", group, index) for group in range(6) for index in range(4)]
    first = tasks_of(config("thinking@30"), *names)
    again = tasks_of(config("thinking@30"), *reversed(names))
    lengths = {(task.group_id, task.sample_index): task.sampling.max_new_tokens for task in first}
    assert lengths == {(task.group_id, task.sample_index): task.sampling.max_new_tokens for task in again}
    assert all(task.sampling.ignore_eos for task in first)
    assert len(set(lengths.values())) > 8
    assert max(lengths.values()) <= 90


def test_evaluations_and_runs_without_the_setting_are_as_ever() -> None:
    (evaluated,) = tasks_of(config("thinking@30"), ("eval", 0, 0))
    assert not evaluated.sampling.ignore_eos
    (trained,) = tasks_of(config(None), ("train", 0, 0))
    assert (trained.sampling.ignore_eos, trained.sampling.max_new_tokens) == (False, 90)


def test_lengths_can_be_of_a_file_of_measured_groups(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"groups": [[7, 7], [11, 11]]}))
    tasks = tasks_of(config(str(file)), *[("train", group, index) for group in range(20) for index in range(2)])
    by_group = {task.group_id: set[int]() for task in tasks}
    for task in tasks:
        by_group[task.group_id].add(task.sampling.max_new_tokens)
    assert set(map(tuple, by_group.values())) == {(7,), (11,)}


def test_a_mean_may_be_given_as_the_number_it_is() -> None:
    chosen = load_config("configs/quickstart.yaml", ["sampling.forced_lengths=30"]).config
    assert chosen.sampling.forced_lengths == "30"
    assert forced_lengths(chosen) is not None


def test_lengths_that_cannot_be_read_are_named_before_anything_starts() -> None:
    with pytest.raises(UserError, match="neither a file nor a positive number"):
        forced_lengths(config("long"))
    problems = [problem for problem in look(config("long"), "validate").problems if "forced" in str(problem)]
    assert [problem.keys for problem in problems] == [("sampling.forced_lengths",)]


def test_emulated_answers_have_drawn_lengths_already() -> None:
    problems_text = "; ".join(map(str, cross_check(config("30", emulation={}))))
    assert "emulation.mean_tokens" in problems_text
