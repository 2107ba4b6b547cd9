"""A payload over a real gloo group: it arrives bit by bit, or everybody hears soon that it did not."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from areal_like.errors import TransferBroken, WeightError
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.process_group import GroupCall
from areal_like.weights.weight_store import WeightManifest, WeightStore, map_payload

torch = pytest.importorskip("torch")

from rollout.engine.group_member import GroupMember  # noqa: E402
from trainer.weights.group_root import GroupRoot  # noqa: E402

PATIENCE_S = 120.0
NUM_TENSORS = 40
LONG_S = 300.0
"""A deadline no test lives to see: a test that waits for it hangs."""

DIES_IN_MID_TRANSFER = """
import os, signal, sys
import msgspec, torch
from areal_like.weights.process_group import GroupCall
from rollout.engine.group_member import GroupMember

member = GroupMember(torch.device("cpu"))
call = msgspec.json.decode(sys.stdin.buffer.read(), type=GroupCall)
honest, num_left = member._finish, [3]

def finish(*given):
    num_left[0] -= 1
    if not num_left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    honest(*given)

member._finish = finish
member.meet(call)
member.receive(call)
"""


class Wire:
    """One payload, the trainer's end, and the calls that bring members to it."""

    def __init__(self, folder: Path, *, num_bytes: int = 1 << 20, num_members: int = 1) -> None:
        self.array = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        pieces = np.array_split(self.array, NUM_TENSORS)
        tensors = {f"t{n:02}": TensorBytes("uint8", piece.shape, piece.data) for n, piece in enumerate(pieces)}
        path = WeightStore(folder, "disk", keep=1).publish(7, "l0", tensors)
        self.manifest = msgspec.json.decode(path.read_bytes(), type=WeightManifest)
        self.payload = map_payload(path.with_name(self.manifest.payload), self.manifest.num_bytes)
        self.threads = ThreadPoolExecutor(8)
        self.regroup(num_members, 1)

    def regroup(self, num_members: int, generation: int, deadline_s: float = LONG_S) -> None:
        self.root = GroupRoot(
            f"g{generation}", num_members + 1, host="127.0.0.1", backend="gloo", device="cpu", deadline_s=deadline_s
        )

    def call(self, rank: int = 1, *, is_new: bool = True, deadline_s: float = LONG_S) -> GroupCall:
        return GroupCall(
            version=7, lineage="l0", group=self.root.name, is_new=is_new, host=self.root.host, port=self.root.port,
            rank=rank, size=self.root.size, backend="gloo", bucket_bytes=1 << 16, deadline_s=deadline_s,
            manifest=msgspec.json.encode(self.manifest),
        )  # fmt: skip

    def bring(self) -> Future[None]:
        return self.threads.submit(self.root.bring, self.manifest, self.payload, 1 << 16)

    def take(self, member: GroupMember, call: GroupCall) -> Future[dict[str, bytes]]:
        def work() -> dict[str, bytes]:
            member.meet(call)
            return {name: bytes(data) for name, data in member.receive(call)[1].items()}

        return self.threads.submit(work)

    def assert_arrived(self, taken: Future[dict[str, bytes]]) -> None:
        found = taken.result(PATIENCE_S)
        assert b"".join(found[name] for name in sorted(found)) == self.array.tobytes()

    def close(self) -> None:
        self.root.leave()
        self.threads.shutdown(wait=False)


@pytest.fixture
def wire(tmp_path):
    made = []

    def make(**settings):
        made.append(Wire(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def victim():
    """A process that takes part in a group and ends itself in mid-transfer."""
    process = subprocess.Popen([sys.executable, "-P", "-c", DIES_IN_MID_TRANSFER], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait(PATIENCE_S)


def member() -> GroupMember:
    return GroupMember(torch.device("cpu"))


def test_a_payload_arrives_bit_by_bit_at_every_member_and_again_in_the_same_group(wire):
    one = wire(num_members=2)
    first, second = member(), member()
    for is_new in (True, False):
        sent = one.bring()
        taken = [one.take(first, one.call(1, is_new=is_new)), one.take(second, one.call(2, is_new=is_new))]
        for future in taken:
            one.assert_arrived(future)
        sent.result(PATIENCE_S)
    first.leave()
    second.leave()


def test_a_payload_that_is_not_what_was_sent_is_a_weight_error_and_the_group_goes_on(wire):
    one = wire()
    receiver = member()
    broken = msgspec.structs.replace(
        one.manifest,
        tensors=tuple(msgspec.structs.replace(entry, crc32=entry.crc32 ^ 1) for entry in one.manifest.tensors),
    )
    call = msgspec.structs.replace(one.call(), manifest=msgspec.json.encode(broken))
    sent, taken = one.bring(), one.take(receiver, call)
    with pytest.raises(WeightError, match="checksum differs") as caught:
        taken.result(PATIENCE_S)
    assert not isinstance(caught.value, TransferBroken)
    sent.result(PATIENCE_S)
    sent = one.bring()
    one.assert_arrived(one.take(receiver, one.call(is_new=False)))
    sent.result(PATIENCE_S)
    receiver.leave()


@pytest.mark.processes
def test_a_member_killed_in_mid_transfer_ends_it_for_all_and_a_new_group_serves_the_rest(wire, victim):
    one = wire(num_members=2, num_bytes=32 << 20)
    survivor = member()
    victim.stdin.write(msgspec.json.encode(one.call(2)))
    victim.stdin.close()
    sent, taken = one.bring(), one.take(survivor, one.call(1))
    with pytest.raises(TransferBroken):
        sent.result(PATIENCE_S)
    one.root.leave()
    with pytest.raises(TransferBroken):
        taken.result(PATIENCE_S)
    assert victim.wait(PATIENCE_S) == -signal.SIGKILL
    one.regroup(1, 2)
    sent = one.bring()
    one.assert_arrived(one.take(survivor, one.call(1)))
    sent.result(PATIENCE_S)
    survivor.leave()


def test_who_waits_for_a_member_that_never_comes_gives_up_at_the_deadline(wire):
    one = wire()
    one.regroup(2, 2, deadline_s=0.5)
    sent, taken = one.bring(), one.take(member(), one.call(1, deadline_s=0.5))
    with pytest.raises(TransferBroken):
        sent.result(PATIENCE_S)
    with pytest.raises(TransferBroken):
        taken.result(PATIENCE_S)


def test_who_lost_its_group_does_not_wait_for_it(wire):
    one = wire()
    with pytest.raises(TransferBroken, match="no longer in process group g1"):
        member().meet(one.call(is_new=False))
