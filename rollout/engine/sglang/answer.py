"""What a server has sent of one answer so far: tokens, log-probs, and the version that sampled each.

Owns: reading stream events, growing the arrays, which tokens' versions are certain. Refuses: sockets, retries.

How versions become certain. An answer's last event brings spans of output positions with the name of the weights they
were sampled with: those are the truth. Every earlier event names the weights in use when the server's front passed it
on. Outputs and the answer to a weight update reach the front through two sockets, so a token of the old weights may
pass after the update's answer and carry the new name: the name is the token's own version or a newer one, never an
older one. An attempt begins under a version that is loaded, so its tokens are of that version or newer. Where both
bounds are equal the version is proved, and the token is shown. From the moment other weights are sent to the server
(`weights_change`), or another name is seen, everything that follows in the attempt is held back until the spans come.
What was not confirmed when the attempt breaks off is dropped, counted, and sampled again.

The spans' own boundary is exact without the overlapped scheduler, and in `retract` with it. A pause in place with the
overlapped scheduler is one token early for requests in the batch under way and right for others, which no one can tell
apart afterwards, so that pair is never used (arguments.py).

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
        raise EngineError(f"the server sent an invalid event ({error}): {data[:200]!r}") from error


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
        """The highest version any token may have, hidden ones included; -1 before the first."""
        return self._newest_name if self._hidden else self.last_version

    @property
    def last_token(self) -> int:
        """The newest token; -1 before the first."""
        return int(self._tokens[self._count - 1]) if self._count else -1

    @property
    def is_attempt_empty(self) -> bool:
        """The attempt under way has brought no token yet."""
        return self._count + self._hidden == self._attempt_start

    def begin_attempt(self, version: int) -> None:
        """A new request continues the answer; positions of its events count from here.

        `version`: what the server has loaded as the attempt begins. All of its tokens are of this version or newer.
        """
        assert not self._hidden, "tokens of the attempt before were neither confirmed nor dropped"
        self._attempt_start, self._attempt_version, self._newest_name = self._count, version, version
        self._is_certain = True

    def weights_change(self) -> None:
        """Other weights are about to be sent to the server: from now on only the spans can confirm a version."""
        self._is_certain = False

    def drop_hidden(self) -> int:
        """Forget the tokens whose version was never confirmed, at the end of an attempt; how many they were."""
        num_dropped, self._hidden = self._hidden, 0
        return num_dropped

    def cut(self, length: int) -> int:
        """Forget the tokens after the first `length`, which are shown, and no event follows; how many they were."""
        num_dropped = self._count + self._hidden - length
        self._count, self._hidden = length, 0
        return num_dropped

    def take(self, event: StreamEvent, *, is_incremental: bool) -> int:
        """Append what the event adds; how many tokens that is.

        Raises EngineError where ids, log-probs and versions do not belong together.
        """
        meta, held = event.meta_info, self._count + self._hidden
        done = held - self._attempt_start
        count = meta.completion_tokens - done  # the last event of a request aborted in the queue repeats a token
        start = 0 if is_incremental else done
        ids = event.output_ids[start : start + max(count, 0)]
        logprobs = meta.output_token_logprobs[start : start + max(count, 0)]
        if len(ids) != count or len(logprobs) != count:
            raise EngineError(
                f"after {done} tokens the server says {meta.completion_tokens}, and sends {len(event.output_ids)} with "
                f"{len(meta.output_token_logprobs)} log-probs"
            )
        if [entry[1] for entry in logprobs] != list(ids):
            raise EngineError("the server's log-probs are of other tokens than it sent")
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
        """Show the newest `count` tokens if the version that sampled them is proved."""
        name = version_number(meta.weight_version)
        self._newest_name = max(self._newest_name, name)
        self._is_certain &= name == self._attempt_version
        if self._is_certain:
            self._versions[self._count : self._count + count] = name
            self._count, self._hidden = self._count + count, 0

    def _settle(self, meta: MetaInfo) -> None:
        """Stamp the whole attempt by the server's spans, and show it. Raises EngineError where they contradict a stamp
        that was shown: the server's weights were changed by someone else.
        """
        start, end = self._attempt_start, self._count + self._hidden
        versions = versions_of(meta, 0, end - start)
        if (versions[: self._count - start] != self._versions[start : self._count]).any():
            raise EngineError(
                f"the server says that versions {meta.weight_versions} sampled what it sent as version "
                f"{self._attempt_version}: another client changes its weights"
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
    """Version of output positions `start` to `end` [N], int32. Raises EngineError when spans leave one out."""
    versions_N = np.full(end - start, NO_VERSION, np.int32)
    for span in meta.weight_versions:
        low, high = max(span.start, start), min(span.end, end)
        if low < high:
            versions_N[low - start : high - start] = version_number(span.version)
    if (versions_N < 0).any():
        raise EngineError(f"the server's version spans {meta.weight_versions} leave out tokens {start} to {end}")
    return versions_N
