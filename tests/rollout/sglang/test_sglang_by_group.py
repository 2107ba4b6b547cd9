"""Claims about versions that come to a server by a process group, against a fake launcher and a played wire."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from areal_like.errors import TransferBroken, WeightError
from areal_like.weights.process_group import GroupCall, buckets
from areal_like.weights.weight_store import WeightManifest, WeightStore, open_payload
from rollout.engine.server.checkpoint_names import as_checkpoint
from rollout.engine.sglang import by_group
from rollout.engine.sglang.by_group import RANKS, announced

pytestmark = pytest.mark.processes


class PlayedMember:
    """Gets what the store contains, unless set to fail."""

    path = None
    failure = None

    def __init__(self, device):
        self.num_left = 0

    def meet(self, call):
        pass

    def receive(self, call):
        if self.failure is not None:
            raise self.failure
        return open_payload(self.path)

    def leave(self):
        self.num_left += 1


def call_of(path, *, is_new=True, group="g1"):
    manifest = path.read_bytes()
    version = msgspec.json.decode(manifest, type=WeightManifest).version
    return GroupCall(
        version=version, lineage="l0", group=group, is_new=is_new, host="127.0.0.1", port=1, rank=1, size=3,
        backend="gloo", bucket_bytes=4096, deadline_s=30.0, manifest=manifest,
    )  # fmt: skip


@pytest.fixture
def wired(fake_world, monkeypatch):
    """A fake world whose next version comes by a group."""
    member = type("Member", (PlayedMember,), {})
    monkeypatch.setattr(by_group, "GroupMember", member)
    fake_world.monkeypatch.setenv("FAKE_TICK_S", "0.01")

    def publish(version, value=0.5):
        member.path = fake_world.publish(version, value)
        return member.path

    path = publish(1, 0.25)
    fake_world.monkeypatch.setenv(
        "FAKE_GROUP_PAYLOAD", str(path.with_name(path.name.replace(".manifest.json", ".weights")))
    )
    fake_world.member, fake_world.path = member, path
    return fake_world


async def begin(world, engine):
    task = asyncio.ensure_future(engine.generate(world.ask(1, 60)))
    await world.until(lambda: len(engine.progress().get(1, ())))
    return task


async def group_calls(world, engine):
    kinds = ("join", "leave", "pause", "begin", "bucket", "end", "checksums", "resume")
    return [call for call in (await world.server_info(engine))["calls"] if call[0] in kinds]


@pytest.mark.parametrize("mode", ["recompute", "keep_kv"])
def test_a_version_by_a_group_is_loaded_in_one_pause_proved_and_laid_out(wired, mode):
    async def body():
        async with wired.engine(interruption=mode) as engine:
            assert engine.capabilities.group_ranks == RANKS == 2
            task = await begin(wired, engine)
            before = len(await group_calls(wired, engine))
            report = await engine.load_from_group(call_of(wired.path), mode)
            assert report.version == engine.version == 1
            assert 0 < report.transfer_s <= report.pause_s
            keeps_kv = mode == "keep_kv"
            assert (await group_calls(wired, engine))[before:] == [
                ["join", "g1", 2, 3], ["pause", "in_place" if keeps_kv else "retract"], ["begin"],
                ["bucket", ["weight"], [[2, 2]], "1", not keeps_kv], ["end"], ["checksums"], ["resume"],
            ]  # fmt: skip
            outcome = await task
            wired.check(outcome.segment)
            assert set(outcome.segment.versions_R.tolist()) == {0, 1}
            home = engine._keeper.home
            assert home.version == 1
            assert torch.equal(load_file(home.folder / "model.safetensors")["weight"], torch.full((2, 2), 0.25))
            await engine.load_from_group(call_of(wired.path, is_new=False), mode)
            await engine.load_from_group(call_of(wired.path, group="g2"), mode)
            joined = [call for call in await group_calls(wired, engine) if call[0] in ("join", "leave")]
            assert joined == [["join", "g1", 2, 3], ["leave", "g1"], ["join", "g2", 2, 3]], "one group is met once"

    wired.run(body())


def test_a_server_that_is_not_in_the_group_stays_as_it_is(wired):
    async def body():
        async with wired.engine() as engine:
            with pytest.raises(TransferBroken, match="not in g7"):
                await engine.load_from_group(call_of(wired.path, is_new=False, group="g7"), "recompute")
            wired.monkeypatch.setenv("FAKE_REFUSE_JOIN", "1")
        async with wired.engine() as engine:
            with pytest.raises(TransferBroken, match=r"did not join g1: .*as configured"):
                await engine.load_from_group(call_of(wired.path), "recompute")
            assert (engine.version, engine.counters()["server_restarts"]) == (0, 0)
            wired.check((await engine.generate(wired.ask())).segment)

    wired.run(body())


@pytest.mark.parametrize("fault", ["refused", "damaged", "wrong sums"])
def test_a_version_that_does_not_come_whole_costs_a_server_and_no_answer(wired, fault):
    async def body():
        if fault == "refused":
            wired.monkeypatch.setenv("FAKE_REFUSE_BUCKET", "1")
        elif fault == "damaged":
            wired.member.failure = WeightError("checksum differs")
        else:
            wired.monkeypatch.setenv("FAKE_WRONG_SUM", "1")
        async with wired.engine(max_restarts=0) as engine:
            task = await begin(wired, engine)
            with pytest.raises(TransferBroken if fault == "refused" else WeightError) as found:
                await engine.load_from_group(call_of(wired.path), "recompute")
            assert isinstance(found.value, TransferBroken) == (fault == "refused"), "else the worker is quarantined"
            assert engine.version == 0
            outcome = await task
            wired.check(outcome.segment)
            assert (len(outcome.segment), set(outcome.segment.versions_R.tolist())) == (60, {0})
            assert "the server did not receive all of version 1" in wired.reports[0]

    wired.run(body())


def test_a_bucket_is_announced_under_a_checkpoints_names_in_the_order_of_its_bytes(fake_world):
    stacked = torch.arange(2 * 6 * 4, dtype=torch.float32).reshape(2, 6, 4)
    tensors = {"a": torch.ones(3), "x.experts.gate_up_proj": stacked, "x.experts.down_proj": stacked[:, :4, :3].clone()}
    fake_world.store = WeightStore(fake_world.root / "files", "disk", keep=2)
    manifest, payload = open_payload(fake_world.publish_all(1, tensors))
    (bucket,) = buckets(manifest, 1 << 20)
    sent, whole = announced(bucket), as_checkpoint(tensors)
    assert sent.keys() == whole.keys()
    data = b"".join(bytes(payload[entry.name]) for entry in bucket.entries)
    for name, tensor in sent.items():
        size = tensor.numel() * tensor.itemsize
        assert np.array_equal(np.frombuffer(data[:size], np.float32), whole[name].reshape(-1).numpy())
        data = data[size:]
    assert not data
