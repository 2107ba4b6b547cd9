"""Completes versions that contain only an adapter (LoRA), on the worker's host: base + scale B A, tensor by tensor.

It reads the base from the model's folder, and checks that it is the trainer's. How the adapter arrives is decided by
the inner receiver.

Engines get the manifest of a complete version as always. So adapters work with every engine, and only A and B are sent
between hosts. The base is not copied: its files are read again for each version, from the system's cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_like.errors import UserError, WeightError
from areal_like.weights.adapter import AdapterInfo, AdapterPayload, part_names
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.process_group import GroupCall
from areal_like.weights.weight_store import WeightStore, describe, open_payload
from rollout.engine.loading import DTYPES, open_verified
from rollout.weights.local_versions import KEEP, LocalVersions
from rollout.weights.port import JoinAs, Receiver


class MergingReceiver:
    """A receiver (port.py) that wraps another one. model_dir: the folder of the base. roots: possible folders of
    complete versions."""

    def __init__(self, receiver: Receiver, model_dir: Path, roots: Sequence[Path]) -> None:
        self._receiver, self._model_dir = receiver, model_dir
        self._local = LocalVersions(roots)
        self._store: WeightStore | None = None
        self._checked = ""
        """Digest of the base that has already been compared."""
        self._num_merged = 0
        self._thread = ThreadPoolExecutor(1, "merging")
        self.run, self.forget = receiver.run, receiver.forget

    async def receive(self, place: str, deadline_s: float) -> Path:
        """See Receiver. Raises UserError if the local base is not the trainer's."""
        path = await self._receiver.receive(place, deadline_s)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._whole, path)

    async def meet(self, place: str, deadline_s: float, who: JoinAs) -> GroupCall | None:
        """See Receiver. Adapters are never sent through a group."""
        return None

    def counters(self) -> dict[str, float]:
        """Monotonic."""
        return {**self._receiver.counters(), "weights_merged": float(self._num_merged)}

    async def close(self) -> None:
        """See Receiver."""
        await self._receiver.close()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._local.close)
        self._thread.shutdown(wait=False)

    def _whole(self, path: Path) -> Path:
        """The manifest of the complete version; `path` itself if it is complete already."""
        note = open_payload(path)[0].adapter
        if note is None or note.lone is None:
            return path
        manifest, adapter = open_verified(path)
        with torch.inference_mode():
            tensors = {name: _bytes_of(tensor) for name, tensor in self._merged(note, note.lone, adapter)}
        if self._store is None:
            self._local.open(sum(tensor.data.nbytes for tensor in tensors.values()))
            self._store = WeightStore(self._local.root, "disk", KEEP)
        plain = AdapterInfo(base_digest=note.base_digest, adapter_digest=note.adapter_digest)
        self._num_merged += 1
        return self._store.publish(manifest.version, manifest.lineage, tensors, plain)

    def _merged(
        self, note: AdapterInfo, lone: AdapterPayload, adapter: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        dtype, left = DTYPES[lone.dtype], dict(adapter)
        is_checked = self._checked == note.base_digest
        for name, weight in _read(self._model_dir, lone.base):
            if not is_checked:
                self._check(name, weight.to(dtype), lone.base[name])
            lora_A, lora_B = (left.pop(one, None) for one in part_names(name))
            if lora_A is not None and lora_B is not None:
                weight = weight.float() + (lora_B @ lora_A) * lone.scale
            yield name, weight.to(dtype)
        if left:
            raise WeightError(
                f"the adapter has {len(left)} tensors for which the base model has no module; the first is {min(left)}"
            )
        self._checked = note.base_digest

    def _check(self, name: str, weight: Tensor, crc32: int) -> None:
        if describe("disk", 0, "base", {name: _bytes_of(weight)}).tensors[0].crc32 != crc32:
            raise _another_base(self._model_dir, f"{name} differs")


def _read(folder: Path, names: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors with these names, one at a time. Raises UserError if the folder lacks one."""
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(str(file), framework="pt")) for file in folder.glob("*.safetensors")]
        except (OSError, SafetensorError) as error:
            raise _another_base(folder, str(error)) from error
        holder = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for name in names:
            if name not in holder:
                raise _another_base(folder, f"the files do not contain {name}")
            yield name, holder[name].get_tensor(name)


def _another_base(folder: Path, why: str) -> UserError:
    return UserError(
        f"the model in {folder} is not the base model of the run's adapter ({why})",
        where="trainer.lora.publish",
        remedy="use the same model folder on every machine, or set publish: merged",
    )


def _bytes_of(tensor: Tensor) -> TensorBytes:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return TensorBytes(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().data)
