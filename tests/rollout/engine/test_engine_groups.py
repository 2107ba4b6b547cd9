"""Versions that come by a process group into a running engine: at a token boundary, checked, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_like.errors import TransferBroken, WeightError
from areal_like.weights.process_group import GroupCall
from areal_like.weights.weight_store import WeightManifest, map_payload
from trainer.weights.group_root import GroupRoot

TOLERANCE = 1e-4
DEADLINE_S = 300.0


class Sender:
    """The trainer's end, for one member."""

    def __init__(self) -> None:
        self.root = GroupRoot("g1", 2, host="127.0.0.1", backend="gloo", device="cpu", deadline_s=DEADLINE_S)
        self.is_new = True

    async def bring(self, engine: Any, path: Any, *, interruption: str = "recompute", is_damaged: bool = False) -> Any:
        manifest = msgspec.json.decode(path.read_bytes(), type=WeightManifest)
        payload = map_payload(path.with_name(manifest.payload), manifest.num_bytes)
        announced = manifest
        if is_damaged:
            first, *rest = manifest.tensors
            announced = msgspec.structs.replace(
                manifest, tensors=(msgspec.structs.replace(first, crc32=first.crc32 ^ 1), *rest)
            )
        call = GroupCall(
            version=manifest.version, lineage="l0", group="g1", is_new=self.is_new, host="127.0.0.1",
            port=self.root.port, rank=1, size=2, backend="gloo", bucket_bytes=4096, deadline_s=DEADLINE_S,
            manifest=msgspec.json.encode(announced),
        )  # fmt: skip
        self.is_new = False
        sending = asyncio.create_task(asyncio.to_thread(self.root.bring, manifest, payload, 4096))
        try:
            return await engine.load_from_group(call, interruption)
        finally:
            await sending


@pytest.mark.parametrize("interruption", ["recompute", "keep_kv"])
def test_versions_by_a_group_come_in_mid_answer_and_every_stamp_is_true(kit: Any, interruption: str) -> None:
    bench = kit.bench("qwen3")
    bench.add_other(1)
    bench.add_other(2)
    requests = [kit.ask(i, prompt_length=3 + i, max_new_tokens=40, seed=i) for i in range(4)]

    async def body() -> Any:
        async with bench.engine() as engine:
            sender = Sender()
            tasks = await kit.start(engine, requests, 5)
            for version in (1, 2):
                report = await sender.bring(engine, bench.manifests[version], interruption=interruption)
                assert report.version == engine.version == version
                assert 0 < report.transfer_s <= report.pause_s
                await kit.run_steps(engine, 5)
            await engine.resume()
            outcomes = await asyncio.gather(*tasks)
            sender.root.leave()
            return outcomes

    outcomes = kit.run(body())
    for request, outcome in zip(requests, outcomes, strict=True):
        assert set(outcome.segment.versions_R.tolist()) == {0, 1, 2}
        if interruption == "recompute":
            assert bench.worst_error(request, outcome.segment) < TOLERANCE


def test_a_damaged_payload_leaves_the_old_version_in_use_and_the_next_one_loads(kit: Any) -> None:
    bench = kit.bench("qwen3")
    bench.add_other(1)
    request = kit.ask(0, max_new_tokens=30)

    async def body() -> Any:
        async with bench.engine() as engine:
            sender = Sender()
            (task,) = await kit.start(engine, [request], 5)
            with pytest.raises(WeightError, match="checksum differs"):
                await sender.bring(engine, bench.manifests[1], is_damaged=True)
            assert engine.version == 0
            await kit.run_steps(engine, 5)
            await sender.bring(engine, bench.manifests[1])
            await engine.resume()
            outcome = await task
            sender.root.leave()
            return outcome

    outcome = kit.run(body())
    assert np.array_equal(outcome.segment.versions_R, [0] * 10 + [1] * 20)
    assert bench.worst_error(request, outcome.segment) < TOLERANCE


def test_a_group_that_breaks_off_is_said_and_generation_goes_on_with_the_old_version(kit: Any) -> None:
    bench = kit.bench("qwen3")
    path = bench.add_other(1)
    request = kit.ask(0, max_new_tokens=30)

    async def body() -> Any:
        async with bench.engine() as engine:
            sender = Sender()
            (task,) = await kit.start(engine, [request], 5)
            await sender.bring(engine, path)
            sender.root.leave()
            manifest = msgspec.json.decode(path.read_bytes(), type=WeightManifest)
            call = GroupCall(
                version=1, lineage="l0", group="g1", is_new=False, host="127.0.0.1", port=sender.root.port, rank=1,
                size=2, backend="gloo", bucket_bytes=4096, deadline_s=DEADLINE_S,
                manifest=msgspec.json.encode(manifest),
            )  # fmt: skip
            with pytest.raises(TransferBroken):
                await engine.load_from_group(call, "recompute")
            await engine.resume()
            return await task

    assert len(kit.run(body()).segment) == 30
