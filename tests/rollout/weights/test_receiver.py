"""Weights through sockets, with a real sender, real relays and CURVE: all arrives exactly, whichever process dies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from areal_like.errors import WeightError, WeightsDamaged
from areal_like.store_owner import claim
from areal_like.transport.channel import Peer
from areal_like.transport.credentials import make_run_credentials
from areal_like.weights.catalog import read_manifest
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.process_group import GroupCall, JoinRequest, NoGroup
from areal_like.weights.stream import ChunkRequest, Locator, Payload
from areal_like.weights.weight_store import open_payload, verify
from areal_like.wire.messages import Heartbeat, Hello
from rollout.weights import fetching, local_versions
from rollout.weights import receiver as receiver_module
from rollout.weights.chunks import ChunkFile
from rollout.weights.local_versions import LocalVersions
from rollout.weights.port import JoinAs
from rollout.weights.receiver import VersionReceiver
from rollout.weights.relay import Relay
from trainer.config import DeltaSettings, WeightStoreSettings
from trainer.weights.sender import WeightSender
from trainer.weights.version_writer import VersionWriter

RUN = "run-1"
CHUNK = 16 << 10
PATIENCE_S = 300.0


class Site:
    """One trainer's store and sender, and workers that receive, all on one loop."""

    def __init__(self, tmp_path: Path, *, fan_out: int = 2, delta: DeltaSettings | None = None) -> None:
        self.tmp_path = tmp_path
        self.keys = tmp_path / "keys"
        make_run_credentials(self.keys)
        self.writer = VersionWriter(tmp_path / "store", WeightStoreSettings(kind="stream", delta=delta))
        self.sender = WeightSender(
            tmp_path / "store", run_id=RUN, bind="tcp://127.0.0.1:*", curve_dir=self.keys, chunk_bytes=CHUNK,
            fan_out=fan_out,
        )  # fmt: skip
        self.dice = np.random.default_rng(0)
        self.array = self.dice.normal(size=60_000).astype(np.float32)
        self.workers: dict[str, VersionReceiver] = {}
        self.tasks: dict[str, list[asyncio.Task]] = {}

    async def __aenter__(self):
        await self.sender.start()
        self.tasks["trainer"] = [asyncio.create_task(self.sender.run())]
        return self

    async def __aexit__(self, *_):
        for name in list(self.workers):
            await self.kill(name)
        await self.kill_trainer()

    async def kill_trainer(self):
        for task in self.tasks.pop("trainer", []):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self.sender.close()

    async def publish(self, version: int, *, share: float = 0.0, lineage: str = "l0") -> str:
        """Change a share of the items by one last place and publish."""
        where = self.dice.random(len(self.array)) < share
        self.array.view(np.uint32)[where] += 1
        tensors = {"w": TensorBytes("float32", self.array.shape, self.array.copy().data)}
        written = self.writer.write(version, lineage, tensors)
        return await self.sender.publish(written.path, version, lineage)

    def worker(self, name: str) -> VersionReceiver:
        incarnation = secrets.token_hex(8)

        def wire(address, accept):
            hello = Hello(role="rollout", name=name, pid=os.getpid(), run_id=RUN, incarnation=incarnation)
            return Peer(
                address=address, hello=hello, curve_dir=self.keys, audience="services", accept=accept,
                heartbeat_s=0.1, silence_s=5.0, status=lambda: Heartbeat(state="fetch"),
            )  # fmt: skip

        made = VersionReceiver(
            [self.tmp_path / "local" / name],
            make_wire=wire,
            make_relay=lambda: Relay(run_id=RUN, bind="tcp://127.0.0.1:*", curve_dir=self.keys),
        )
        self.workers[name] = made
        self.tasks[name] = [asyncio.create_task(made.run())]
        return made

    async def kill(self, name: str) -> None:
        """As a dead process: no word to anybody. (Its sockets close without a Goodbye to its children.)"""
        for task in self.tasks.pop(name):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.workers.pop(name).close()

    def assert_whole(self, path: Path, version: int) -> None:
        manifest, payload = open_payload(path)
        verify(manifest, payload)
        assert manifest.version == version
        assert bytes(payload["w"]) == self.array.tobytes()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The same patience in a smaller unit."""
    monkeypatch.setattr(fetching, "SILENT_S", 0.6)
    monkeypatch.setattr(fetching, "STALLED_S", 2.0)
    monkeypatch.setattr(fetching, "POLL_S", 0.05)
    monkeypatch.setattr(fetching, "ASK_AGAIN_S", 0.5)
    monkeypatch.setattr(fetching, "CONNECT_S", 0.6)


def run(scenario, tmp_path, **settings):
    async def all_of_it():
        async with asyncio.timeout(PATIENCE_S), Site(tmp_path, **settings) as site:
            await scenario(site)

    asyncio.run(all_of_it())


def test_a_streamed_version_arrives_bit_by_bit(tmp_path):
    async def scenario(site):
        place = await site.publish(0)
        receiver = site.worker("w0")
        path = await receiver.receive(place, PATIENCE_S)
        site.assert_whole(path, 0)
        counters = receiver.counters()
        assert counters["weights_fetched_bytes"] == path.with_name("v00000000-l0.safetensors").stat().st_size
        assert counters["weights_fetched_chunks"] == 15
        assert await receiver.receive(place, PATIENCE_S) == path  # announced again: nothing travels
        assert receiver.counters()["weights_fetched_chunks"] == 15

    run(scenario, tmp_path)


def test_the_trainer_sends_a_constant_number_of_copies(tmp_path):
    async def scenario(site):
        place = await site.publish(0)
        receivers = [site.worker(f"w{number}") for number in range(7)]
        for path in await asyncio.gather(*(receiver.receive(place, PATIENCE_S) for receiver in receivers)):
            site.assert_whole(path, 0)
        num_bytes = receivers[0].counters()["weights_received_bytes"]
        assert site.sender.counters["weights_sent_bytes"] == 2 * num_bytes
        assert sum(one.counters()["weights_relayed_bytes"] for one in receivers) == 5 * num_bytes
        num_chunks = -(-num_bytes // CHUNK)
        assert site.sender.counters["weights_sent_chunks"] == 2 * num_chunks
        assert sum(one.counters()["weights_relayed_chunks"] for one in receivers) == 5 * num_chunks
        (tree,) = site.sender.trees().values()
        assert tree.max_root_children == 2

    run(scenario, tmp_path, fan_out=2)


def test_only_what_changed_travels_and_the_result_is_the_same(tmp_path):
    async def scenario(site):
        receiver, late = site.worker("w0"), site.worker("w1")
        site.assert_whole(await receiver.receive(await site.publish(0), PATIENCE_S), 0)
        full_bytes = receiver.counters()["weights_fetched_bytes"]
        for version in (1, 2, 3):
            place = await site.publish(version, share=0.01)
            if version != 2:  # of version 2 it never hears: 3 needs both deltas
                site.assert_whole(await receiver.receive(place, PATIENCE_S), version)
        counters = receiver.counters()
        assert counters["weights_received_by_delta"] == 2
        assert counters["weights_fetched_bytes"] - full_bytes < full_bytes / 10
        site.assert_whole(await late.receive(place, PATIENCE_S), 3)  # it has no base: full version and three deltas
        assert late.counters()["weights_received_full"] == 1

    run(scenario, tmp_path, delta=DeltaSettings(full_every=8))


def test_a_base_the_engine_refused_is_not_built_upon(tmp_path):
    async def scenario(site):
        receiver = site.worker("w0")
        await receiver.receive(await site.publish(0), PATIENCE_S)
        receiver.forget()
        site.assert_whole(await receiver.receive(await site.publish(1, share=0.01), PATIENCE_S), 1)
        assert receiver.counters()["weights_received_full"] == 2

    run(scenario, tmp_path, delta=DeltaSettings())


def flip(path: Path) -> None:
    """Damage the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("delta", [None, DeltaSettings()])
def test_a_version_damaged_in_the_store_arrives_once_it_is_written_again(tmp_path, delta):
    async def scenario(site):
        receiver, child = site.worker("w0"), site.worker("w1")
        site.assert_whole(await receiver.receive(await site.publish(0), PATIENCE_S), 0)
        place = await site.publish(1, share=0.01)
        flip(next(path for path in site.writer._store.root.glob("v00000001*") if path.suffix != ".json"))
        for worker in (receiver, child):
            with pytest.raises(WeightsDamaged):
                await worker.receive(place, PATIENCE_S)
        written = site.writer.write_again(1, "l0")
        site.sender.rewritten(1, "l0")
        again = await site.sender.publish(written.path, 1, "l0")
        for worker in (receiver, child):
            site.assert_whole(await worker.receive(again, PATIENCE_S), 1)
        site.assert_whole(await receiver.receive(await site.publish(2, share=0.01), PATIENCE_S), 2)

    run(scenario, tmp_path, delta=delta)


def test_a_version_of_another_lineage_never_starts_from_our_base(tmp_path):
    async def scenario(site):
        receiver = site.worker("w0")
        await receiver.receive(await site.publish(0), PATIENCE_S)
        site.assert_whole(await receiver.receive(await site.publish(1, share=0.5, lineage="l1"), PATIENCE_S), 1)
        site.assert_whole(await receiver.receive(await site.publish(2, share=0.01, lineage="l1"), PATIENCE_S), 2)
        assert receiver.counters()["weights_received_by_delta"] == 1

    run(scenario, tmp_path, delta=DeltaSettings())


async def until(condition) -> None:
    """What must come; the scenario's own timeout is the deadline."""
    for _ in range(10**6):
        if condition():
            return
        await asyncio.sleep(0.01)


async def settled(receiver: VersionReceiver) -> None:
    await receiver._start_stream()


def test_a_dead_inner_node_is_routed_around_and_what_came_is_kept(tmp_path):
    async def scenario(site):
        place = await site.publish(0)
        inner, leaf = site.worker("w0"), site.worker("w1")
        await inner.receive(place, PATIENCE_S)
        sent = []
        relay_send = inner._relay._send

        def five_chunks(peer, file, index):
            if len(sent) < 5:
                sent.append(index)
                relay_send(peer, file, index)

        inner._relay._send = five_chunks
        fetching_it = asyncio.create_task(leaf.receive(place, PATIENCE_S))
        await until(lambda: leaf.counters().get("weights_fetched_chunks", 0) == 5)
        await site.kill("w0")
        site.assert_whole(await fetching_it, 0)
        counters = leaf.counters()
        assert counters["weights_lost_parents"] == 1
        assert counters["weights_fetched_chunks"] == 15  # none of the first five was fetched twice

    run(scenario, tmp_path, fan_out=1)


def test_a_stalled_parent_is_given_up_and_keeps_its_own_copy(tmp_path):
    async def scenario(site):
        place = await site.publish(0)
        inner, leaf = site.worker("w0"), site.worker("w1")
        await inner.receive(place, PATIENCE_S)
        inner._relay._send = lambda *chunk: None
        site.assert_whole(await leaf.receive(place, PATIENCE_S), 0)
        assert leaf.counters()["weights_lost_parents"] == 1

    run(scenario, tmp_path, fan_out=1)


def test_chunks_damaged_on_the_way_are_asked_for_again(tmp_path):
    async def scenario(site):
        place = await site.publish(0)
        receiver = site.worker("w0")
        usual, flipped = ChunkFile.put, []

        def put(self, index, data):
            if index in (3, 7) and index not in flipped:
                flipped.append(index)
                data = data.copy()
                data[11] ^= 1
            return usual(self, index, data)

        ChunkFile.put = put
        try:
            site.assert_whole(await receiver.receive(place, PATIENCE_S), 0)
        finally:
            ChunkFile.put = usual
        assert receiver.counters()["weights_damaged_chunks"] == 2

    run(scenario, tmp_path)


def test_what_a_parent_forgot_with_its_child_is_asked_for_again(tmp_path):
    async def scenario(site):
        place = await site.publish(0)
        hub, swallowed = site.sender._hub, []
        receive = hub.receive

        async def forgets_once(timeout_s):
            received = await receive(timeout_s)
            if received is not None and isinstance(received[1], ChunkRequest) and not swallowed:
                swallowed.append(received)
                hub.forget(received[0])  # the other requests under way come from a stranger now
                return None
            return received

        hub.receive = forgets_once
        receiver = site.worker("w0")
        site.assert_whole(await receiver.receive(place, PATIENCE_S), 0)
        assert swallowed
        assert receiver._fetcher.counters["lost_parents"] == 0, "the parent was not given up"

    run(scenario, tmp_path)


def test_a_child_is_served_while_its_parent_still_fetches(tmp_path):
    """Cut-through: requests for chunks on their way wait, and are answered as these come."""

    async def scenario(site):
        place = await site.publish(0)
        receivers = [site.worker(f"w{number}") for number in range(4)]
        paths = await asyncio.gather(*(receiver.receive(place, PATIENCE_S) for receiver in receivers))
        assert len(paths) == 4
        assert site.sender.counters["weights_sent_bytes"] == receivers[0].counters()["weights_received_bytes"]
        assert not any(receiver.counters()["weights_lost_parents"] for receiver in receivers)

    run(scenario, tmp_path, fan_out=1)


def test_a_dead_trainer_means_a_deadline_and_not_indefinitely(tmp_path):
    async def scenario(site):
        place = await site.publish(0)
        receiver = site.worker("w0")
        await site.kill_trainer()
        with pytest.raises(WeightError, match="did not arrive within 1 s"):
            await receiver.receive(place, 1.0)

    run(scenario, tmp_path)


def test_a_version_that_is_gone_is_said_to_be(tmp_path):
    async def scenario(site):
        await site.publish(0)
        receiver = site.worker("w0")
        with pytest.raises(WeightError, match="not available"):
            await receiver.receive(str(Locator(site.sender.address, 9, "l0")), PATIENCE_S)

    run(scenario, tmp_path)


def test_a_stranger_without_the_runs_key_gets_nothing(tmp_path):
    async def scenario(site):
        place = await site.publish(0)
        site.keys = site.tmp_path / "others"
        make_run_credentials(site.keys)
        stranger = site.worker("w0")
        with pytest.raises(WeightError, match="did not arrive"):
            await stranger.receive(place, 1.0)
        assert site.sender.counters["weights_sent_bytes"] == 0

    run(scenario, tmp_path)


def test_a_version_off_the_store_during_the_transfer_fails_and_leaves_no_files(tmp_path):
    async def scenario(site):
        place = await site.publish(0)
        receiver = site.worker("w0")
        await settled(receiver)
        usual = site.sender._send_chunk

        def forget_all(peer, request):
            if request.index == 4:
                site.sender._payloads.clear()
            usual(peer, request)

        site.sender._send_chunk = forget_all
        with pytest.raises(WeightError, match="no longer available"):
            await receiver.receive(place, PATIENCE_S)
        assert not list((tmp_path / "local" / "w0").glob("v*"))

    run(scenario, tmp_path)


def test_deltas_in_a_shared_folder_need_no_socket(tmp_path):
    async def scenario(site):
        writer = VersionWriter(tmp_path / "shared", WeightStoreSettings(kind="disk", delta=DeltaSettings()))
        receiver = site.worker("w0")
        payload_bytes = {}
        array = np.arange(5000, dtype=np.float32)
        for version in range(4):
            array.view(np.uint32)[version * 10] += 1
            path = writer.write(version, "l0", {"w": TensorBytes("float32", (5000,), array.copy().data)}).path
            payload_bytes[version] = path.with_name(read_manifest(path).payload).stat().st_size
            local = await receiver.receive(str(path), PATIENCE_S)
            assert (local == path) == (version == 0)
            manifest, payload = open_payload(local)
            verify(manifest, payload)
            assert bytes(payload["w"]) == array.tobytes()
        assert receiver.counters()["weights_received_by_delta"] == 2  # 0 was read where it lies, 1 took it with it
        assert receiver.counters()["weights_received_bytes"] == sum(payload_bytes.values())
        assert receiver._relay is None

    run(scenario, tmp_path)


def test_two_versions_stay_on_the_host_and_nothing_at_the_end(tmp_path):
    async def scenario(site):
        receiver = site.worker("w0")
        for version in range(5):
            await receiver.receive(await site.publish(version, share=0.01), PATIENCE_S)
        assert len(receiver._relay._files) == 2, "the newest and the one before are served, no other"
        folder = tmp_path / "local" / "w0"
        assert {path.name for path in folder.glob("v*")} == {
            "v00000003-l0.manifest.json", "v00000003-l0.safetensors",
            "v00000004-l0.manifest.json", "v00000004-l0.safetensors",
        }  # fmt: skip
        await site.kill("w0")
        assert not folder.exists()

    run(scenario, tmp_path, delta=DeltaSettings())


# ------------------------------------------------------------ parts


def make_payload(num_bytes: int, chunk_bytes: int, data: bytes) -> Payload:
    crcs = [zlib.crc32(data[start : start + chunk_bytes]) for start in range(0, num_bytes, chunk_bytes)]
    return Payload(
        name="p", is_delta=False, num_bytes=num_bytes, chunk_bytes=chunk_bytes, manifest=b"{}",
        chunk_crcs=np.array(crcs, np.uint32),
    )  # fmt: skip


def test_the_smallest_payload_has_one_byte():
    make_payload(1, 1, b"x")
    for num_bytes, chunk_bytes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="payload"):
            Payload(
                name="v1", is_delta=False, num_bytes=num_bytes, chunk_bytes=chunk_bytes,
                chunk_crcs=np.zeros(1, np.uint32), manifest=b"",
            )  # fmt: skip


def test_a_chunk_file_takes_chunks_in_any_order_and_no_wrong_one(tmp_path):
    data = bytes(range(256)) * 5
    file = ChunkFile(tmp_path / "f", make_payload(len(data), 500, data))
    assert file.missing() == [0, 1, 2]
    for index in (2, 0):
        assert file.put(index, np.frombuffer(data[file.payload.span(index)], np.uint8))
    assert not file.put(1, np.zeros(500, np.uint8))
    assert not file.put(1, np.frombuffer(data[:499], np.uint8))
    assert file.chunk(1) is None
    assert file.missing() == [1]
    assert file.put(1, np.frombuffer(data[500:1000], np.uint8))
    assert file.is_complete
    assert bytes(file.data) == data
    with pytest.raises(WeightError):
        file.chunk(3)


@pytest.mark.parametrize("text", ["/a/b.manifest.json", "tcp://host:1/x", "tcp://host:1/v1-l0", ""])
def test_a_path_is_no_locator(text):
    assert Locator.parse(text) is None


def test_a_locator_is_read_as_it_was_written():
    place = Locator("tcp://[::1]:4000", 123, "l0.a-b")
    assert Locator.parse(str(place)) == place


def test_a_folder_with_remains_of_a_dead_namesake_is_emptied(tmp_path):
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "v00000001-l0.safetensors").write_bytes(b"old")
    claim(tmp_path / "v")
    record = tmp_path / "v" / "owner.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "identity": "of a dead process"}))
    versions = LocalVersions([tmp_path / "v"])
    versions.open(1000)
    assert versions.root == tmp_path / "v"
    assert [path.name for path in (tmp_path / "v").iterdir()] == ["owner.json"]
    assert versions.base is None


def test_a_folder_of_the_name_that_is_not_provably_dead_is_left_alone(tmp_path):
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "thesis.txt").write_text("precious")
    versions = LocalVersions([tmp_path / "v"])
    versions.open(1000)
    assert versions.root != tmp_path / "v"
    versions.close()
    assert (tmp_path / "v" / "thesis.txt").read_text() == "precious"


def test_versions_too_large_for_the_best_folder_go_to_the_next(tmp_path, monkeypatch):
    free = {tmp_path / "small": 3999, tmp_path / "large": 4000}
    monkeypatch.setattr(local_versions, "_free_bytes", free.get)
    versions = LocalVersions([tmp_path / "small" / "v", tmp_path / "large" / "v"])
    versions.open(1000)
    assert versions.root == tmp_path / "large" / "v"


def test_a_payload_without_room_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightError, match="cannot allocate 10 bytes"):
        ChunkFile(tmp_path / "f", make_payload(10, 5, bytes(10)))
    assert not list(tmp_path.iterdir())


class StillRelay:
    address = "tcp://here:1"

    def __init__(self) -> None:
        self.counters = {"relayed_chunks": 3.0}
        self.events: list[str] = []

    async def start(self) -> None:
        self.events.append("start")

    async def run(self) -> None:
        self.events.append("run")

    async def close(self) -> None:
        self.events.append("close")

    def arrived(self, file, index) -> None:
        raise AssertionError("nothing was fetched")


class AnsweringWire:
    """A trainer that answers a call to the group, or not at all."""

    def __init__(self, reply) -> None:
        self.reply, self.asked, self.is_closed, self.hub_silence_s = reply, [], False, 0.0

    async def connect(self, timeout_s):
        pass

    async def send(self, message, timeout_s=30.0):
        self.asked.append(message)

    async def receive(self, timeout_s):
        if self.reply is None:
            await asyncio.Event().wait()
        return self.reply

    async def close(self, reason=""):
        self.is_closed = True


CALL = GroupCall(
    version=3, lineage="l0", group="g", is_new=True, host="h", port=1, rank=1, size=3, backend="gloo", bucket_bytes=1,
    deadline_s=1.0, manifest=b"",
)  # fmt: skip


@pytest.mark.parametrize(
    ("place", "num_ranks", "reply", "is_asked"),
    [
        ("group+tcp://t:1/v00000003-l0", 2, CALL, True),
        ("group+tcp://t:1/v00000003-l0", 2, NoGroup(version=3, lineage="l0", reason="alone"), True),
        ("group+tcp://t:1/v00000003-l0", 2, None, True),
        ("group+tcp://t:1/v00000003-l0", 0, CALL, False),
        ("tcp://t:1/v00000003-l0", 2, CALL, False),
        ("/a/v3.manifest.json", 2, CALL, False),
    ],
)
def test_a_worker_asks_for_a_call_to_the_group_where_the_version_comes_by_one(
    tmp_path, place, num_ranks, reply, is_asked
):
    async def test():
        relay, wire = StillRelay(), AnsweringWire(reply)
        receiver = VersionReceiver([tmp_path / "w"], make_wire=lambda *_: wire, make_relay=lambda: relay)
        serving = asyncio.create_task(receiver.run())
        met = await receiver.meet(place, 0.0 if reply is None else 20.0, JoinAs(num_ranks, "cuda"))
        assert met == (CALL if is_asked and reply is CALL else None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert serving.done() == is_asked, "others are served from the first stream on"
        if is_asked and reply is not None:
            assert wire.asked == [JoinRequest(version=3, lineage="l0", num_ranks=2, device="cuda")]
        assert receiver.counters().get("weights_relayed_chunks") == (3.0 if is_asked else None)
        await receiver.close()
        assert relay.events == (["start", "run", "close"] if is_asked else [])
        assert wire.is_closed == is_asked
        serving.cancel()

    asyncio.run(test())


def test_a_trainer_that_calls_to_no_group_in_time_is_said_to_be_late(tmp_path, caplog):
    async def test():
        relay, wire = StillRelay(), AnsweringWire(None)
        receiver = VersionReceiver([tmp_path / "w"], make_wire=lambda *_: wire, make_relay=lambda: relay)
        assert await receiver.meet("group+tcp://t:1/v00000003-l0", 0.0, JoinAs(1, "cpu")) is None
        await receiver.close()

    with caplog.at_level("WARNING"):
        asyncio.run(test())
    assert "cannot join the process group of version 3: no reply within 0 s" in caplog.text


@pytest.mark.parametrize(
    ("error", "withdrawn"), [(WeightError("parent lost"), ["second"]), (WeightsDamaged("bad"), ["first", "second"])]
)
def test_a_fetch_that_fails_leaves_others_only_what_is_whole(tmp_path, monkeypatch, error, withdrawn):
    """The first of two payloads is here already when the second fails."""
    offered, gone = [], []
    relay = SimpleNamespace(
        keep_only=lambda names: None, offer=lambda file: offered.append(file.payload.name),
        withdraw=lambda name, reason: gone.append((name, reason)),
    )  # fmt: skip
    data = bytes(range(10))
    payloads = [msgspec.structs.replace(make_payload(10, 10, data), name=name) for name in ("first", "second")]

    class Fetcher:
        async def way(self, locator, base):
            return payloads

        async def fetch(self, locator, file):
            if file.payload.name == "second":
                raise error
            assert file.put(0, np.frombuffer(data, np.uint8))

    async def test():
        receiver = VersionReceiver([tmp_path / "w"], make_wire=None, make_relay=None)
        receiver._fetcher, receiver._relay = Fetcher(), relay
        receiver._local = SimpleNamespace(base=None, open=lambda num_bytes: None, part=lambda name: tmp_path / name)
        with pytest.raises(type(error)):
            await receiver._from_stream(None)
        receiver._files_thread.shutdown(wait=False)

    monkeypatch.setattr(receiver_module, "decode_manifest", lambda manifest, is_delta: SimpleNamespace(num_bytes=10))
    asyncio.run(test())
    assert offered == ["first", "second"]
    assert gone == [(name, "fetching this payload failed") for name in withdrawn]
    assert not list(tmp_path.iterdir())


def test_one_version_is_assembled_after_the_other(tmp_path: Path) -> None:
    receiver = VersionReceiver([tmp_path / "w"], make_wire=None, make_relay=None)
    begun: list[int] = []
    first, may_end = threading.Event(), threading.Event()

    def assemble(number: int) -> None:
        begun.append(number)
        first.set()
        may_end.wait(60.0)

    works = [receiver._files_thread.submit(assemble, number) for number in range(2)]
    assert first.wait(60.0)
    for _ in range(50):
        time.sleep(0.001)
    assert begun == [0], "interrupted work ends before the next begins"
    may_end.set()
    for work in works:
        work.result(60.0)
    assert begun == [0, 1]
