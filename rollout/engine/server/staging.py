"""Stages a published version: writes it to a folder that a server can load, while generation continues.

The folder has the weights in one safetensors file, and links to all other files of the model's folder. The swap is in
engine.py.

Payloads that are safetensors already (`kind: disk`) are linked, others are written once, in the same file system
(shared memory stays shared memory). Names are those of checkpoints
(checkpoint_names.py); a server fuses tensors itself when it loads.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from areal_like.errors import WeightError
from areal_like.weights.weight_store import WeightManifest
from rollout.engine.loading import open_verified
from rollout.engine.server.checkpoint_names import as_checkpoint

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
WEIGHT_FILE = "model.safetensors"


Summing = Callable[[Mapping[str, Tensor]], dict[str, str]]
"""Function that computes the checksums that the server must report, from a version's tensors."""


@dataclass(frozen=True)
class StagedVersion:
    """A version whose folder is ready. `num_bytes`: size of the weights. `shapes`: of the published tensors, by their
    names in a checkpoint. `checksums`: expected checksums of the server's tensors with this version; None: they are not
    verified.
    """

    version: int
    folder: Path
    num_bytes: int
    shapes: Mapping[str, tuple[int, ...]]
    checksums: Mapping[str, str] | None = None


class Stager:
    """Creates and removes the folders of one engine. Methods block on file I/O: call them from one thread."""

    def __init__(self, model_dir: Path, name: str, summing: Summing | None = None) -> None:
        """`name` distinguishes the engines of one store. `summing`: computes the checksums of each version."""
        self._model_dir, self._name, self._summing = model_dir, name, summing
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._count = 0

    def stage(self, manifest_path: Path) -> StagedVersion:
        """Verify a payload and write its folder. Raises WeightError: damaged, not finite, of another model, or not
        enough space."""
        manifest, tensors = open_verified(manifest_path)
        parent, payload = manifest_path.parent / f"staged-{self._name}", manifest_path.parent / manifest.payload
        return self.lay_out(manifest, tensors, parent, payload if manifest.kind == "disk" else None)

    def lay_out(
        self, manifest: WeightManifest, tensors: Mapping[str, Tensor], parent: Path, safetensors: Path | None = None
    ) -> StagedVersion:
        """Write a folder below `parent` for verified tensors; `safetensors`: an existing file with them.

        Raises WeightError: not finite, of another model, or not enough space."""
        self._check(manifest, tensors)
        self._count += 1
        folder = parent / f"{manifest.version}-{self._count}"
        try:
            folder.mkdir(parents=True)
            for source in sorted(self._model_dir.iterdir()):
                if source.is_file() and not source.name.endswith(WEIGHT_SUFFIXES):
                    (folder / source.name).symlink_to(source.resolve())
            weights, named = folder / WEIGHT_FILE, as_checkpoint(tensors)
            if safetensors is not None and named.keys() == tensors.keys():
                os.link(safetensors, weights)
            else:
                save_file(named, weights, metadata={"format": "pt"})
        except Exception as error:  # safetensors has errors of its own for a full disk
            shutil.rmtree(folder, ignore_errors=True)
            raise WeightError(f"version {manifest.version} cannot be staged in {folder}: {error}") from error
        checksums = self._summing(tensors) if self._summing else None
        shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        return StagedVersion(manifest.version, folder, manifest.num_bytes, shapes, checksums)

    def _check(self, manifest: WeightManifest, tensors: Mapping[str, Tensor]) -> None:
        """Check the tensors here: the server would detect the same errors, but only after replacing some of its
        weights."""
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor.sum(dtype=torch.float32))) and not bool(torch.isfinite(tensor).all()):
                raise WeightError(f"version {manifest.version}: {name} contains a value that is not finite")
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if self._shapes is None:
            self._shapes = shapes
        for name in [*self._shapes, *shapes]:
            if shapes.get(name) != self._shapes.get(name):
                raise WeightError(
                    f"version {manifest.version}: {name} has shape {shapes.get(name)}, previously "
                    f"{self._shapes.get(name)}"
                )

    @staticmethod
    def drop(staged: StagedVersion) -> None:
        """Remove a folder that will not be loaded again."""
        shutil.rmtree(staged.folder, ignore_errors=True)
