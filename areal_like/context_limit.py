"""The number of positions that a model covers exactly, read from its config.

Some rotary embeddings choose their frequencies by the longest sequence of a forward pass: `dynamic` (NTK scaling) and
`longrope` (the Phi-3 family). Beyond the length where the choice changes, a token's log-prob depends on what it is
computed together with: the longest sequence of a packed micro-batch, or the length at which a cached key was made.
Engine and trainer then disagree without an error, so that length is the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal_like.errors import UserError

POSITION_KEYS = ("max_position_embeddings", "n_positions")
"""Config keys for the number of positions (GPT-2 and similar models use the second)."""


@dataclass(frozen=True)
class ContextLimit:
    """Longest sequence in tokens. rope_type: the rotary variant that sets the limit; empty: the number of positions
    sets it."""

    tokens: int
    rope_type: str = ""

    @property
    def remedy(self) -> str:
        """Advice on how to stay within the limit."""
        if self.rope_type == "longrope":
            return f"at most {self.tokens}, or set short_factor to long_factor in its config.json (one for all lengths)"
        return f"at most {self.tokens}"

    def excess(self, context: int) -> str:
        """Reason why `context` tokens are too many, as a clause ("4096 is more than ..."); empty if they are
        allowed.
        """
        if context <= self.tokens:
            return ""
        if self.rope_type:
            return (
                f"{context} is more than {self.tokens} positions, beyond which the model's {self.rope_type} frequencies"
                " depend on the longest sequence of a pass, so log-probs would be wrong"
            )
        return f"{context} is more than the model's max_position_embeddings ({self.tokens})"

    def check(self, context: int, *, where: str) -> None:
        """Raise UserError if `context` tokens are too many."""
        if excess := self.excess(context):
            raise UserError(excess, where=where, remedy=self.remedy)

    def cap(self, context: int, *, where: str) -> int:
        """The smaller of `context` and the number of positions. Raises UserError beyond a rotary variant's limit: the
        model accepts longer sequences, but its log-probs are then inexact, so the user must decide."""
        if self.rope_type:
            self.check(context, where=where)
        return min(context, self.tokens)


def context_limit(config: Mapping[str, Any]) -> ContextLimit | None:
    """Limit of a transformers config (the content of config.json, or `vars` of a config object); None if the config has
    none."""
    nested = config.get("text_config")
    merged = {**config, **nested} if isinstance(nested, Mapping) else config
    positions = next((count for key in POSITION_KEYS if (count := _count(merged.get(key))) is not None), None)
    limits = [] if positions is None else [ContextLimit(positions)]
    for rope in _ropes(merged):
        kind = _length_dependent_kind(rope)
        known = [positions]
        if kind == "longrope":  # for `dynamic`, transformers reads the length from max_position_embeddings only
            original = rope.get("original_max_position_embeddings") or merged.get("original_max_position_embeddings")
            known.append(_count(original))
        lengths = [length for length in known if length is not None]
        if kind and lengths:
            limits.append(ContextLimit(min(lengths), kind))
    return min(limits, key=lambda limit: (limit.tokens, not limit.rope_type), default=None)


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rotary parameters, one set for each kind of layer if they differ; transformers 4 calls them rope_scaling."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if not isinstance(rope, Mapping):
            continue
        yield rope
        yield from (part for part in rope.values() if isinstance(part, Mapping))


def _length_dependent_kind(rope: Mapping[str, Any]) -> str:
    """Name of the rotary variant if its frequencies depend on the length; empty for all others."""
    kind = rope.get("rope_type", rope.get("type"))
    if "short_factor" in rope or kind in ("longrope", "su"):  # old Phi-3 configs call it su, or yarn
        pairs = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
        return "longrope" if any(rope.get(short) != rope.get(long) for short, long in pairs) else ""
    return str(kind) if isinstance(kind, str) and "dynamic" in kind else ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
