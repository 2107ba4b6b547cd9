"""The durable part of an episode of several turns: its last checkpoint, in this lease and in earlier ones.

Reports are in leases.py. The workflow defines the meaning of its state.
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
        """Sampled tokens, and the checkpoint that is valid for them."""
        self._taken: tuple[Transcript, bytes, int] | None = None
        """The newest state, which is converted to a checkpoint on request: once per report and not once per turn."""
        self._transcript: Transcript | None = None
        """The workflow's state at its last checkpoint."""

    @property
    def checkpoint(self) -> TurnCheckpoint | None:
        """The newest checkpoint."""
        return self._put_together()[1]

    @property
    def num_before(self) -> int:
        """Number of sampled tokens that came with the lease."""
        return len(self._began[0])

    @property
    def num_turns(self) -> int:
        """Number of generations before the lease."""
        return self._began[1].num_turns if self._began[1] is not None else 0

    @property
    def last_version(self) -> int:
        """Version of the newest token that came with the lease; -1 without one."""
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
        """State at the start of the lease, if the sample began in an earlier lease. Each call returns a new
        transcript.
        """
        sampled, checkpoint = self._began
        if checkpoint is None:
            return None
        try:
            transcript = Transcript.restored(sampled, checkpoint, encode=encode)
            return Resumed(transcript=transcript, state=msgspec.msgpack.decode(checkpoint.state))
        except (ValueError, msgspec.DecodeError) as error:
            raise UserError(f"the checkpoint cannot be read ({error})") from error

    def take(self, transcript: Transcript, state: Any, num_turns: int) -> None:
        """See `SampleTools.checkpoint`."""
        if self._is_resumable:
            raise UserError(
                "a workflow with is_resumable = True cannot save its own checkpoints",
                remedy="set is_resumable = False on the workflow",
            )
        if transcript is not self._transcript:  # the same transcript can only have grown
            known = self._put_together()[0].tokens_R
            if not np.array_equal(transcript.sampled_tokens.tokens_R[: len(known)], known):
                raise UserError(
                    "the transcript of a checkpoint must start with the tokens of the previous checkpoint",
                    remedy="start with the transcript in tools.resumed",
                )
        try:
            encoded = msgspec.msgpack.encode(state)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise StateTooLarge(f"the state of a checkpoint must be a JSON-like value ({error})") from error
        if len(encoded) > MAX_STATE_BYTES:
            raise StateTooLarge(
                f"the state of a checkpoint has {len(encoded)} bytes, but at most {MAX_STATE_BYTES} are allowed"
            )
        self._taken, self._transcript = (transcript.copied(), encoded, num_turns), transcript
