"""Scorer `format`: checks the form of an answer, whatever its content.

It never returns `correct`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from services.reward.scorer_options import FormatOptions
from services.reward.scorers.port import ScorerInput


class FormatScorer:
    """Returns 1.0 if every check passes, else 0.0."""

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
