"""Scorer `format`: does the answer look as it should, whatever it says.

Owns: its options and checks. Refuses: right or wrong (it never gives `correct`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pydantic

from areal_like.config import Settings
from services.reward.scorers.port import ScorerInput


class FormatOptions(Settings):
    """What an answer must satisfy, all of it, for a 1."""

    regex: str | None = None
    """Must be found in the answer (`re.search`, dot matches newlines); anchor it with ^ and $ to match the whole."""
    must_contain: tuple[str, ...] = ()
    """Texts that must occur."""
    must_stop: bool = False
    """The model must have ended by itself, not at the token limit."""

    @pydantic.field_validator("regex")
    @classmethod
    def _regex_compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"not a regular expression ({error})") from error
        return pattern

    @pydantic.model_validator(mode="after")
    def _asks_for_something(self) -> FormatOptions:
        if self.regex is None and not self.must_contain and not self.must_stop:
            raise ValueError("asks for nothing; give regex, must_contain or must_stop")
        return self


class FormatScorer:
    """1.0 where every check holds, else 0.0."""

    version = "1"

    def __init__(self, options: FormatOptions) -> None:
        self._options = options
        self._pattern = re.compile(options.regex, re.DOTALL) if options.regex is not None else None

    def warm_up(self) -> None:
        """Nothing to load."""

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        options = self._options
        holds = (
            (not options.must_stop or sample.finish_reason == "stop")
            and all(text in sample.response for text in options.must_contain)
            and (self._pattern is None or self._pattern.search(sample.response) is not None)
        )
        return {"value": 1.0 if holds else 0.0}
