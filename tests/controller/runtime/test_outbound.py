"""The message of each order of the coordinator, and who turned out to be out of reach."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from real_ledger import segment_of

from areal_like.trajectory import Segment
from areal_like.wire import messages as m
from controller.coordinator.effects import LeaseOrder, SendBatch, SendLeases, SendRelease, SendVersion
from controller.coordinator.events import WorkerLost
from controller.coordinator.snapshot import BatchGroup, Counts
from controller.data.eval_layout import EvalLayout, SetSize
from controller.runtime.outbound import Outgoing, TaskSettings, stream_seed

TRAIN, EVAL = m.Sampling(max_new_tokens=100), m.Sampling(temperature=0.0, max_new_tokens=50)


class PlayedHub:
    def __init__(self) -> None:
        self.peers: dict[str, Any] = {}
        self.sent: list[tuple[str, m.Message]] = []
        self.is_reachable = True

    def send(self, peer: str, message: m.Message) -> bool:
        self.sent.append((peer, message))
        return self.is_reachable

    def forget(self, peer: str) -> None:
        del self.peers[peer]


class PlayedLedger:
    seq = 70

    def prefix(self, group_id: int, sample_index: int) -> Segment:
        assert (group_id, sample_index) == (4, 1)
        return segment_of([1, 1, 2])

    def turn_checkpoint(self, group_id: int, sample_index: int) -> None:
        assert (group_id, sample_index) == (4, 1)

    def batch_samples(
        self, groups: tuple[BatchGroup, ...], reused: tuple[BatchGroup, ...]
    ) -> tuple[m.BatchSample, ...]:
        assert [group.group_id for group in groups] == [4, 6]
        assert [group.group_id for group in reused] == [3]
        return ()


class PlayedRows:
    def train(self, group_id: int) -> Mapping[str, Any]:
        return {"prompt": f"train {group_id}"}

    layout = EvalLayout({"": SetSize(1000, 1000, 1000)})

    def eval(self, index: int) -> Mapping[str, Any]:
        return {"prompt": f"eval {index}"}


class Bench:
    def __init__(self, **settings: Any) -> None:
        self.hub, self.live, self.unreachable = PlayedHub(), set(range(100)), list[str]()
        made: dict[str, Any] = {"seed": 9, "train_sampling": TRAIN, "eval_sampling": EVAL, "segment_tokens": 64}
        self.out = Outgoing(
            self.hub, PlayedLedger(), PlayedRows(), TaskSettings(**made | settings),  # type: ignore[arg-type]
            is_live=lambda lease_id: lease_id in self.live, on_unreachable=self.unreachable.append,
        )  # fmt: skip

    def tasks(self, *orders: LeaseOrder) -> tuple[m.SampleTask, ...]:
        assert self.out.leases(SendLeases(worker="rollout-0", leases=orders)) is True
        ((peer, message),) = self.hub.sent
        assert peer == "rollout-0"
        assert isinstance(message, m.Lease)
        return message.tasks


def order(lease_id: int, purpose: Literal["train", "eval"] = "train", prefix_tokens: int = 0) -> LeaseOrder:
    return LeaseOrder(
        lease_id=lease_id, group_id=4, sample_index=1, purpose=purpose, min_version=3, prefix_tokens=prefix_tokens,
        draw=6, moved_from="rollout-7",
    )  # fmt: skip


def test_a_lease_of_training_carries_its_row_its_tokens_so_far_and_a_stream_of_its_own() -> None:
    (task,) = Bench().tasks(order(1, prefix_tokens=3))
    assert task == m.SampleTask(
        lease_id=1, group_id=4, sample_index=1, purpose="train", min_version=3, row={"prompt": "train 6"},
        sampling=TRAIN, seed=stream_seed(9, "train", 4, 1), prefix=task.prefix, moved_from="rollout-7",
        segment_tokens=64,
    )  # fmt: skip
    assert task.prefix.versions_R.tolist() == [1, 1, 2]
    assert len(Bench().tasks(order(1))[0].prefix) == 0


def test_a_lease_of_an_evaluation_carries_its_own_row_and_sampling_and_is_not_reported_in_segments() -> None:
    (task,) = Bench(forced_lengths=lambda group_id, number: 1).tasks(order(1, "eval"))
    assert (task.row, task.sampling, task.segment_tokens) == ({"prompt": "eval 4"}, EVAL, 0)
    assert task.seed == stream_seed(9, "eval", 4, 1)


def test_a_forced_length_is_asked_for_by_group_and_number_of_the_sample_from_one() -> None:
    (task,) = Bench(forced_lengths=lambda group_id, number: 10 * group_id + number).tasks(order(1))
    assert task.sampling == m.Sampling(max_new_tokens=42)


def test_streams_differ_by_seed_purpose_group_and_sample_and_fit_into_62_bits() -> None:
    names = [(9, "train", 4, 1), (8, "train", 4, 1), (9, "eval", 4, 1), (9, "train", 5, 1), (9, "train", 4, 2)]
    seeds = [stream_seed(seed, purpose, group, index) for seed, purpose, group, index in names]  # type: ignore[arg-type]
    assert len(set(seeds)) == len(names)
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert max(stream_seed(0, "train", group, 0) for group in range(64)) > 2**61
    assert seeds[0] == 2725548018289060924, "samples of a run that is resumed continue their streams"


def test_leases_that_were_ended_meanwhile_are_not_sent() -> None:
    bench = Bench()
    bench.live = {2}
    assert [task.lease_id for task in bench.tasks(order(1), order(2))] == [2]
    bench.hub.sent.clear()
    assert bench.out.leases(SendLeases(worker="rollout-0", leases=(order(1),))) is False
    assert bench.hub.sent == []


def test_leases_of_evaluations_are_known_until_they_have_ended() -> None:
    bench = Bench()
    bench.tasks(order(1, "eval"), order(2), order(3, "eval"))
    assert [bench.out.is_eval(lease_id) for lease_id in (1, 2, 3, 4)] == [True, False, True, False]
    bench.live = {3}
    bench.out.forget_ended_evals()
    assert [bench.out.is_eval(lease_id) for lease_id in (1, 3)] == [False, True]


def test_a_batch_carries_its_position_and_the_staleness_of_each_group() -> None:
    bench = Bench()
    groups = tuple(
        BatchGroup(group_id=id_, sample_indices=(0,), first_version=first) for id_, first in ((4, 9), (6, 7))
    )
    counts = Counts(
        drawn=50, consumed=20, filtered=3, dropped={"stale": 4, "timeout": 5}, running=1, ready=2, samples_finished=9,
    )  # fmt: skip
    reused = (BatchGroup(group_id=3, sample_indices=(0,), first_version=6),)
    sent = bench.out.batch(SendBatch(step=10, lineage="l1", groups=groups, is_replay=True, reused=reused), counts)
    position = m.RunPosition(ledger_seq=70, drawn=50, filtered=3, dropped=9, staleness=(0, 2, 3))
    assert sent == m.Batch(step=10, lineage="l1", samples=(), is_replay=True, position=position)
    assert bench.hub.sent == [("trainer", sent)]


@pytest.mark.parametrize(("incarnation", "is_sent"), [("a", True), (None, True), ("b", False)])
def test_a_version_is_announced_to_the_process_it_is_meant_for_and_not_to_its_successor(
    incarnation: str | None, is_sent: bool
) -> None:
    bench = Bench(load_deadline_s=33.0)
    if incarnation is not None:
        bench.hub.peers["rollout-0"] = SimpleNamespace(incarnation=incarnation)
    effect = SendVersion(worker="rollout-0", version=3, lineage="l0", manifest_path="/m", is_held=True, incarnation="a")
    bench.out.version(effect)
    announced = m.AnnounceVersion(version=3, lineage="l0", manifest_path="/m", deadline_s=33.0, is_held=True)
    assert bench.hub.sent == ([("rollout-0", announced)] if is_sent else [])


@pytest.mark.parametrize(("incarnation", "is_sent"), [("a", True), (None, True), ("b", False)])
def test_memory_is_asked_of_the_process_it_is_meant_for_and_not_of_its_successor(
    incarnation: str | None, is_sent: bool
) -> None:
    bench = Bench()
    if incarnation is not None:
        bench.hub.peers["rollout-0"] = SimpleNamespace(incarnation=incarnation)
    bench.out.release(SendRelease(worker="rollout-0", number=7, incarnation="a"))
    assert bench.hub.sent == ([("rollout-0", m.ReleaseMemory(number=7))] if is_sent else [])


@pytest.mark.parametrize("role", ["rollout", "trainer", None])
def test_a_peer_out_of_reach_is_removed_and_a_rollout_worker_counts_as_lost(
    role: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    bench.hub.is_reachable = False
    if role is not None:
        bench.hub.peers["one"] = SimpleNamespace(role=role, incarnation="a")
    bench.out.send("one", m.SaveCheckpoint(reason="asked"))
    assert "one is unreachable, so a message of type SaveCheckpoint was not sent" in caplog.messages
    assert bench.hub.peers == {}
    assert bench.unreachable == ([] if role is None else ["one"])
    lost = WorkerLost(worker="one", reason="unreachable", incarnation="a", may_live=True)
    assert bench.out.take_lost() == ([lost] if role == "rollout" else [])
    assert bench.out.take_lost() == []


def test_a_peer_that_was_reached_stays() -> None:
    bench = Bench()
    bench.hub.peers["one"] = SimpleNamespace(role="rollout", incarnation="a")
    bench.out.send("one", m.SaveCheckpoint(reason="asked"))
    assert list(bench.hub.peers) == ["one"]
    assert (bench.unreachable, bench.out.take_lost()) == ([], [])
