"""Scorer `llm_judge`: a model behind an OpenAI-compatible endpoint reads a rubric and the answer, and gives a score.

Connections, retries, deadlines, budget and recorded answers are in areal_like/external/. Scores are cached by the
service's cache of exact duplicates: at temperature 0 a judge counts as deterministic. A reply without a score within
the rubric's bounds is `invalid`: no score is guessed.

An answer may try to influence its judge. It is data in the template, but a language model reads it: if that matters,
use a rubric that persuasion cannot satisfy, and compare with `math` or `code` on rows that have both.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from areal_like.external.chat import CHAT, ChatChoice, chat_choice
from areal_like.external.client import ModelClient
from areal_like.external.http_client import SHOWN_CHARS
from services.reward.option_files import read_rubric
from services.reward.scorer_options import JudgeOptions
from services.reward.scorers.endpoint import Requests
from services.reward.scorers.port import CannotJudge, ScorerInput
from services.reward.scorers.templates import SampleTemplate

WHERE = "reward scorer llm_judge"
MAX_OBJECTS = 200
"""Number of positions of a reply at which a JSON object is searched, from its end."""
END_OF_THOUGHT = "</think>"


NOT_IN_VERSION = {
    "key_env", "key_file", "rubric_file", "attempt_timeout_s", "max_tokens_key", "record", "records", "price_in",
    "price_out", "max_cost", "max_tokens_total", "on_exhausted",
}  # fmt: skip
"""Options on which a score does not depend."""


class JudgeScorer:
    """The rubric's score, from 0 (`min_score`) to 1 (`max_score`); component `raw` is the judge's score."""

    def __init__(self, options: JudgeOptions) -> None:
        """Raises UserError: no rubric, no key, no HTTP library, no file for a budget or a replay."""
        self._options = options
        rubric = options.rubric if options.rubric is not None else read_rubric(options.rubric_file or "", WHERE)
        self._template = SampleTemplate(rubric)
        self._regex = re.compile(options.score_regex)
        self._client, self._requests = ModelClient(options, CHAT, WHERE), Requests()
        facts = options.model_dump(mode="json", exclude=NOT_IN_VERSION) | {"rubric": rubric}
        digest = hashlib.blake2b(msgspec.json.encode(facts, order="deterministic"), digest_size=6).hexdigest()
        self.version = f"1/{options.model}/{digest}"
        self.is_deterministic = options.temperature == 0.0

    def warm_up(self) -> None:
        """Do nothing: a judge that is not running yet is not a user's mistake, because it may start before the first
        answer is scored."""

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        options = self._options
        question = {"role": "user", "content": self._template.fill(sample, options.max_response_chars)}
        system = [{"role": "system", "content": options.system}] if options.system is not None else []
        body = {
            "messages": [*system, question],
            "temperature": options.temperature,
            options.max_tokens_key: options.max_tokens,
        }
        is_repeatable = options.temperature == 0.0 or "seed" in options.extra_body
        url = self._client.shown_url
        asked = self._client.ask(body, lambda reply: chat_choice(reply, url), is_repeatable=is_repeatable)
        raw = self._score_in(self._said(self._requests.run(asked)))
        span = options.max_score - options.min_score
        correct = {} if options.correct_at is None else {"correct": float(raw >= options.correct_at)}
        return {"value": (raw - options.min_score) / span, "raw": raw, **correct}

    def _said(self, choice: ChatChoice) -> str:
        said = (choice.message.content or "").rpartition(END_OF_THOUGHT)[2].strip()
        if not said:
            cut = f" (truncated at max_tokens {self._options.max_tokens})" if choice.finish_reason == "length" else ""
            raise CannotJudge(f"the judge's reply is empty{cut}")
        return said

    def _score_in(self, said: str) -> float:
        found = self._by_json(said) if self._options.parse == "json" else self._by_regex(said)
        if found is None:
            wanted = (
                f"JSON object with `{self._options.score_key}`"
                if self._options.parse == "json"
                else "match of score_regex"
            )
            raise CannotJudge(f"the judge's reply has no {wanted}: {_start_of(said)}")
        if not self._options.min_score <= found <= self._options.max_score:
            bounds = f"{self._options.min_score:g} to {self._options.max_score:g}"
            raise CannotJudge(f"the judge's score {found:g} is not within {bounds}: {_start_of(said)}")
        return found

    def _by_regex(self, said: str) -> float | None:
        matches = self._regex.findall(said)
        return _number(matches[-1]) if matches else None

    def _by_json(self, said: str) -> float | None:
        decoder = json.JSONDecoder()
        end = len(said)
        for _ in range(MAX_OBJECTS):
            end = said.rfind("{", 0, end)
            if end < 0:
                return None
            try:
                found, _ = decoder.raw_decode(said, end)
            except (ValueError, RecursionError):
                continue
            if self._options.score_key in found:
                return _number(found[self._options.score_key])
        return None


def _number(value: Any) -> float | None:
    """A number, also one written as text; None for anything else, including NaN and infinity."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _start_of(said: str) -> str:
    text = " ".join(said.split())[:SHOWN_CHARS]
    return repr("".join(character if character.isprintable() else "?" for character in text))
