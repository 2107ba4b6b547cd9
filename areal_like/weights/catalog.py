"""Index of a weight store's files: finds the full payloads and deltas that lead to a version, by their manifests."""

from __future__ import annotations

from pathlib import Path

import msgspec

from areal_like.errors import WeightsDamaged
from areal_like.weights.delta import DELTA_MANIFEST_SUFFIX, Base, DeltaManifest, Offer, route
from areal_like.weights.weight_store import WeightManifest, manifest_name

AnyManifest = WeightManifest | DeltaManifest
MAX_KNOWN = 256
"""Largest number of manifests kept in memory; a store has a few dozen at most."""


def read_manifest(path: Path) -> AnyManifest:
    """Read a manifest of a full version or a delta, distinguished by its name. Raises WeightError."""
    kind = DeltaManifest if path.name.endswith(DELTA_MANIFEST_SUFFIX) else WeightManifest
    try:
        return decode_manifest(path.read_bytes(), is_delta=kind is DeltaManifest)
    except OSError as error:
        raise WeightsDamaged(f"no manifest {path}: {error.strerror}") from error


def decode_manifest(data: bytes, *, is_delta: bool) -> AnyManifest:
    """Parse a manifest from JSON. Raises WeightError."""
    try:
        if is_delta:
            return msgspec.json.decode(data, type=DeltaManifest)
        return msgspec.json.decode(data, type=WeightManifest)
    except (msgspec.MsgspecError, ValueError) as error:
        raise WeightsDamaged(f"damaged manifest: {error}") from error


def delta_name(version: int, lineage: str) -> str:
    """File name of a delta's manifest."""
    return f"v{version:08d}-{lineage}{DELTA_MANIFEST_SUFFIX}"


class Catalog:
    """The manifests in one store's folder. Files may be added and removed at any time, but the content of a name never
    changes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, AnyManifest] = {}

    def route(self, version: int, lineage: str, base: Base | None) -> list[tuple[Path, AnyManifest]]:
        """Manifests that lead from `base` (or from nothing) to `version`, in order. Raises WeightError if there is
        none."""
        found: dict[int, tuple[Path, AnyManifest]] = {}
        offers: dict[int, Offer] = {}
        at: int | None = version
        while at is not None:
            entry = self._find(at, lineage)
            if entry is None:
                break
            found[at], manifest = entry, entry[1]
            if isinstance(manifest, WeightManifest):
                offers[at], at = Offer(manifest.num_bytes), None
            else:
                offers[at] = Offer(manifest.num_bytes, manifest.base_version, manifest.base_digest)
                at = manifest.base_version
        return [found[step] for step in route(offers, version, base)]

    def _find(self, version: int, lineage: str) -> tuple[Path, AnyManifest] | None:
        """The delta that leads to a version if there is one, else its full manifest."""
        for name in (delta_name(version, lineage), manifest_name(version, lineage)):
            path = self._root / name
            if not path.exists():
                self._known.pop(name, None)
                continue
            if name not in self._known:
                while len(self._known) >= MAX_KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[name] = read_manifest(path)
            return path, self._known[name]
        return None
