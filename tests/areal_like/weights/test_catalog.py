"""Which files of a folder lead to a version, and when a manifest is read again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from areal_like.errors import WeightsDamaged
from areal_like.weights import catalog as catalog_module
from areal_like.weights.catalog import Catalog, decode_manifest, delta_name, read_manifest
from areal_like.weights.delta import Base, DeltaManifest
from areal_like.weights.weight_store import WeightManifest, manifest_name


def full(folder: Path, version: int, num_bytes: int = 1000) -> Path:
    manifest = WeightManifest(
        version=version, lineage="l0", kind="disk", payload=f"f{version}", num_bytes=num_bytes, tensors=()
    )
    path = folder / manifest_name(version, "l0")
    path.write_bytes(msgspec.json.encode(manifest))
    return path


def delta(folder: Path, version: int, base_version: int | None = None, num_bytes: int = 10) -> Path:
    result = WeightManifest(
        version=version, lineage="l0", kind="disk", payload=f"f{version}", num_bytes=1000, tensors=()
    )
    base = version - 1 if base_version is None else base_version
    manifest = DeltaManifest(
        base_version=base, base_digest=f"d{base}", payload=f"d{version}", num_bytes=num_bytes, tensors=(), result=result
    )
    path = folder / delta_name(version, "l0")
    path.write_bytes(msgspec.json.encode(manifest))
    return path


def way(folder: Catalog, version: int, base: Base | None = None, lineage: str = "l0") -> list[str]:
    return [path.name for path, _ in folder.route(version, lineage, base)]


def test_names_of_deltas_are_ordered_by_version() -> None:
    assert delta_name(7, "l0") == "v00000007-l0.delta.json"


def test_a_version_is_reached_from_the_nearest_full_one_or_from_what_is_here(tmp_path: Path) -> None:
    full(tmp_path, 1)
    for version in (2, 3, 4):
        delta(tmp_path, version)
    folder = Catalog(tmp_path)
    deltas = [delta_name(version, "l0") for version in (2, 3, 4)]
    assert way(folder, 4) == [manifest_name(1, "l0"), *deltas]
    assert way(folder, 4, Base(2, "d2")) == deltas[1:]
    assert way(folder, 4, Base(2, "another")) == [manifest_name(1, "l0"), *deltas]
    assert way(folder, 1) == [manifest_name(1, "l0")]
    manifests = [manifest.num_bytes for _, manifest in folder.route(4, "l0", None)]
    assert manifests == [1000, 10, 10, 10]


def test_deltas_larger_than_a_full_version_are_not_taken(tmp_path: Path) -> None:
    full(tmp_path, 1, num_bytes=15)
    for version in (2, 3):
        delta(tmp_path, version, num_bytes=10)
    assert len(way(Catalog(tmp_path), 3, Base(1, "d1"))) == 2
    full(tmp_path, 3, num_bytes=15)
    assert way(Catalog(tmp_path), 3, Base(1, "d1")) == [delta_name(version, "l0") for version in (2, 3)], (
        "a delta that is there hides the full manifest of its version"
    )


@pytest.mark.parametrize(("version", "lineage"), [(5, "l0"), (4, "l1"), (3, "l0")])
def test_a_version_without_a_way_says_so(tmp_path: Path, version: int, lineage: str) -> None:
    delta(tmp_path, 4, base_version=2)
    delta(tmp_path, 3, base_version=2)
    with pytest.raises(WeightsDamaged, match=f"version {version} cannot be loaded"):
        way(Catalog(tmp_path), version, lineage=lineage)


def test_a_manifest_is_read_once_and_again_after_its_file_was_gone(tmp_path: Path) -> None:
    path = full(tmp_path, 1)
    folder = Catalog(tmp_path)
    assert folder.route(1, "l0", None)[0][1].num_bytes == 1000
    full(tmp_path, 1, num_bytes=2000)
    assert folder.route(1, "l0", None)[0][1].num_bytes == 1000, "a name never means two contents"
    path.unlink()
    with pytest.raises(WeightsDamaged):
        folder.route(1, "l0", None)
    full(tmp_path, 1, num_bytes=2000)
    assert folder.route(1, "l0", None)[0][1].num_bytes == 2000


def test_of_many_manifests_the_oldest_known_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "MAX_KNOWN", 2)
    folder = Catalog(tmp_path)
    for version in (1, 2):
        full(tmp_path, version)
        way(folder, version)
    for version in (1, 2):
        full(tmp_path, version, num_bytes=2000)
    assert [folder.route(version, "l0", None)[0][1].num_bytes for version in (1, 2)] == [1000, 1000]
    full(tmp_path, 3)
    way(folder, 3)
    assert folder.route(2, "l0", None)[0][1].num_bytes == 1000
    assert folder.route(1, "l0", None)[0][1].num_bytes == 2000


def test_a_manifest_is_of_the_kind_its_name_says(tmp_path: Path) -> None:
    assert isinstance(read_manifest(full(tmp_path, 1)), WeightManifest)
    assert isinstance(read_manifest(delta(tmp_path, 2)), DeltaManifest)
    with pytest.raises(WeightsDamaged, match="no manifest"):
        read_manifest(tmp_path / manifest_name(9, "l0"))
    for is_delta, path in ((True, full(tmp_path, 1)), (False, delta(tmp_path, 2))):
        with pytest.raises(WeightsDamaged, match="damaged manifest"):
            decode_manifest(path.read_bytes(), is_delta=is_delta)
