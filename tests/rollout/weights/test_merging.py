"""Versions that come as an adapter alone and are merged on the worker's host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from areal_like.errors import UserError, WeightError
from areal_like.weights.adapter import AdapterInfo, AdapterPayload
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import WeightStore, describe
from rollout.engine.loading import open_verified
from rollout.weights.merging import MergingReceiver

SCALE = 2.0
NAME = "model.layers.0.mlp.up_proj"


def raw(tensor: torch.Tensor) -> TensorBytes:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return TensorBytes(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat)


class Inner:
    """A receiver whose versions are manifests already."""

    async def receive(self, place: str, deadline_s: float) -> Path:
        return Path(place)

    async def run(self) -> None: ...

    def forget(self) -> None: ...

    def counters(self) -> dict[str, float]:
        return {"received": 1.0}

    async def close(self) -> None: ...


class World:
    """A base in a folder, a trainer's weight store, a worker's receiver."""

    def __init__(self, tmp_path: Path, dtype: str = "float32") -> None:
        torch.manual_seed(0)
        self.dtype, self.folder = dtype, tmp_path / "base"
        self.folder.mkdir()
        self.base = {f"{NAME}.weight": torch.randn(6, 4), "model.norm.weight": torch.randn(4)}
        save_file(self.base, self.folder / "model.safetensors")
        self.store = WeightStore(tmp_path / "store", "shm", 3)
        self.local = tmp_path / "local"
        inner: Any = Inner()
        self.receiver = MergingReceiver(inner, self.folder, [self.local])

    def publish(self, version: int, *, name: str = NAME, is_lone: bool = True, **changes: Any) -> str:
        kind = getattr(torch, self.dtype)
        cast = {one: raw(tensor.to(kind)) for one, tensor in self.base.items()}
        crcs = {entry.name: entry.crc32 for entry in describe("disk", 0, "base", cast).tensors}
        self.adapter = torch.randn(2, 4), torch.randn(6, 2)
        parts = zip(("lora_A", "lora_B"), self.adapter, strict=True)
        tensors = {f"base_model.model.{name}.{part}.weight": raw(tensor) for part, tensor in parts}
        lone = AdapterPayload(scale=SCALE, dtype=self.dtype, base=crcs | changes)
        note = AdapterInfo(base_digest="b", adapter_digest=f"a{version}", lone=lone if is_lone else None)
        return str(self.store.publish(version, "l0", tensors, note))

    def receive(self, place: str) -> Path:
        return asyncio.run(self.receiver.receive(place, 5.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_makes_base_plus_adapter_of_what_came(tmp_path: Path, dtype: str) -> None:
    world = World(tmp_path, dtype)
    for version in (0, 1):
        manifest, tensors = open_verified(world.receive(world.publish(version)))
        lora_A, lora_B = world.adapter
        expected = world.base[f"{NAME}.weight"] + SCALE * (lora_B @ lora_A)
        kind = getattr(torch, dtype)
        torch.testing.assert_close(tensors[f"{NAME}.weight"], expected.to(kind), atol=1e-6, rtol=0)
        assert torch.equal(tensors["model.norm.weight"], world.base["model.norm.weight"].to(kind))
        assert (manifest.version, manifest.adapter) == (
            version, AdapterInfo(base_digest="b", adapter_digest=f"a{version}")
        )  # fmt: skip
    assert world.receiver.counters() == {"received": 1.0, "weights_merged": 2.0}


def test_what_is_whole_already_goes_through_as_it_is(tmp_path: Path) -> None:
    world = World(tmp_path)
    place = world.publish(1, is_lone=False)
    assert world.receive(place) == Path(place)
    assert world.receiver.counters()["weights_merged"] == 0


def test_another_base_is_refused_with_a_sentence(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(UserError, match=r"is not the base model of the run's adapter \(model\.norm\.weight differs\)"):
        world.receive(world.publish(1, **{"model.norm.weight": 1}))
    with pytest.raises(UserError, match=r"the files do not contain model\.other"):
        world.receive(world.publish(2, **{"model.other": 1}))
    with pytest.raises(WeightError, match="has 2 tensors for which the base model has no module"):
        world.receive(world.publish(3, name="model.layers.9.mlp.up_proj"))


def test_older_merged_versions_and_at_the_end_all_are_removed(tmp_path: Path) -> None:
    world = World(tmp_path)
    for version in range(4):
        path = world.receive(world.publish(version))
    assert len(list(path.parent.glob("*.safetensors"))) == 2
    asyncio.run(world.receiver.close())
    assert not path.parent.exists()
