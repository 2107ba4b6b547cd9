"""Claims about versions in the store with deltas: bit-identical to full ones, full again when due, nothing piles up."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.errors import WeightsDamaged
from areal_like.weights.catalog import Catalog
from areal_like.weights.delta import DeltaManifest, apply_tensor
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import map_payload, open_payload, tensors_in, verify
from trainer.config import DeltaSettings, WeightStoreSettings
from trainer.weights.version_writer import VersionWriter


def weights(dice: np.random.Generator, size: int = 4000) -> dict[str, np.ndarray]:
    return {
        "wide": dice.integers(0, 2**32, size, dtype=np.uint32),
        "narrow": dice.integers(0, 2**16, (7, size // 7), dtype=np.uint16),
        "fixed": dice.integers(0, 255, 31, dtype=np.uint8),
        "empty": np.zeros((0, 3), np.uint32),
    }


DTYPES = {"wide": "float32", "narrow": "bfloat16", "fixed": "uint8", "empty": "float32"}


def as_bytes(arrays: dict[str, np.ndarray]) -> dict[str, TensorBytes]:
    return {name: TensorBytes(DTYPES[name], array.shape, array.copy().data) for name, array in arrays.items()}


def nudge(arrays: dict[str, np.ndarray], dice: np.random.Generator, share: float) -> None:
    for name in ("wide", "narrow"):
        where = dice.random(arrays[name].shape) < share
        arrays[name][where] += arrays[name].dtype.type(1)


def follow(root: Path, version: int, lineage: str = "l0") -> dict[str, bytes]:
    """A version put together by the manifests alone, checked by its checksums."""
    payload, manifest = bytearray(), None
    for path, manifest in Catalog(root).route(version, lineage, None):
        data = map_payload(path.with_name(manifest.payload), manifest.num_bytes)
        if not isinstance(manifest, DeltaManifest):
            payload = bytearray(data)
            continue
        entries = {entry.name: entry for entry in manifest.result.tensors}
        for part in manifest.tensors:
            entry = entries[part.name]
            target = memoryview(payload)[entry.offset : entry.offset + entry.num_bytes]
            if part.num_bytes:
                apply_tensor(data[part.offset : part.offset + part.num_bytes], target, entry.dtype)
    assert manifest is not None
    result = manifest.result if isinstance(manifest, DeltaManifest) else manifest
    tensors = tensors_in(result, memoryview(bytes(payload)))
    verify(result, tensors)
    return {name: bytes(data) for name, data in tensors.items()}


def writer(root: Path, kind: str = "disk", **delta: int) -> VersionWriter:
    return VersionWriter(root, WeightStoreSettings(kind=kind, delta=DeltaSettings(**delta)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.01, 0.5, 1.0]), st.integers(2, 5))
def test_every_version_is_bit_identical_to_a_full_transfer(tmp_path_factory, seed, share, full_every):
    root, dice = tmp_path_factory.mktemp("store"), np.random.default_rng(seed)
    writes, arrays = writer(root, full_every=full_every), weights(dice)
    for version in range(6):
        writes.write(version, "l0", as_bytes(arrays))
        assert follow(root, version) == {name: array.tobytes() for name, array in arrays.items()}
        nudge(arrays, dice, share)


def test_a_small_change_travels_small_and_every_kth_version_is_whole(tmp_path):
    dice = np.random.default_rng(0)
    writes, arrays = writer(tmp_path, full_every=4), weights(dice)
    paths = []
    for version in range(9):
        paths.append(writes.write(version, "l0", as_bytes(arrays)).path.name)
        nudge(arrays, dice, 0.01)
    is_delta = [name.endswith(".delta.json") for name in paths]
    assert is_delta == [False, True, True, True, False, True, True, True, False]
    full_bytes = sum(array.nbytes for array in arrays.values())
    assert (tmp_path / "v00000007-l0.delta").stat().st_size < full_bytes / 20


def test_deltas_before_the_last_full_version_but_one_are_deleted(tmp_path):
    dice = np.random.default_rng(0)
    writes, arrays = writer(tmp_path, full_every=3), weights(dice)
    for version in range(10):
        writes.write(version, "l0", as_bytes(arrays))
        nudge(arrays, dice, 0.01)
    deltas = sorted(path.name for path in tmp_path.glob("*.delta"))
    assert deltas == ["v00000007-l0.delta", "v00000008-l0.delta"]
    assert len(list(tmp_path.iterdir())) == 1 + 2 * 3 + 2 * len(deltas)
    follow(tmp_path, 8)


def test_a_chain_never_costs_more_than_one_full_version(tmp_path):
    """A third of all bits is drawn again each time: after three deltas the next version is written whole."""
    dice = np.random.default_rng(0)
    writes, arrays = writer(tmp_path, full_every=100), weights(dice)
    full_bytes = sum(array.nbytes for array in arrays.values())
    chain = num_deltas = 0
    for version in range(8):
        written = writes.write(version, "l0", as_bytes(arrays))
        num_deltas += written.is_delta
        chain = chain + written.num_bytes if written.is_delta else 0
        assert chain <= full_bytes * 1.05
        half = len(arrays["wide"]) // 2
        arrays["wide"][:half] = dice.integers(0, 2**32, half, dtype=np.uint32)
    assert 5 <= num_deltas <= 6


def test_a_new_lineage_and_other_shapes_start_whole(tmp_path):
    dice = np.random.default_rng(0)
    writes, arrays = writer(tmp_path), weights(dice)
    writes.write(0, "l0", as_bytes(arrays))
    assert writes.write(1, "l0", as_bytes(arrays)).path.name.endswith(".delta.json")
    assert writes.write(1, "l1", as_bytes(arrays)).path.name == "v00000001-l1.manifest.json"
    assert not list(tmp_path.glob("*.delta"))
    assert writes.write(2, "l1", as_bytes(weights(dice, 5000))).path.name == "v00000002-l1.manifest.json"


def test_a_version_in_which_nothing_changed_is_followed_too(tmp_path):
    writes, arrays = writer(tmp_path), weights(np.random.default_rng(0))
    for version in range(3):
        writes.write(version, "l0", as_bytes(arrays))
    assert follow(tmp_path, 2)["wide"] == arrays["wide"].tobytes()


@pytest.mark.parametrize("damaged", ["payload", "delta", "delta manifest", "full version before it", "everything"])
def test_newest_version_is_written_again_whole_whatever_is_damaged(tmp_path, damaged):
    dice = np.random.default_rng(1)
    writes, arrays = writer(tmp_path, full_every=8), weights(dice)
    for version in range(3):
        writes.write(version, "l0", as_bytes(arrays))
        if version < 2:
            nudge(arrays, dice, 0.01)
    expected = {name: array.tobytes() for name, array in arrays.items()}
    patterns = {
        "payload": "v00000000*.safetensors", "delta": "v00000002*.delta", "delta manifest": "v00000002*.delta.json",
        "full version before it": "v00000000*", "everything": "v*",
    }  # fmt: skip
    for path in tmp_path.glob(patterns[damaged]):
        path.write_bytes(b"damaged")
    with pytest.raises(WeightsDamaged):
        follow(tmp_path, 2)
    written = writes.write_again(2, "l0")
    assert written is not None
    assert not written.is_delta
    assert follow(tmp_path, 2) == expected
    nudge(arrays, dice, 0.01)
    assert writes.write(3, "l0", as_bytes(arrays)).is_delta, "the next one needs nothing older"
    assert follow(tmp_path, 3) == {name: array.tobytes() for name, array in arrays.items()}


def test_only_the_newest_version_can_be_written_again_and_none_while_its_successor_is_copied(tmp_path):
    arrays = weights(np.random.default_rng(2))
    writes = VersionWriter(tmp_path, WeightStoreSettings(kind="disk"))
    for version in range(2):
        writes.write(version, "l0", as_bytes(arrays))
    assert writes.write_again(0, "l0") is None
    assert writes.write_again(1, "l9") is None
    written = writes.write_again(1, "l0")
    assert written is not None
    verify(*open_payload(written.path))
    writes.release()
    assert writes.write_again(1, "l0") is None, "no memory is held for two versions"


def test_without_deltas_the_store_is_as_it_always_was(tmp_path):
    writes, arrays = VersionWriter(tmp_path, WeightStoreSettings(kind="shm")), weights(np.random.default_rng(0))
    manifest, payload = open_payload(writes.write(4, "l0", as_bytes(arrays)).path)
    verify(manifest, payload)
    assert (manifest.kind, manifest.version) == ("shm", 4)


def test_encoding_takes_memory_for_a_block_and_not_for_a_tensor(tmp_path):
    arrays = {"wide": np.zeros(4_000_000, np.uint32)}
    changed = {"wide": np.ones(4_000_000, np.uint32)}
    writes = writer(tmp_path)
    writes.write(0, "l0", as_bytes(arrays))
    sent = as_bytes(changed)
    tracemalloc.start()
    try:
        writes.write(1, "l0", sent)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 32_000_000


@pytest.mark.parametrize(("kind", "place"), [("shm", "shm"), ("disk", "disk"), ("stream", "shm")])
def test_deltas_are_safetensors_wherever_they_lie(kind, place):
    asked = WeightStoreSettings(kind=kind, delta=DeltaSettings())
    assert (asked.place, asked.layout) == (place, "disk")


class ReleasedMeanwhile(VersionWriter):
    """Another thread copies the successor as soon as the newest version's tensors were looked up."""

    def __getattribute__(self, name: str):
        value = super().__getattribute__(name)
        if name == "_newest" and value is not None:
            self.release()
        return value


def test_release_on_another_thread_does_not_break_a_rewrite_under_way(tmp_path):
    writes = ReleasedMeanwhile(tmp_path, WeightStoreSettings(kind="disk", keep=2))
    writes.write(0, "l0", as_bytes(weights(np.random.default_rng(0))))
    assert writes.write_again(0, "l0") is not None
    assert writes.write_again(0, "l0") is None, "released"
