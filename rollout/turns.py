"""The durable part of an episode of several turns: its last checkpoint, in this lease and in those before.

Owns: `Turns`. Refuses: generating, reporting (leases.py), what a workflow's state means.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from areal_like.errors import UserError
from areal_like.trajectory import Segment
from areal_like.turn_checkpoint import MAX_STATE_BYTES, TurnCheckpoint
from areal_like.wire.messages import SampleTask
from rollout.transcript import Encode, Transcript
from rollout.workflow import Resumed, StateTooLarge


class Turns:
    """Checkpoints of one sample."""

    def __init__(self, task: SampleTask, *, is_resumable: bool) -> None:
        self._is_resumable = is_resumable
        checkpoint = task.checkpoint if not is_resumable else None
        self._began = (task.prefix if checkpoint is not None else Segment.empty(), checkpoint)
        self._newest = self._began
        """Sampled tokens, and the checkpoint that holds for them."""
        self._taken: tuple[Transcript, bytes, int] | None = None
        """Newer than that: put together when it is asked for, which is once a report and not once a turn."""
        self._transcript: Transcript | None = None
        """The workflow's own, at its last checkpoint."""

    @property
    def checkpoint(self) -> TurnCheckpoint | None:
        """The newest one."""
        return self._put_together()[1]

    @property
    def num_before(self) -> int:
        """Sampled tokens that came with the lease."""
        return len(self._began[0])

    @property
    def num_turns(self) -> int:
        """Generations before the lease."""
        return self._began[1].num_turns if self._began[1] is not None else 0

    @property
    def last_version(self) -> int:
        """Of the newest token that came with the lease; -1 without one."""
        return self._began[0].last_version

    @property
    def new_tokens(self) -> Segment:
        """Sampled tokens of this lease, up to the newest checkpoint."""
        return self._put_together()[0].tail(self.num_before)

    def _put_together(self) -> tuple[Segment, TurnCheckpoint | None]:
        if self._taken is not None:
            transcript, state, num_turns = self._taken
            self._newest = (transcript.sampled_tokens, transcript.checkpoint(num_turns, state))
            self._taken = None
        return self._newest

    def resumed(self, encode: Encode) -> Resumed | None:
        """Where the lease begins, if it does not begin with the sample. A transcript of its own at every look."""
        sampled, checkpoint = self._began
        if checkpoint is None:
            return None
        try:
            transcript = Transcript.restored(sampled, checkpoint, encode=encode)
            return Resumed(transcript=transcript, state=msgspec.msgpack.decode(checkpoint.state))
        except (ValueError, msgspec.DecodeError) as error:
            raise UserError(f"a checkpoint that cannot be read ({error})") from error

    def take(self, transcript: Transcript, state: Any, num_turns: int) -> None:
        """See `SampleTools.checkpoint`."""
        if self._is_resumable:
            raise UserError("a resumable workflow takes no checkpoints", remedy="set is_resumable = False on it")
        if transcript is not self._transcript:  # the same one only grows
            known = self._put_together()[0].tokens_R
            if not np.array_equal(transcript.sampled_tokens.tokens_R[: len(known)], known):
                raise UserError(
                    "a checkpoint must go on from the one before", remedy="begin with the transcript of tools.resumed"
                )
        try:
            encoded = msgspec.msgpack.encode(state)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise StateTooLarge(f"the state of a checkpoint must be a JSON-like value ({error})") from error
        if len(encoded) > MAX_STATE_BYTES:
            raise StateTooLarge(
                f"the state of a checkpoint has {len(encoded)} bytes, at most {MAX_STATE_BYTES} are kept"
            )
        self._taken, self._transcript = (transcript.copied(), encoded, num_turns), transcript
