"""Claims about the trainer's end of a process group, with the group played: what is sent, awaited, and left."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from areal_like.errors import TransferBroken
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.process_group import store_prefixes
from areal_like.weights.weight_store import WeightManifest, WeightStore, map_payload
from trainer.weights import group_root as module
from trainer.weights.group_root import ROOT, GroupRoot

DEADLINE_S = 300.0


class Work:
    """A broadcast under way; done once it is waited for, or asked often enough."""

    def __init__(self, group: Group) -> None:
        self.group, self.num_asked, self.is_finished = group, 0, False

    def wait(self, patience: datetime.timedelta) -> None:
        assert 0 < patience.total_seconds() <= DEADLINE_S
        if self.group.is_broken:
            raise RuntimeError("Connection closed\n  by peer")
        self.is_finished = True

    def is_completed(self) -> bool:
        self.num_asked += 1
        self.is_finished = self.num_asked > self.group.num_polls
        return self.is_finished


class Group:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.works: list[Work] = []
        self.most_under_way = 0
        self.is_broken = False
        self.num_polls = 2
        self.num_aborts = 0

    def broadcast(self, part: torch.Tensor, root: int) -> Work:
        assert root == ROOT == 0
        self.sent.append(part.numpy().tobytes())
        self.works.append(Work(self))
        self.most_under_way = max(self.most_under_way, sum(not work.is_finished for work in self.works))
        return self.works[-1]

    def abort(self) -> None:
        self.num_aborts += 1
        raise RuntimeError("gone already")


@pytest.fixture
def sent(tmp_path: Path) -> tuple[WeightManifest, memoryview]:
    """A payload of five tensors of 64 bytes."""
    tensors = {f"t{n}": TensorBytes("float32", (16,), np.full(16, n, np.float32).data) for n in range(5)}
    path = WeightStore(tmp_path, "disk", keep=1).publish(1, "l0", tensors)
    manifest = msgspec.json.decode(path.read_bytes(), type=WeightManifest)
    return manifest, map_payload(path.with_name(manifest.payload), manifest.num_bytes)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """What the members are met in, once."""
    group = Group()
    meetings: list[GroupRoot] = []

    def meet(self: GroupRoot) -> Group:
        meetings.append(self)
        assert len(meetings) == 1, "the members are met once"
        return group

    monkeypatch.setattr(GroupRoot, "_meet", meet)
    monkeypatch.setattr(module, "POLL_S", 0.0)
    return group


def root_of(backend: Any = "gloo") -> GroupRoot:
    return GroupRoot("g", 3, host="127.0.0.1", backend=backend, device="cpu", deadline_s=DEADLINE_S)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_payload_goes_out_bucket_by_bucket_and_is_gone_when_it_returns(backend: str, sent: Any, group: Group) -> None:
    root = root_of(backend)
    manifest, payload = sent
    tensors = bytes(payload[manifest.tensors[0].offset :])
    assert len(tensors) == 5 * 64
    for number in (1, 2):
        root.bring(manifest, payload, 128)
        assert b"".join(group.sent) == tensors * number
        assert [len(part) for part in group.sent] == [128, 128, 64] * number
        assert all(work.is_finished for work in group.works), "also the last one"
    assert group.most_under_way == 2, "the next one is under way while one is waited for"


def test_payload_without_a_byte_is_sent_at_once(group: Group, tmp_path: Path) -> None:
    path = WeightStore(tmp_path, "disk", keep=1).publish(
        1, "l0", {"t": TensorBytes("float32", (1,), memoryview(bytes(4)))}
    )
    manifest = msgspec.structs.replace(msgspec.json.decode(path.read_bytes(), type=WeightManifest), tensors=())
    root_of().bring(manifest, memoryview(bytes(4)), 128)
    assert group.sent == []


def test_wire_that_breaks_is_said_in_one_line_and_holds_nothing(sent: Any, group: Group) -> None:
    group.is_broken = True
    with pytest.raises(TransferBroken, match="Connection closed by peer") as raised:
        root_of().bring(*sent, 128)
    assert raised.value.__context__ is None, "what a traceback holds keeps connections open"


def test_member_that_hangs_is_given_up_at_the_deadline(sent: Any, group: Group) -> None:
    group.num_polls = 10**9
    root = root_of("nccl")
    root._deadline_s = 0.01
    with pytest.raises(TransferBroken, match=r"not finished within 0.01 s"):
        root.bring(*sent, 128)


def test_group_that_was_left_is_closed_whatever_state_it_is_in(sent: Any, group: Group) -> None:
    root = root_of()
    root.leave()
    root = root_of()
    root.bring(*sent, 128)
    root.leave()
    root.leave()
    assert group.num_aborts == 1


def test_meeting_point_listens_at_the_address_given_alone() -> None:
    root = root_of()
    assert (root.host, root.size, root.name, root.backend) == ("127.0.0.1", 3, "g", "gloo")
    with socket.create_connection(("127.0.0.1", root.port), timeout=DEADLINE_S):
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", root.port), timeout=DEADLINE_S)
    root.leave()


def test_address_that_is_not_ours_is_no_meeting_point() -> None:
    with pytest.raises(TransferBroken, match=r"cannot listen on 203\.0\.113\.7"):
        GroupRoot("g", 3, host="203.0.113.7", backend="gloo", device="cpu", deadline_s=1.0)


class Made:
    """A process group of torch's, as it was asked for."""

    class _Options:
        _devices: Any = None
        _timeout: Any = None

    Options = _Options

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.asked = (store, rank, size)
        self.options = options

    @staticmethod
    def create_device(*, hostname: str) -> str:
        return f"device at {hostname}"


@pytest.mark.parametrize(("backend", "kind"), [("gloo", "cpu/"), ("nccl", "cuda/")])
def test_members_are_met_under_the_groups_name_within_the_deadline(
    backend: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GLOO", Made)
    monkeypatch.setattr(module.dist, "ProcessGroupNCCL", Made, raising=False)  # torch for CPUs has none
    monkeypatch.setattr(module.dist, "PrefixStore", lambda prefix, store: (prefix, store))
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    root = GroupRoot("g", 3, host="127.0.0.1", backend=backend, device="cuda:1", deadline_s=DEADLINE_S)
    store: Any = root._store
    for prefix in (*store_prefixes("g"), kind):
        store = (prefix, store)
    made = root._meet()
    assert isinstance(made, Made)
    assert made.asked == (store, ROOT, 3)
    patience = datetime.timedelta(seconds=DEADLINE_S)
    if backend == "gloo":
        assert (made.options._timeout, made.options._devices) == (patience, ["device at 127.0.0.1"])
        assert devices == []
    else:
        assert made.options._timeout > patience, "ours comes first: the library's own ends the process"
        assert devices == [torch.device("cuda:1")]
    root.leave()
