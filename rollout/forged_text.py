"""Finds text in a policy's turns that only its environment, a tool or the chat template should write.

A policy that writes the environment's text itself may get rewards for observations that it made up. What is found is a
component of the verdict (`FORGED_TEXT`); the controller counts it (controller/telemetry/answer_signs.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from areal_like.trajectory import Trajectory

MARKS = (
    "<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start|>", "<tool_response>", "[TOOL_RESULTS]",
    "<|observation|>", "\nObservation:", "\nHuman:", "\nUser:",
)  # fmt: skip
"""Beginnings of turns of others, in common chat formats."""
MIN_CHARS = 8
"""A shorter beginning of an observation may be in any text."""

Decode = Callable[[np.ndarray], str]


def has_forged_text(trajectories: Iterable[Trajectory], decode: Decode) -> bool:
    """Return whether a turn of the policy has a mark of MARKS, or the words with which a text that was given to it
    begins. decode: text of token ids, with special tokens.
    """
    return any(_is_forged(one, decode) for one in trajectories)


def _is_forged(trajectory: Trajectory, decode: Decode) -> bool:
    turns: list[np.ndarray] = []
    given: list[np.ndarray] = []
    for is_sampled, tokens_T in _spans(trajectory):
        (turns if is_sampled else given).append(tokens_T)
    texts = [decode(tokens) for tokens in turns]
    observations = [beginning(decode(tokens)) for tokens in given[1:]]  # the first one is the prompt
    marks = [*MARKS, *(text for text in observations if len(text) >= MIN_CHARS)]
    return any(mark in text for text in texts for mark in marks)


def _spans(trajectory: Trajectory) -> Iterator[tuple[bool, np.ndarray]]:
    """Runs of sampled and of given tokens, in order."""
    mask_T = trajectory.loss_mask_T
    cuts = np.flatnonzero(np.diff(mask_T.astype(np.int8))) + 1
    for part, tokens in zip(np.split(mask_T, cuts), np.split(trajectory.tokens_T, cuts), strict=True):
        yield bool(part[0]), tokens


def beginning(text: str) -> str:
    """The first line of an observation up to its first digit, after which observations differ.

    Example:
        >>> beginning("The door is locked. Try 2 keys")
        'The door is locked. Try'
    """
    lines = text.strip().splitlines()
    return re.split(r"\d", lines[0], maxsplit=1)[0].strip() if lines else ""
