"""The part of an answer that a server has sent so far: tokens, log-probs, and the version that sampled each token.

How versions become certain: the last event of an answer contains spans of output positions with the name of the weights
that sampled them, which is authoritative. Every earlier event contains the name of the weights in use when the server's
front process passed it on (SGLang), or those that the client loaded last (vLLM, whose events have no name). Outputs and
the reply to a weight update reach the front through two sockets, so a token of the old weights may arrive after the
reply and have the new name: the name is the token's own version or a newer one, never an older one. An attempt begins
with a loaded version, so its tokens are of that version or newer. If both bounds are equal, the version is certain, and
the token is visible. From the time at which other weights are sent to the server (`weights_change`), or another name is
received, all later tokens of the attempt are hidden until the spans arrive. Tokens that are not confirmed when the
attempt breaks off are dropped, counted, and sampled again.

The boundary between spans is exact in vLLM. In SGLang it is without the overlapped scheduler, and in `retract` with it.
With the overlapped scheduler and a pause in place it is one token early for requests in the running batch and exact for
others, which cannot be distinguished afterwards, so this combination is never used (sglang/arguments.py).

Shape legend: R tokens of the answer, N tokens new in one event.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from areal_like.errors import EngineError
from areal_like.trajectory import NO_VERSION, Segment

FIRST_ROOM = 256


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
    """The part of `meta_info` that is used."""

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
    """One event of a stream, in SGLang's form. `output_ids` are the new ones if the server streams increments, else all
    so far."""

    output_ids: tuple[int, ...] = ()
    meta_info: MetaInfo = MetaInfo()
    error: msgspec.Raw | None = None


_decoder = msgspec.json.Decoder(StreamEvent)


def parse_event(data: bytes) -> StreamEvent:
    """Parse one `data:` line of the stream, without the prefix. Raises EngineError for an invalid event."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the server sent an invalid event ({error}): {data[:200]!r}") from error


def version_number(name: str) -> int:
    """The version in a server's name of its weights. Raises EngineError if the name is not one of ours."""
    try:
        return int(name)
    except ValueError:
        raise EngineError(
            f"the server generates with the weights `{name}`, which were not loaded by this engine"
        ) from None


class GrowingAnswer:
    """New tokens of one request, over several attempts."""

    def __init__(self) -> None:
        self._tokens = np.zeros(FIRST_ROOM, np.int32)
        self._logprobs = np.zeros(FIRST_ROOM, np.float32)
        self._versions = np.zeros(FIRST_ROOM, np.int32)
        self._count = 0
        self._hidden = 0
        self._attempt_start = 0
        self._attempt_version = self._newest_name = NO_VERSION
        self._is_certain = True

    def __len__(self) -> int:
        return self._count

    @property
    def segment(self) -> Segment:
        """All new tokens whose version is certain; a view that later growth does not change."""
        end = self._count
        return Segment(self._tokens[:end], self._logprobs[:end], self._versions[:end])

    @property
    def last_version(self) -> int:
        """Version of the newest token; -1 before the first."""
        return int(self._versions[self._count - 1]) if self._count else NO_VERSION

    @property
    def newest_version(self) -> int:
        """The highest version that any token may have, including hidden ones; -1 before the first."""
        return self._newest_name if self._hidden else self.last_version

    @property
    def last_token(self) -> int:
        """The newest token; -1 before the first."""
        return int(self._tokens[self._count - 1]) if self._count else -1

    @property
    def is_attempt_empty(self) -> bool:
        """Whether the current attempt has no token yet."""
        return self._count + self._hidden == self._attempt_start

    def begin_attempt(self, version: int) -> None:
        """A new request continues the answer; positions of its events count from here.

        `version`: the version that the server has loaded when the attempt begins. All of its tokens are of this version
        or newer.
        """
        assert not self._hidden, "tokens of the previous attempt were neither confirmed nor dropped"
        self._attempt_start, self._attempt_version, self._newest_name = self._count, version, version
        self._is_certain = True

    def weights_change(self) -> None:
        """Record that other weights will be sent to the server: from now on only the spans can confirm a version."""
        self._is_certain = False

    def drop_hidden(self) -> int:
        """Drop the tokens whose version was not confirmed, at the end of an attempt; returns their number."""
        num_dropped, self._hidden = self._hidden, 0
        return num_dropped

    def cut(self, length: int) -> int:
        """Forget the tokens after the first `length`, which are shown, and no event follows; how many they were."""
        num_dropped = self._count + self._hidden - length
        self._count, self._hidden = length, 0
        return num_dropped

    def take(self, event: StreamEvent, *, is_incremental: bool) -> int:
        """Append the tokens of an event and return their number.

        Raises EngineError if ids, log-probs and versions do not match.
        """
        meta, held = event.meta_info, self._count + self._hidden
        done = held - self._attempt_start
        count = meta.completion_tokens - done  # the last event of a request aborted in the queue repeats a token
        start = 0 if is_incremental else done
        ids = event.output_ids[start : start + max(count, 0)]
        logprobs = meta.output_token_logprobs[start : start + max(count, 0)]
        if len(ids) != count or len(logprobs) != count:
            raise EngineError(
                f"after {done} tokens, the server reports a total of {meta.completion_tokens} tokens, but sent "
                f"{len(event.output_ids)} tokens with {len(meta.output_token_logprobs)} log-probs"
            )
        if [entry[1] for entry in logprobs] != list(ids):
            raise EngineError("the token ids in the server's log-probs differ from the token ids that the server sent")
        if count:
            self._append(ids, [-np.inf if entry[0] is None else min(entry[0], 0.0) for entry in logprobs])
            self._stamp(meta, count)
        if meta.weight_versions:
            self._settle(meta)
        return count

    def _append(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        start = self._count + self._hidden
        self._grow(start + len(ids))
        self._tokens[start : start + len(ids)] = ids
        self._logprobs[start : start + len(ids)] = logprobs
        self._hidden += len(ids)

    def _stamp(self, meta: MetaInfo, count: int) -> None:
        """Make the newest `count` tokens visible if the version that sampled them is certain."""
        name = version_number(meta.weight_version)
        self._newest_name = max(self._newest_name, name)
        self._is_certain &= name == self._attempt_version
        if self._is_certain:
            self._versions[self._count : self._count + count] = name
            self._count, self._hidden = self._count + count, 0

    def _settle(self, meta: MetaInfo) -> None:
        """Set the versions of the whole attempt from the server's spans, and make it visible. Raises EngineError if
        they contradict a visible version: another client has changed the server's weights.
        """
        start, end = self._attempt_start, self._count + self._hidden
        versions = versions_of(meta, 0, end - start)
        if (versions[: self._count - start] != self._versions[start : self._count]).any():
            raise EngineError(
                f"the server reports versions {meta.weight_versions} for tokens that were sampled by version "
                f"{self._attempt_version}, so another client is changing its weights"
            )
        self._versions[start:end] = versions
        self._count, self._hidden = end, 0

    def _grow(self, needed: int) -> None:
        if needed <= len(self._tokens):
            return
        room = max(needed, 2 * len(self._tokens))
        used = self._count + self._hidden
        for name in ("_tokens", "_logprobs", "_versions"):
            old = getattr(self, name)
            grown = np.zeros(room, old.dtype)
            grown[:used] = old[:used]
            setattr(self, name, grown)


def versions_of(meta: MetaInfo, start: int, end: int) -> np.ndarray:
    """Version of output positions `start` to `end` [N], int32. Raises EngineError if the spans omit one."""
    versions_N = np.full(end - start, NO_VERSION, np.int32)
    for span in meta.weight_versions:
        low, high = max(span.start, start), min(span.end, end)
        if low < high:
            versions_N[low - start : high - start] = version_number(span.version)
    if (versions_N < 0).any():
        raise EngineError(
            f"the server reported no weight version for some of the tokens {start} to {end}: {meta.weight_versions}"
        )
    return versions_N
