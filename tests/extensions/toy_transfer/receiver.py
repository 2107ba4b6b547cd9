"""The worker's half: fetches manifest and payload into a folder of its own, and checks them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from areal_like.config import ProcessSpec
from areal_like.errors import WeightsDamaged
from areal_like.weights.catalog import read_manifest
from areal_like.weights.process_group import GroupCall
from areal_like.weights.weight_store import open_payload, verify
from rollout.weights.port import JoinAs, MakeWire


class ToyReceiver:
    def __init__(self) -> None:
        self._folder: Path | None = None
        self._num_received = 0

    async def receive(self, place: str, deadline_s: float) -> Path:
        url = urlsplit(place)
        folder = Path(tempfile.mkdtemp(prefix="toy-"))
        manifest_path = folder / url.path.removeprefix("/")
        try:
            async with asyncio.timeout(deadline_s):
                manifest_path.write_bytes(await _fetch(url.hostname, url.port, manifest_path.name))
                payload = read_manifest(manifest_path).payload
                (folder / payload).write_bytes(await _fetch(url.hostname, url.port, payload))
        except (OSError, TimeoutError) as error:
            raise WeightsDamaged(f"{place} did not arrive: {error}") from error
        await asyncio.to_thread(lambda: verify(*open_payload(manifest_path)))
        if self._folder is not None:
            shutil.rmtree(self._folder)
        self._folder, self._num_received = folder, self._num_received + 1
        return manifest_path

    async def meet(self, place: str, deadline_s: float, who: JoinAs) -> GroupCall | None:
        return None

    async def run(self) -> None:
        await asyncio.Event().wait()

    def forget(self) -> None:
        """Nothing is reused."""

    def counters(self) -> dict[str, float]:
        return {"toy_received": float(self._num_received)}

    async def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


async def _fetch(host: str | None, port: int | None, name: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(name.encode() + b"\n")
    data = await reader.read()
    writer.close()
    return data


def make_receiver(spec: ProcessSpec, make_wire: MakeWire) -> ToyReceiver:
    return ToyReceiver()
