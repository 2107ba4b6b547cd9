"""Scorer `http`: a user's server gives the score.

    POST url   {"row": {...}, "response": "...", "finish_reason": "stop", "num_tokens": 17}
    reply      {"value": 0.5, "components": {"style": 0.7}, "correct": 1, "reason": "..."}    all but `value` optional

Connections, retries and deadlines are in endpoint.py. A reply that is not such JSON, or contains invalid numbers (NaN
is not JSON), is `invalid`: no number is guessed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from areal_like.external.http_client import shown
from services.reward.scorer_options import HttpOptions
from services.reward.scorers.endpoint import Endpoint
from services.reward.scorers.port import CannotJudge, ScorerInput


class Reply(msgspec.Struct, forbid_unknown_fields=False):
    """The server's reply."""

    value: float
    components: dict[str, float] = {}
    correct: float | None = None
    reason: str = ""


_decoder = msgspec.json.Decoder(Reply)


class HttpScorer:
    """Returns the server's value."""

    def __init__(self, options: HttpOptions) -> None:
        """Raises UserError."""
        self._options = options
        self._endpoint = Endpoint(options.url, options, options.headers, "reward scorer http")
        asked = msgspec.json.encode([options.url, options.columns, options.headers], order="deterministic")
        self.version = f"1/{hashlib.blake2b(asked, digest_size=6).hexdigest()}"
        self.is_deterministic = options.is_deterministic

    def warm_up(self) -> None:
        """Do nothing: a server that is not running yet is not a user's mistake, because it may start before the first
        answer is scored."""

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        row: Mapping[str, Any] = sample.row
        if self._options.columns is not None:
            missing = [name for name in self._options.columns if name not in row]
            if missing:
                raise CannotJudge(f"the row has no `{missing[0]}`")
            row = {name: row[name] for name in self._options.columns}
        question = {
            "row": row,
            "response": sample.response,
            "finish_reason": sample.finish_reason,
            "num_tokens": sample.num_tokens,
        }
        reply = self._decoded(self._endpoint.post(question))
        if taken := sorted({"value", "remark", "correct"} & set(reply.components)):
            raise CannotJudge(
                f"{shown(self._options.url)} returned a component named `{taken[0]}`, which is a reserved name"
            )
        return {
            **reply.components,
            **({} if reply.correct is None else {"correct": reply.correct}),
            "value": reply.value,
            "remark": reply.reason,
        }

    def _decoded(self, body: bytes) -> Reply:
        try:
            return _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CannotJudge(f"{shown(self._options.url)} sent a reply that is not a score ({error})") from error
