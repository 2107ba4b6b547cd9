"""A transfer of the user's, named by import path, carries versions from a trainer to a worker: nothing of ours was
edited for it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import UserError, WeightsDamaged
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import open_payload, verify
from controller.config.loading import load_config
from controller.config.problems import ConfigError
from rollout.weights.choice import receiver_of
from trainer.config import TrainerSettings
from trainer.weights.choice import sender_of
from trainer.weights.version_writer import VersionWriter

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
TOY = "toy_transfer.descriptor:TOY"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))


def spec_of(folder: Path, role: str) -> ProcessSpec:
    return ProcessSpec(
        role=role, name=f"{role}-0", run_id="r", parent_pid=1, seed=1, run_dir=str(folder), hub_address="tcp://127.0.0.1:1",
        model=ModelSettings(path=str(folder)), sampling=SamplingSettings(), staleness=StalenessSettings(),
        groups_per_step=1, group_size=1, num_steps=1, weight_dir=str(folder / "weights"), settings={},
        weight_transfer=TOY,
    )  # fmt: skip


def no_wire(address: str, accept: frozenset[type]) -> Any:
    raise AssertionError("the toy opens its own connections")


def tensors_of(version: int) -> dict[str, np.ndarray]:
    dice = np.random.default_rng(version)
    return {"w": dice.standard_normal((300, 7)).astype(np.float32), "b": np.full(3, version, np.float32)}


def test_versions_travel_from_sender_to_receiver_by_import_path(tmp_path: Path) -> None:
    settings = TrainerSettings(weights={"kind": TOY, "options": {"block_bytes": 100}})  # type: ignore[arg-type]

    async def scenario() -> None:
        writer = VersionWriter(tmp_path / "weights", settings.weights)
        sender = sender_of(spec_of(tmp_path, "trainer"), settings)
        assert sender is not None
        receiver = receiver_of(spec_of(tmp_path, "rollout"), no_wire)
        await sender.start()
        serving = asyncio.create_task(sender.run())
        for version in (0, 1):
            arrays = tensors_of(version)
            tensors = {name: TensorBytes("float32", array.shape, array.data) for name, array in arrays.items()}
            written = writer.write(version, "l0", tensors)
            place = await sender.publish(written.path, version, "l0")
            path = await receiver.receive(place, 10.0)
            assert path.parent != written.path.parent
            manifest, payload = open_payload(path)
            verify(manifest, payload)
            assert manifest.version == version
            for name, array in arrays.items():
                assert payload[name].tobytes() == array.tobytes()
        assert await receiver.receive(str(written.path), 10.0) == written.path, "an evaluation announces a path"
        with pytest.raises(WeightsDamaged):
            await receiver.receive(place.replace("v00000001", "v00000009"), 10.0)
        assert receiver.counters() == {"toy_received": 2.0}
        serving.cancel()
        await sender.close()
        await receiver.close()
        assert not path.exists()

    asyncio.run(scenario())


def problems_of(*overrides: str) -> list[str]:
    try:
        load_config("quickstart", [f"trainer.weights.kind={TOY}", *overrides])
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_configuration_asks_the_descriptor() -> None:
    assert problems_of() == []
    assert problems_of("trainer.weights.options={block_bytes: 9}", "trainer.weights.swap=rolling") == []
    (refused,) = problems_of("trainer.weights.options={block_bytes: 0}")
    assert "block_bytes is not a positive number" in refused
    (refused,) = problems_of("trainer.weights.delta={}")
    assert "trainer.weights.delta: the toy serves whole versions -> delta: null" in refused
    (refused,) = problems_of("trainer.weights.shared_dir=/nfs")
    assert "has no effect with kind" in refused


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("toy_transfer.descriptor:TOYS", "did you mean toy_transfer.descriptor:TOY?"),
        ("toy_transfer.descriptor:SCHEME", "is neither an instance nor a subclass of TransferDescriptor"),
        ("no_such_module:TOY", "cannot be imported"),
        ("streem", "no weight transfer `streem` -> did you mean stream?"),
        ("pigeon", "shm, disk, stream, distributed, or module:ATTRIBUTE"),
    ],
)
def test_name_that_is_no_transfer_is_one_problem(kind: str, words: str) -> None:
    (problem,) = problems_of(f"trainer.weights.kind={kind}")
    assert problem.startswith("command line: trainer.weights.kind: ")
    assert words in problem
    with pytest.raises(UserError, match=r"trainer\.weights\.kind: "):
        sender_of(spec_of(Path(), "trainer"), TrainerSettings(weights={"kind": kind}))  # type: ignore[arg-type]
