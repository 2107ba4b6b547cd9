"""A member's checks and waits without a process group: payloads are put into its buffer by hand."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_like.errors import TransferBroken, WeightsDamaged
from areal_like.weights.payload_layout import TensorEntry
from areal_like.weights.process_group import GroupCall
from areal_like.weights.weight_store import WeightManifest

torch = pytest.importorskip("torch")

from rollout.engine import group_member  # noqa: E402
from rollout.engine.group_member import GroupMember  # noqa: E402

SIZES = (4, 4, 8, 3, 1)
"""Of tensors; a bucket has eight bytes."""
PAYLOAD = bytes(range(100, 100 + sum(SIZES)))


def manifest_of(payload: bytes = PAYLOAD) -> WeightManifest:
    entries, offset = [], 0
    for number, size in enumerate(SIZES):
        crc = zlib.crc32(payload[offset : offset + size])
        entries.append(TensorEntry(name=f"t{number}", dtype="uint8", shape=(size,), offset=offset, num_bytes=size,
                                   crc32=crc))  # fmt: skip
        offset += size
    return WeightManifest(
        version=3, lineage="l0", kind="disk", payload="p", num_bytes=offset, tensors=tuple(entries)
    )  # fmt: skip


def call_of(manifest: WeightManifest, **changes: Any) -> GroupCall:
    facts = {
        "version": 3, "lineage": "l0", "group": "g1", "is_new": False, "host": "h", "port": 1, "rank": 1, "size": 2,
        "backend": "gloo", "bucket_bytes": 8, "deadline_s": 5.0, "manifest": msgspec.json.encode(manifest),
    }  # fmt: skip
    return GroupCall(**{**facts, **changes})  # type: ignore[arg-type]


class Sent:
    """In place of the group: each broadcast brings the next bytes; waits and aborts are noted."""

    def __init__(self, payload: bytes = PAYLOAD, failure: BaseException | None = None) -> None:
        self.payload, self.at, self.failure = payload, 0, failure
        self.waits: list[float] = []
        self.num_aborts = 0

    def broadcast(self, part: Any, root: int) -> Any:
        assert root == 0
        data = np.frombuffer(self.payload[self.at : self.at + part.numel()], np.uint8)
        self.at += part.numel()

        def wait(limit: Any) -> None:
            self.waits.append(limit.total_seconds())
            if self.failure is not None:
                raise self.failure
            part.copy_(torch.from_numpy(data.copy()))

        return SimpleNamespace(wait=wait)

    def abort(self) -> None:
        self.num_aborts += 1
        raise RuntimeError("gone")


def member(sent: Sent) -> GroupMember:
    made = GroupMember(torch.device("cpu"))
    made._group, made._name = sent, "g1"
    return made


def test_payload_is_taken_apart_into_its_tensors() -> None:
    sent = Sent()
    manifest, found = member(sent).receive(call_of(manifest_of()))
    assert manifest == manifest_of()
    assert {name: len(data) for name, data in found.items()} == {f"t{n}": size for n, size in enumerate(SIZES)}
    assert b"".join(bytes(found[f"t{n}"]) for n in range(len(SIZES))) == PAYLOAD
    assert len(sent.waits) == 3, "two tensors, one, two"


@pytest.mark.parametrize("place", range(len(PAYLOAD)))
def test_damage_anywhere_is_found_and_the_tensor_named(place: int) -> None:
    damaged = bytes(byte ^ (index == place) for index, byte in enumerate(PAYLOAD))
    name = next(f"t{n}" for n in range(len(SIZES)) if place < sum(SIZES[: n + 1]))
    sent = Sent(damaged)
    with pytest.raises(WeightsDamaged, match=f"^.*tensor {name} of version 3 .g1. is corrupt: the checksum differs"):
        member(sent).receive(call_of(manifest_of()))
    assert (sent.at, sent.num_aborts) == (len(PAYLOAD), 0), "the whole payload was taken, and the group goes on"


def test_first_of_several_damaged_tensors_is_named() -> None:
    with pytest.raises(WeightsDamaged, match="tensor t1 of"):
        member(Sent(PAYLOAD[:4] + bytes(len(PAYLOAD) - 4))).receive(call_of(manifest_of()))


def test_version_without_bytes_needs_no_message() -> None:
    empty = TensorEntry(name="e", dtype="uint8", shape=(0,), offset=0, num_bytes=0, crc32=0)
    manifest = WeightManifest(version=3, lineage="l0", kind="disk", payload="p", num_bytes=0, tensors=(empty,))
    assert {name: bytes(data) for name, data in member(Sent()).receive(call_of(manifest))[1].items()} == {"e": b""}


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("nccl", "meta")])
def test_nccl_receives_on_the_device_and_gloo_in_host_memory(backend: str, device: str) -> None:
    made = member(Sent())
    made._device = torch.device("meta")  # stands for a GPU
    made._buffer = torch.zeros(8, dtype=torch.uint8)
    [bucket, *_] = group_member.buckets(manifest_of(), 8)
    _, part = made._arriving(bucket, call_of(manifest_of(), backend=backend))
    assert (part.device.type, len(part)) == (device, 8)


def test_buffer_is_kept_while_it_is_large_enough() -> None:
    sent = Sent(PAYLOAD * 2)
    one = member(sent)
    one.receive(call_of(manifest_of()))
    buffer = one._buffer
    one.receive(call_of(manifest_of()))
    assert one._buffer is buffer


def test_each_wait_ends_at_the_deadline_of_the_whole_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([100.0, 101.0, 104.5, 107.0])
    monkeypatch.setattr(group_member, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    sent = Sent()
    member(sent).receive(call_of(manifest_of()))
    assert sent.waits == pytest.approx([4.0, 0.5, 0.001])


@pytest.mark.parametrize("failure", [RuntimeError("Connection\n closed"), OSError("Connection closed")])
def test_transfer_that_breaks_off_leaves_the_group(failure: Exception) -> None:
    sent = Sent(failure=failure)
    one = member(sent)
    with pytest.raises(TransferBroken, match="version 3 by g1 was interrupted: Connection closed"):
        one.receive(call_of(manifest_of()))
    assert (sent.num_aborts, one._group, one._name) == (1, None, "")
    one.leave()
    assert sent.num_aborts == 1


def test_member_meets_a_group_once_and_the_next_one_after_leaving_it(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []
    first, second = Sent(), Sent()
    groups = iter([first, second])

    def enter(call: GroupCall, device: Any) -> Sent:
        met.append(call.group)
        return next(groups)

    monkeypatch.setattr(group_member, "_enter", enter)
    one = GroupMember(torch.device("cpu"))
    for group in ("g1", "g1", "g2", "g2"):
        one.meet(call_of(manifest_of(), group=group, is_new=True))
    assert (met, first.num_aborts, second.num_aborts) == (["g1", "g2"], 1, 0)
    with pytest.raises(TransferBroken, match="this worker is no longer in process group g3"):
        one.meet(call_of(manifest_of(), group="g3"))
    assert second.num_aborts == 1


@pytest.mark.parametrize("failure", [RuntimeError("timed\nout"), OSError("timed out")])
def test_group_that_is_not_met_is_named(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(*_: object) -> None:
        raise failure

    monkeypatch.setattr(group_member, "_enter", enter)
    one = GroupMember(torch.device("cpu"))
    with pytest.raises(TransferBroken, match="cannot join g1: timed out"):
        one.meet(call_of(manifest_of(), is_new=True))
    with pytest.raises(TransferBroken, match="no longer in process group g1"):
        one.meet(call_of(manifest_of()))


class OnDevice:
    """A part that arrives on a GPU."""

    device = SimpleNamespace(type="cuda")


@pytest.mark.parametrize("num_polls", [0, 3])
def test_part_on_a_device_is_copied_to_its_place_once_it_is_complete(
    num_polls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [num_polls]
    slept: list[float] = []

    def is_completed() -> bool:
        left[0] -= 1
        return left[0] < 0

    monkeypatch.setattr(group_member, "time", SimpleNamespace(monotonic=lambda: 5.0, sleep=slept.append))
    one = GroupMember(torch.device("cpu"))
    one._buffer = torch.zeros(6, dtype=torch.uint8)
    part: Any = torch.tensor([7, 8], dtype=torch.uint8)
    copied: list[Any] = []

    class Part:
        device = OnDevice.device

    bucket: Any = SimpleNamespace(offset=3, num_bytes=2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", lambda target, source: copied.append((target.data_ptr(), len(target))))
        one._finish(SimpleNamespace(is_completed=is_completed), Part(), bucket, until_s=5.0)  # type: ignore[arg-type]
    assert copied == [(one._buffer[3:].data_ptr(), len(part))]
    assert len(slept) == num_polls


def test_part_on_a_device_is_given_up_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([4.0, 5.0, 5.1])
    monkeypatch.setattr(group_member, "time", SimpleNamespace(monotonic=lambda: next(now_s), sleep=lambda _: None))
    one = GroupMember(torch.device("cpu"))
    with pytest.raises(TransferBroken, match="the deadline of the transfer has passed"):
        one._finish(
            SimpleNamespace(is_completed=lambda: False), OnDevice(), SimpleNamespace(), until_s=5.0  # type: ignore[arg-type]
        )  # fmt: skip
    assert next(now_s, None) is None
