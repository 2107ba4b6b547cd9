"""One call of a tool, as a policy asked for it.

Owns: the type that chat formats make (rollout/chat) and tools take (areal_like/tools.py). Refuses: parsing, running.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that was read out of an answer.

    name: the tool's; empty where the text names none. arguments: a JSON object as text, or what was written in its
    place where `fault` is set. fault: what is wrong with the call, in words for the policy; empty: it is well formed.
    """

    name: str
    arguments: str
    fault: str = ""
