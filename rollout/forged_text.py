"""Finds text in a policy's turns that only its environment, a tool or the chat template should write.

A policy that writes the environment's text itself may get rewards for observations that it made up. What is found is a
component of the verdict (`FORGED_TEXT`); the controller counts it (controller/telemetry/answer_signs.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import numpy as np

from areal_like.trajectory import Trajectory

_MARKS = re.compile(
    # After the end of a line, of a tag or of a call, and not in a sentence about them.
    r"(?:^|(?<=[>)]))[ \t]*(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<tool_response>|\[TOOL_RESULTS\]"
    r"|<\|observation\|>)|\n(?:Observation|Human|User):",
    re.MULTILINE,
)
"""Beginnings of turns of others, in common chat formats."""
_TEMPLATE = re.compile(
    r"(?:<\|im_start\|>|<start_of_turn>)\w+[ \t]*\n|<\|start_header_id\|>\w+<\|end_header_id\|>\s*"
    r"|<\|[^<>|\s]{1,40}\|>|</?s>|<(?:start|end)_of_turn>|<[be]os>|\[/?INST\]"
)
"""Text of the chat template: special tokens, and the role after the beginning of a turn."""
MIN_CHARS = 8
"""A shorter first line of an observation may be in any text."""

Decode = Callable[[np.ndarray], str]


def has_forged_text(trajectories: Iterable[Trajectory], decode: Decode) -> bool:
    """Return whether a turn of the policy has a mark of _MARKS, or lines like those of an observation. decode: text of
    token ids, with special tokens.
    """
    return any(_is_forged(one, decode) for one in trajectories)


def _is_forged(trajectory: Trajectory, decode: Decode) -> bool:
    spans = [(is_sampled, decode(tokens)) for is_sampled, tokens in _spans(trajectory)]
    given = [text for is_sampled, text in spans if not is_sampled]
    # The first given text is the prompt.
    openings = [lines for text in given[1:] if (lines := lines_of(text)[:2]) and len(lines[0]) >= MIN_CHARS]
    known: set[tuple[str, ...]] = set()
    for is_sampled, text in spans:
        lines = lines_of(text)
        if not is_sampled:
            known.update(itertools.pairwise(lines))
            known.update((line,) for line in lines)
        elif _MARKS.search(text) or any(_imitates(lines, one, known) for one in openings):
            return True
    return False


def _imitates(lines: Sequence[str], opening: Sequence[str], known: Container[tuple[str, ...]]) -> bool:
    """Return whether lines of a turn begin like an observation and are not a quotation of what was given before.

    Args:
        lines: of the turn.
        opening: the first one or two lines of the observation.
        known: single lines and pairs of lines that were given to the policy before the turn.
    """
    for place in range(len(lines) - len(opening) + 1):
        part = tuple(lines[place : place + len(opening)])
        is_alike = _without_digits(part[0]) == _without_digits(opening[0])
        if is_alike and all(map(str.startswith, part[1:], map(beginning, opening[1:]))) and part not in known:
            return True
    return False


def lines_of(text: str) -> list[str]:
    """Lines with text, without white space at their ends and without the text of the chat template."""
    return [line for one in _TEMPLATE.sub("\n", text).splitlines() if (line := one.strip())]


def _without_digits(line: str) -> str:
    return re.sub(r"\d+", "0", line)


def _spans(trajectory: Trajectory) -> Iterator[tuple[bool, np.ndarray]]:
    """Runs of sampled and of given tokens, in order."""
    mask_T = trajectory.loss_mask_T
    cuts = np.flatnonzero(np.diff(mask_T.astype(np.int8))) + 1
    for part, tokens in zip(np.split(mask_T, cuts), np.split(trajectory.tokens_T, cuts), strict=True):
        yield bool(part[0]), tokens


def beginning(line: str) -> str:
    """A line of an observation up to its first digit, after which observations differ.

    Example:
        >>> beginning("The door is locked. Try 2 keys")
        'The door is locked. Try'
    """
    return re.split(r"\d", line, maxsplit=1)[0].strip()
