"""JSON files that `areal-like probe` and the three short-lived processes that it starts exchange.

The processes are rollout/probe_answers.py, trainer/probe_logprobs.py and services/reward/try_answers.py. Conclusions
are drawn in controller/probe/. Shape legend: P tokens of a prompt, R tokens of an answer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from areal_like.errors import UserError
from areal_like.import_check import append_user_path
from areal_like.process import USER_MISTAKE
from areal_like.settings import DType
from areal_like.wire.messages import Sampling

Order = TypeVar("Order")


def run_spec(source: Path, target: Path, kind: type[Order], work: Callable[[Order], Any]) -> None:
    """Run such a process: call `work` with the spec in `source`, write its result to `target`, and exit.

    A user's mistake is reported as one `error:` line and exit status 2, even if the user's modules have started
    threads.
    """
    append_user_path()
    try:
        found = work(msgspec.json.decode(source.read_bytes(), type=kind))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(USER_MISTAKE)
    target.write_bytes(msgspec.json.encode(found))


class ProbeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Answers to sample. manifest: version 0 of the model in `model_dir`; settings: the section `rollout`."""

    model_dir: str
    tokenizer: str
    dtype: DType
    manifest: str
    settings: dict[str, Any]
    sampling: Sampling
    rows: list[dict[str, Any]]
    num_samples: int
    seed: int
    num_threads: int
    startup_timeout_s: float


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to the row of that index. logprobs_R as the engine recorded them, in nats."""

    row: int
    text: str
    prompt_P: list[int]
    tokens_R: list[int]
    logprobs_R: list[float]
    is_cut: bool


class ProbeAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled answers, and checks that tokenizer, model and prompts fit together."""

    answers: list[ProbeAnswer] = []
    prompts: list[str] = []
    """Text of each prompt as the model sees it, special tokens included."""
    rejected: dict[int, str] = {}
    """Reason why a row cannot become a prompt, by row."""
    stop_tokens: list[str] = []
    """End-of-sequence tokens that end an answer."""
    are_stops_ordinary: bool = False
    """None of the end-of-sequence tokens is a special token of the tokenizer, although it has special tokens."""
    passed_over: dict[str, int] = {}
    """Special tokens within answers that did not end there, each with the number of such answers."""
    unknown_marks: list[str] = []
    """Markers of a chat template in the prompts for which the tokenizer has no single token."""
    has_chat_template: bool = False
    tokenizer_size: int = 0
    vocab_size: int = 0
    """Rows of the model's embedding, according to config.json."""
    outside_model: int = 0
    """Number of prompts with a token that the model does not have."""
    outside_tokenizer: int = 0
    """Number of answers with a token that the tokenizer does not have."""


class LogprobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Log-probs to compute. sequences: prompt [P] and answer [R] of each; the other fields as in the section
    `trainer`.
    """

    model_dir: str
    device: str
    precision: Literal["float32", "bfloat16"]
    attention: str
    temperature: float
    num_threads: int
    sequences: list[tuple[list[int], list[int]]]


class TryAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An answer to a row."""

    row: dict[str, Any]
    response: str
    finish_reason: str = "stop"
    num_tokens: int = 0


class TrySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Answers to score. settings: the section `reward`."""

    settings: dict[str, Any]
    answers: list[TryAnswer]


class TryVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of scoring one answer. kind: `scored`, or the reason why there is no value."""

    kind: str
    value: float | None
    correct: float | None
    """Component `correct`, if a scorer returns it."""
    reason: str
