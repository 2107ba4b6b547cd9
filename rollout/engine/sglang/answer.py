"""What a server has told of one answer so far: tokens, log-probs, and the version that sampled each.

Owns: reading stream events, growing the arrays, the versions out of the server's spans. Refuses: sockets, retries.

SGLang stamps spans of output positions with the name of the weights in use when they were sampled
(`meta_info.weight_versions`). Where its boundary is exact: always without the overlapped scheduler, and in `retract`
with it; `pause in place` with the overlapped scheduler is one token early for requests in the batch under way and right
for others, which no one can tell apart afterwards, so that pair is never used (arguments.py).

Shape legend: R tokens of the answer, N tokens new in one event.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from areal_like.errors import EngineError
from areal_like.trajectory import Segment

FIRST_ROOM = 256
FinishType = Literal["stop", "length", "abort"]


class VersionSpan(msgspec.Struct, frozen=True):
    """Output positions `start` to `end` (not included) were sampled under `version`."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct, frozen=True):
    """Why the server ended the request."""

    type: str
    message: str = ""
    status_code: int | None = None


class MetaInfo(msgspec.Struct, frozen=True):
    """The part of `meta_info` that is read."""

    finish_reason: Finish | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    weight_version: str = ""
    weight_versions: tuple[VersionSpan, ...] = ()
    output_token_logprobs: tuple[tuple[float | None, int, str | None], ...] = ()
    routed_experts: str | None = None


class StreamEvent(msgspec.Struct, frozen=True):
    """One event of /generate. `output_ids` are new ones if the server streams increments, else all so far."""

    output_ids: tuple[int, ...] = ()
    meta_info: MetaInfo = MetaInfo()
    error: msgspec.Raw | None = None


_decoder = msgspec.json.Decoder(StreamEvent)


def parse_event(data: bytes) -> StreamEvent:
    """One `data:` line of the stream, without the prefix. Raises EngineError for anything unknown."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the server sent what is no event ({error}): {data[:200]!r}") from error


def version_number(name: str) -> int:
    """The version behind a server's name of its weights. Raises EngineError when it is none of ours."""
    try:
        return int(name)
    except ValueError:
        raise EngineError(f"the server samples with weights named `{name}`, which we did not load") from None


class GrowingAnswer:
    """New tokens of one request, over as many attempts as it takes."""

    def __init__(self) -> None:
        self._tokens = np.zeros(FIRST_ROOM, np.int32)
        self._logprobs = np.zeros(FIRST_ROOM, np.float32)
        self._versions = np.zeros(FIRST_ROOM, np.int32)
        self._count = 0
        self._attempt_start = 0

    def __len__(self) -> int:
        return self._count

    @property
    def segment(self) -> Segment:
        """All new tokens so far; a view that later growth does not change."""
        end = self._count
        return Segment(self._tokens[:end], self._logprobs[:end], self._versions[:end])

    @property
    def last_version(self) -> int:
        """Version of the newest token; -1 before the first."""
        return int(self._versions[self._count - 1]) if self._count else -1

    @property
    def last_token(self) -> int:
        """The newest token; -1 before the first."""
        return int(self._tokens[self._count - 1]) if self._count else -1

    @property
    def is_attempt_empty(self) -> bool:
        """The attempt under way has brought no token yet."""
        return self._count == self._attempt_start

    def begin_attempt(self) -> None:
        """A new request continues the answer; positions of its events count from here."""
        self._attempt_start = self._count

    def take(self, event: StreamEvent, *, is_incremental: bool) -> int:
        """Append what the event adds; how many tokens that is.

        Raises EngineError where ids, log-probs and versions do not belong together.
        """
        meta, done = event.meta_info, self._count - self._attempt_start
        ids, logprobs = event.output_ids, meta.output_token_logprobs
        if not is_incremental:
            ids, logprobs = ids[done:], logprobs[done:]
        if not ids:
            return 0
        if len(logprobs) != len(ids):
            raise EngineError(f"the server sent {len(ids)} tokens with {len(logprobs)} log-probs")
        count = len(ids)
        self._grow(self._count + count)
        here = slice(self._count, self._count + count)
        self._tokens[here] = ids
        self._logprobs[here] = [-np.inf if entry[0] is None else min(entry[0], 0.0) for entry in logprobs]
        if [entry[1] for entry in logprobs] != list(ids):
            raise EngineError("the server's log-probs are of other tokens than it sent")
        self._versions[here] = versions_of(meta, done, done + count)
        self._count += count
        return count

    def _grow(self, needed: int) -> None:
        if needed <= len(self._tokens):
            return
        room = max(needed, 2 * len(self._tokens))
        for name in ("_tokens", "_logprobs", "_versions"):
            old = getattr(self, name)
            grown = np.zeros(room, old.dtype)
            grown[: self._count] = old[: self._count]
            setattr(self, name, grown)


def versions_of(meta: MetaInfo, start: int, end: int) -> np.ndarray:
    """Version of output positions `start` to `end` [N], int32. Raises EngineError when spans leave one out."""
    versions_N = np.full(end - start, -1, np.int32)
    for span in meta.weight_versions:
        low, high = max(span.start, start), min(span.end, end)
        if low < high:
            versions_N[low - start : high - start] = version_number(span.version)
    if (versions_N < 0).any():
        raise EngineError(f"the server's version spans {meta.weight_versions} leave out tokens {start} to {end}")
    return versions_N
