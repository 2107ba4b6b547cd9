"""What a checkpoint of an episode must be to travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_like.turn_checkpoint import MAX_STATE_BYTES, TurnCheckpoint


def checkpoint(places: Any = (0, 2), tokens: Any = (7, 8), **facts: Any) -> TurnCheckpoint:
    given = {
        "given_places_G": np.array(places, np.int32) if isinstance(places, tuple) else places,
        "given_tokens_G": np.array(tokens, np.int32) if isinstance(tokens, tuple) else tokens,
    }
    return TurnCheckpoint(**{**given, "num_turns": 1, "state": b"", **facts})


@pytest.mark.parametrize(
    "facts",
    [
        {}, {"places": (), "tokens": ()}, {"places": (0, 0)}, {"places": (3, 9)}, {"num_turns": 0},
        {"state": bytes(MAX_STATE_BYTES)},
    ],
)  # fmt: skip
def test_given_tokens_have_places_that_never_decrease(facts: dict[str, Any]) -> None:
    checkpoint(**facts)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"places": [0, 2]}, "int32 arrays"), ({"tokens": np.array([7, 8])}, "int32 arrays"),
        ({"places": np.zeros((2, 1), np.int32)}, "one-dim"), ({"tokens": np.zeros((2, 1), np.int32)}, "one-dim"),
        ({"places": np.zeros(2, np.float32)}, "int32 arrays"), ({"places": (0,)}, "needs a position"),
        ({"places": (), "tokens": (1,)}, "needs a position"), ({"places": (-1, 2)}, "needs a position"),
        ({"places": (2, 1)}, "must not decrease"), ({"num_turns": -1}, "num_turns must be at least 0"),
        ({"state": bytes(MAX_STATE_BYTES + 1)}, "the state must not exceed"),
        ({"answer_ends_A": np.array([2], np.int32)}, "must be passed together"),
        ({"answer_ends_A": np.zeros(0, np.int32), "answer_ids_A": np.zeros(0, np.int32)}, "strictly increasing"),
        ({"answer_ends_A": np.array([2, 2], np.int32), "answer_ids_A": np.array([0, 1], np.int32)}, "increasing"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_says_nothing_sound_is_refused(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checkpoint(**facts)
