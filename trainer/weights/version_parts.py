"""This rank's part of the newest version, in the published dtype, from which rank 0 writes the version piece by piece.

`take` copies the part; training may then continue. Rank 0 reads all parts with `gathered`, when it writes the version
and when it has to write it again; the other ranks answer in `serve`, on a thread of their own. No rank holds more of a
version than its part and one piece. Files are written in version_writer.py.

A part is replaced only while nobody reads it: rank 0 takes its `turn` before it orders the others to copy the next
version, and holds it while it reads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch

from areal_like.errors import WeightError
from trainer.gathered import GatheredTensors, gathered
from trainer.host_copy import Copied, HostCopy, Part
from trainer.model.model import all_finite
from trainer.peer_errors import RankLost
from trainer.ranks import Ranks

_END = -1
_PREFIX = "weight/"


class VersionParts:
    """One part, of one version at a time. `take` on the compute thread of every rank; the rest on another thread."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype, *, bucket_bytes: int, timeout_s: float) -> None:
        """timeout_s: longest time in which another rank copies its part after rank 0 has."""
        self._ranks, self._dtype = ranks, dtype
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._copy = HostCopy()
        self._turn = threading.RLock()
        self._taken = threading.Condition()
        self._version = -1
        self._copied: Copied | None = None
        self._server: threading.Thread | None = None
        self._error: BaseException | None = None
        if ranks.size > 1 and not ranks.is_leader:
            self._server = threading.Thread(target=self._serve, name="versions", daemon=True)
            self._server.start()

    @property
    def version(self) -> int:
        """The version that `take` copied last; -1: none."""
        return self._version

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until nobody reads the parts; nobody does in the context."""
        with self._turn:
            yield

    def take(self, version: int, parts: Sequence[Part], names: Sequence[str]) -> str | None:
        """Copy this rank's weights among `parts`. Collective; rank 0 has its `turn`.

        names: of all weights, the same on every rank. Returns, on every rank, the name of the first one with a NaN or
        an infinity; None if there is none.
        """
        if self._error is not None:
            raise self._error
        own = [part._replace(key=part.key.removeprefix(_PREFIX)) for part in parts if part.key.startswith(_PREFIX)]
        with self._taken:
            self._copied = self._copy.take(own, self._dtype)
            self._version = version
            self._taken.notify_all()
        finite = dict.fromkeys(names, True)
        finite |= {part.key: all_finite(part.items) for part in own if part.items.is_cuda}
        if not all(part.items.is_cuda for part in own):  # what was cast is at hand
            finite |= {place.key: all_finite(place.items(self._copied.buffer_U)) for place in self._copied.places}
        flags = torch.tensor([finite[name] for name in names], dtype=torch.int32, device=self._ranks.device)
        is_finite = self._ranks.min(flags).tolist()
        return next((name for name, flag in zip(names, is_finite, strict=True) if not flag), None)

    def wait(self) -> None:
        """Wait until the copy is complete, and the memory that it was made from may be released."""
        if self._copied is not None:
            self._copied.wait()

    def fence(self) -> None:
        """See HostCopy.fence."""
        self._copy.fence()

    @contextlib.contextmanager
    def gathered(self, version: int) -> Iterator[GatheredTensors]:
        """Read all parts of `version` by tensor name, on rank 0. Raises WeightError if another one was taken since,
        RankLost."""
        with self._turn:
            if self._copied is None or self._version != version:
                raise WeightError(f"version {version} is no longer in memory, because a newer version has replaced it")
            channel = self._ranks.versions
            if channel is not None:
                channel.call(version)
            with gathered(self._copied, channel, self._bucket_bytes) as tensors:
                yield tensors

    def close(self) -> None:
        """End the threads of the other ranks. All ranks call this."""
        if self._ranks.is_leader and self._ranks.versions is not None:
            self._ranks.versions.call(_END)
        if self._server is not None:
            self._server.join(self._timeout_s)

    def _serve(self) -> None:
        """On other ranks: answer rank 0 until it ends. An error is raised by the next `take`."""
        channel = self._ranks.versions
        assert channel is not None
        try:
            while (version := channel.next_call()) != _END:
                channel.serve(self._await(version))
        except BaseException as error:  # raised on the compute thread, which learns of a lost rank by itself
            self._error = error

    def _await(self, version: int) -> Copied:
        """Return the copy of `version`, which the compute thread may not have made yet."""
        with self._taken:
            if not self._taken.wait_for(lambda: self._version == version, self._timeout_s):
                raise RankLost(f"rank 0 writes version {version}, but this rank has version {self._version}")
            assert self._copied is not None
            return self._copied
