"""The receiver of all built-in transfers: from an announced location to a complete, verified version on this host.

It selects the transfer by the location (a manifest's path, deltas in a folder, a stream, a process group), enforces its
deadline, and keeps the base of deltas. versions.py decides when a version is swapped in.

`meet` returns a call to the process group, which the engine itself joins; workers without a call use the stream. Folder
and hub are opened for the first version that needs them: a worker that receives only paths has neither.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from areal_like.config import ProcessSpec
from areal_like.errors import UserError, WeightError, WeightsDamaged
from areal_like.transport.sockets import own_host
from areal_like.weights.catalog import AnyManifest, Catalog, decode_manifest, read_manifest
from areal_like.weights.delta import DELTA_MANIFEST_SUFFIX, DeltaManifest
from areal_like.weights.process_group import GroupCall, JoinRequest
from areal_like.weights.stream import Locator
from areal_like.weights.weight_store import WeightManifest, map_payload
from rollout.weights.chunks import ChunkFile
from rollout.weights.fetching import Fetcher
from rollout.weights.local_versions import DeltaPart, Held, LocalVersions, local_roots
from rollout.weights.port import JoinAs, MakeWire
from rollout.weights.relay import Relay

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class VersionReceiver:
    """Receives new versions for one worker. Used from one loop; `receive` is called for one version at a time."""

    def __init__(self, roots: Sequence[Path], *, make_wire: MakeWire, make_relay: Callable[[], Relay]) -> None:
        """`roots`: possible folders for assembled versions, best first. Nothing is opened yet."""
        self._local, self._make_wire, self._make_relay = LocalVersions(roots), make_wire, make_relay
        self._relay: Relay | None = None
        self._fetcher: Fetcher | None = None
        self._serving = asyncio.Event()
        self._files_thread = ThreadPoolExecutor(1, "versions")
        """One thread, so that work interrupted by a deadline ends before the next version is assembled."""
        self._ways: deque[frozenset[str]] = deque(maxlen=2)
        """Payloads of the newest version and of the previous one, which are served to others."""
        self._newest = ("", Path())
        """The last location, and the path of the version received from it."""
        self._counts = {"received_full": 0.0, "received_by_delta": 0.0, "received_bytes": 0.0}

    async def receive(self, place: str, deadline_s: float) -> Path:
        """See Receiver. `place`: path of a full manifest, of a delta's manifest, or a stream's locator."""
        locator = Locator.parse(place)
        if locator is None and not place.endswith(DELTA_MANIFEST_SUFFIX):
            return Path(place)
        known, path = self._newest
        if place == known and path.exists():  # announced again
            return path
        try:
            async with asyncio.timeout(deadline_s):
                if locator is None:
                    path = await self._on_files(self._from_folder, Path(place))
                else:
                    path = await self._from_stream(locator)
                self._newest = (place, path)
                return path
        except TimeoutError:
            raise WeightError(f"the weights at {place} did not arrive within {deadline_s:g} s") from None
        except UserError as error:
            raise WeightError(str(error)) from error

    async def meet(self, place: str, deadline_s: float, who: JoinAs) -> GroupCall | None:
        """See Receiver. The trainer replies when it has gathered the other members."""
        locator = Locator.parse(place)
        if locator is None or not locator.by_group or not who.num_ranks:
            return None
        request = JoinRequest(
            version=locator.version, lineage=locator.lineage, num_ranks=who.num_ranks, device=who.device
        )
        try:
            async with asyncio.timeout(deadline_s):
                fetcher = await self._start_stream()
                reply = await fetcher.join(locator.address, request)
        except (TimeoutError, UserError) as error:
            why = str(error) or f"no reply within {deadline_s:g} s"
            log.warning("cannot join the process group of version %d: %s", locator.version, why)
            return None
        if isinstance(reply, GroupCall):
            return reply
        log.info(
            "version %d is transferred as a stream, not through a process group: %s", locator.version, reply.reason
        )
        return None

    async def run(self) -> None:
        """Serve received payloads to other workers. Waits for the first stream, woken by `receive`."""
        await self._serving.wait()
        assert self._relay is not None
        await self._relay.run()

    def forget(self) -> None:
        """Discard the base, because the engine refused a version: the next version must be complete."""
        self._newest = ("", Path())
        self._local.forget()

    def counters(self) -> dict[str, float]:
        """Number of versions by transfer, bytes and chunks received and sent, damaged chunks, parents lost."""
        fetched = self._fetcher.counters if self._fetcher is not None else {}
        relayed = self._relay.counters if self._relay is not None else {}
        return {f"weights_{name}": value for name, value in {**self._counts, **fetched, **relayed}.items()}

    async def close(self) -> None:
        """Close the connections to trainer and children, and remove the folder."""
        if self._fetcher is not None:
            await self._fetcher.close()
        if self._relay is not None:
            await self._relay.close()
        await self._on_files(self._local.close)
        self._files_thread.shutdown(wait=False)

    async def _on_files(self, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._files_thread, work, *args)

    # ------------------------------------------------------------ deltas in a folder

    def _from_folder(self, path: Path) -> Path:
        newest = read_manifest(path)
        assert isinstance(newest, DeltaManifest), "distinguished by its name"
        self._local.open(newest.result.num_bytes)
        way = Catalog(path.parent).route(newest.result.version, newest.result.lineage, self._local.base)
        full: Held | None = None
        deltas: list[DeltaPart] = []
        for place, manifest in way:
            payload = map_payload(place.with_name(manifest.payload), manifest.num_bytes)
            self._counts["received_bytes"] += len(payload)
            if isinstance(manifest, DeltaManifest):
                deltas.append(DeltaPart(manifest, payload))
            else:
                full = Held(manifest, payload)
        return self._build(full, deltas, None)

    def _build(self, full: Held | None, deltas: list[DeltaPart], received: Path | None) -> Path:
        path = self._local.build(full, deltas, received)
        self._counts["received_full" if full is not None else "received_by_delta"] += 1
        return path

    # ------------------------------------------------------------ a stream

    async def _from_stream(self, locator: Locator) -> Path:
        fetcher = await self._start_stream()
        files: list[tuple[AnyManifest, ChunkFile]] = []
        relay = self._relay
        assert relay is not None
        try:
            payloads = await fetcher.way(locator, self._local.base)
            self._ways.append(frozenset(payload.name for payload in payloads))
            relay.keep_only(frozenset().union(*self._ways))
            manifests = [decode_manifest(payload.manifest, is_delta=payload.is_delta) for payload in payloads]
            await self._on_files(self._local.open, _version_bytes(manifests))
            for payload, manifest in zip(payloads, manifests, strict=True):
                if manifest.num_bytes != payload.num_bytes:
                    raise WeightsDamaged(
                        f"payload {payload.name} has {payload.num_bytes} bytes, but according to its manifest it has "
                        f"{manifest.num_bytes}"
                    )
                file = await self._on_files(ChunkFile, self._local.part(payload.name), payload)
                relay.offer(file)
                files.append((manifest, file))
            for _, file in files:
                await fetcher.fetch(locator, file)
            return await self._on_files(self._assemble, files)
        except BaseException as error:
            for _, file in files:
                if not file.is_complete or isinstance(error, WeightsDamaged):
                    relay.withdraw(file.payload.name, "fetching this payload failed")
                file.path.unlink(missing_ok=True)
            raise

    def _assemble(self, files: list[tuple[AnyManifest, ChunkFile]]) -> Path:
        full: Held | None = None
        received: Path | None = None
        deltas: list[DeltaPart] = []
        for manifest, file in files:
            self._counts["received_bytes"] += manifest.num_bytes
            if isinstance(manifest, WeightManifest):
                full, received = Held(manifest, file.data), file.path
            else:
                deltas.append(DeltaPart(manifest, file.data))
        return self._build(full, deltas, received)

    async def _start_stream(self) -> Fetcher:
        if self._fetcher is None:
            relay = self._make_relay()
            await relay.start()
            self._relay = relay
            self._fetcher = Fetcher(self._make_wire, relay.address, relay.arrived)
            self._serving.set()
        return self._fetcher


def make_receiver(spec: ProcessSpec, make_wire: MakeWire) -> VersionReceiver:
    """The receiver of one worker process; it opens its sockets when the first version is streamed."""
    return VersionReceiver(
        local_roots(spec.run_id, spec.name),
        make_wire=make_wire,
        make_relay=lambda: Relay(
            run_id=spec.run_id, bind=f"tcp://{own_host(spec.hub_address)}:*", curve_dir=Path(spec.curve_dir)
        ),
    )


def _version_bytes(manifests: list[AnyManifest]) -> int:
    """Size of a whole version, from the manifests that lead to it."""
    return max((one.result if isinstance(one, DeltaManifest) else one).num_bytes for one in manifests)
