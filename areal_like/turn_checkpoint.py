"""State that an episode of several turns needs, in addition to its sampled tokens, to continue after its last complete
turn.

A transcript is rebuilt from it in rollout/transcript.py.

Shape legend: G given tokens, A answers.
"""

from __future__ import annotations

import msgspec
import numpy as np

from areal_like.token_source import TokenSource
from areal_like.trajectory import check_answers

MAX_STATE_BYTES = 1 << 20
"""Largest encoded state of a workflow."""


class TurnCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a report of sampled tokens; it is valid for exactly the tokens up to the report's end.

    given_places_G: int32, the number of sampled tokens of the episode before each given one; given_tokens_G: int32 ids.
    num_turns: number of generations so far. state: a value that the workflow defines, as msgpack. sources,
    answer_ends_A, answer_ids_A: as in Trajectory.
    """

    given_places_G: np.ndarray
    given_tokens_G: np.ndarray
    num_turns: int
    state: bytes
    sources: tuple[TokenSource, ...] = ()
    answer_ends_A: np.ndarray | None = None
    answer_ids_A: np.ndarray | None = None

    def __post_init__(self) -> None:
        arrays = (self.given_places_G, self.given_tokens_G)
        if not all(isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == np.int32 for array in arrays):
            raise ValueError("given tokens and their positions must be one-dimensional int32 arrays")
        places = self.given_places_G
        if len(places) != len(self.given_tokens_G) or (len(places) and (places[0] < 0 or (np.diff(places) < 0).any())):
            raise ValueError("each given token needs a position of at least 0, and positions must not decrease")
        if self.num_turns < 0 or len(self.state) > MAX_STATE_BYTES:
            raise ValueError(f"num_turns must be at least 0, and the state must not exceed {MAX_STATE_BYTES} bytes")
        ends, ids = self.answer_ends_A, self.answer_ids_A
        if ends is not None or ids is not None:
            check_answers(ends, ids, int(ends[-1]) if ends is not None and len(ends) else 0)
