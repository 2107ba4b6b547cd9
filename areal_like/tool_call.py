"""One tool call of a policy, as parsed from its answer.

Chat formats create it (rollout/chat), tools take it (areal_like/tools.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that was parsed from an answer.

    name: name of the tool; empty if the text has none. arguments: a JSON object as text, or the invalid text if `fault`
    is set. fault: error message for the policy; empty if the call is well formed.
    """

    name: str
    arguments: str
    fault: str = ""


def call_id(index: int) -> str:
    """Id of the call with this index in its message; nine characters, as Mistral's templates require."""
    return f"call{index:05d}"
