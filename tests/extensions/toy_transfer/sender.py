"""The trainer's half: a TCP server that answers a file's name with its bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from toy_transfer.descriptor import SCHEME

from areal_like.config import ProcessSpec
from areal_like.transport.sockets import own_host
from trainer.config import TrainerSettings


class ToySender:
    def __init__(self, root: Path, host: str, block_bytes: int) -> None:
        self._root, self._host, self._block_bytes = root, host, block_bytes
        self._num_sent = 0

    @property
    def counters(self) -> Mapping[str, float]:
        return {"toy_files": float(self._num_sent)}

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self._host, 0)

    async def run(self) -> None:
        await self._server.serve_forever()

    async def publish(self, manifest_path: Path, version: int, lineage: str) -> str:
        port = self._server.sockets[0].getsockname()[1]
        return f"{SCHEME}{self._host}:{port}/{manifest_path.name}"

    def rewritten(self, version: int, lineage: str) -> None:
        """Files are read again for every worker."""

    async def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = (await reader.readline()).decode().strip()
        path = self._root / Path(name).name
        data = path.read_bytes() if path.exists() else b""
        for start in range(0, len(data), self._block_bytes):
            writer.write(data[start : start + self._block_bytes])
            await writer.drain()
        self._num_sent += 1
        writer.close()


def make_sender(spec: ProcessSpec, settings: TrainerSettings) -> ToySender:
    return ToySender(
        Path(spec.weight_dir), own_host(spec.hub_address), settings.weights.options.get("block_bytes", 1 << 16)
    )
