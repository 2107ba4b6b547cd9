"""Supervised steps for a warm start, on rows of prompt and response, or of several turns.

Rows are read and checked; their order is a pure function of the seed; the loss is the mean over the trained tokens of
the whole batch: responses with their end-of-sequence token, or the assistant's turns.

Shapes: T tokens of one sequence, N predicted tokens of a micro-batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from areal_like.config import AddBos
from areal_like.errors import OperationError, UserError
from areal_like.packing import pack
from areal_like.prompts import PromptEncoder, encode_text
from areal_like.tool_turns import checked_tools
from trainer.config import SftSettings
from trainer.data.rows_file import read_objects
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import token_logprobs
from trainer.model.packed import PackedSequences
from trainer.optimizer import PolicyOptimizer

LOGPROB_CHUNK_TOKENS = 1024
ROW_WORDS = "{prompt, response}"
MAX_BAD_UPDATES = 3
"""Number of consecutive updates without a finite gradient that ends the training."""

Report = Callable[[int, float, float], None]
"""Called with step, loss (nats per response token) and seconds since the start."""


@dataclass(frozen=True)
class Example:
    """One sequence: tokens_T int32, loss_mask_T bool (True where the model is trained)."""

    tokens_T: np.ndarray
    loss_mask_T: np.ndarray


# ---------------------------------------------------------------- rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSONL file. Raises UserError naming the line that cannot be used."""
    rows = []
    remedy = f"use rows of the form {ROW_WORDS}"
    for where, row in read_objects(path, row_words=ROW_WORDS):
        has_target = isinstance(row.get("response"), str) or row.get("spans") is not None
        if not has_target and not _ends_with_assistant(row.get("messages")):
            raise UserError("`response` is missing or not a string", where=where, remedy=remedy)
        if not isinstance(row.get("prompt"), str) and not isinstance(row.get("messages"), list):
            raise UserError("`prompt` is missing or not a string", where=where, remedy=remedy)
        rows.append(row)
    return rows


def _ends_with_assistant(messages: Any) -> bool:
    is_list = isinstance(messages, list) and bool(messages) and isinstance(messages[-1], dict)
    return bool(is_list) and messages[-1].get("role") == "assistant"


def _checked_spans(spans: Any) -> list[tuple[str, bool]]:
    """Check for [[text, whether it is trained on], ...] with at least one trained text. Raises UserError."""
    is_list = isinstance(spans, list) and all(isinstance(one, list | tuple) and len(one) == 2 for one in spans)
    if not is_list or not all(isinstance(text, str) and isinstance(is_trained, bool) for text, is_trained in spans):
        raise UserError(
            "`spans` must be a list of pairs [text, true or false]",
            remedy="write [text, true] for text on which the model is trained, and [text, false] for other text",
        )
    if not any(text and is_trained for text, is_trained in spans):
        raise UserError("no span is marked for training", remedy="add at least one [text, true]")
    return [(text, is_trained) for text, is_trained in spans]


class SequenceTooLong(UserError):
    """A row has more tokens than allowed for a sequence."""


class ExampleEncoder:
    """Encodes rows as token sequences; prompts are the same as those of rollout workers (areal_like/prompts.py).

    `length_remedy`: the remedy in the error about a row that is too long.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_id: int,
        max_tokens: int,
        prompt_template: str | None = None,
        add_bos: AddBos = "auto",
        length_remedy: str = "shorten the row, or increase sft.max_tokens (up to the model's max_position_embeddings)",
    ) -> None:
        self._tokenizer, self._eos, self._max_tokens = tokenizer, eos_token_id, max_tokens
        self._length_remedy = length_remedy
        self._prompts = PromptEncoder(tokenizer, template=prompt_template, add_bos=add_bos)

    def encode(self, row: dict[str, Any], *, where: str, num_given: int = 0) -> Example:
        """Return the tokens of a row, and which of them are trained.

        Args:
            row: {prompt, response}, {prompt, spans} or {messages}. With `messages` also `tools`: JSON schemas of
                the tools that the prompt declares, as a list or its JSON text.
            where: location of the row, for messages.
            num_given: number of messages at the beginning of `messages` that are not trained, whatever their role.

        Raises:
            UserError: the tokenizer cannot express the row; SequenceTooLong: it does not fit.
        """
        try:
            parts = self._parts(row, num_given)
        except UserError as error:
            raise UserError(error.what, where=where, remedy=error.remedy or "correct the row") from error
        tokens = list(itertools.chain.from_iterable(ids for ids, _ in parts))
        if len(tokens) > self._max_tokens:
            raise SequenceTooLong(
                f"prompt and response have {len(tokens)} tokens, but the limit is {self._max_tokens}",
                where=where,
                remedy=self._length_remedy,
            )
        mask_T = np.repeat([is_trained for _, is_trained in parts], [len(ids) for ids, _ in parts])
        return Example(np.asarray(tokens, np.int32), mask_T)

    def _parts(self, row: dict[str, Any], num_given: int) -> list[tuple[list[int], bool]]:
        """Tokens and whether they are trained: of a prompt with its response or spans, or of a list of messages."""
        prompts = self._prompts.for_row(row)
        tools = checked_tools(row.get("tools")) if row.get("messages") is not None else []
        if row.get("spans") is not None:
            spans = _checked_spans(row["spans"])
            parts = [(prompts.encode(row, tools), False)]
            parts += [(encode_text(self._tokenizer, text, what="a span"), is_trained) for text, is_trained in spans]
            return [*parts, ([self._eos], True)] if spans[-1][1] else parts
        if row.get("response") is not None:
            response = encode_text(self._tokenizer, row["response"], what="the response")
            return [(prompts.encode(row, tools), False), ([*response, self._eos], True)]
        messages = prompts.with_system_prompt(row)["messages"]
        turns = prompts.encode_turns(messages, str(self._tokenizer.convert_ids_to_tokens(self._eos)), tools)
        num_left_out = 2 * sum(one.get("role") == "assistant" for one in row["messages"][:num_given])
        return [(ids, is_trained and place >= num_left_out) for place, (ids, is_trained) in enumerate(turns)]


# ---------------------------------------------------------------- training


def run_sft(
    model: PreTrainedModel,
    choice: AttentionChoice,
    examples: Sequence[Example],
    settings: SftSettings,
    *,
    seed: int,
    report: Report,
) -> None:
    """Train `model` in place for `settings.steps` updates. Deterministic for a seed and a number of threads.

    Raises OperationError if the gradient is not finite several times in a row.
    """
    attach(model, choice)
    device = next(model.parameters()).device
    optimizer = PolicyOptimizer(model, settings.optimizer, settings.steps)
    started_s = time.monotonic()
    num_bad = 0
    for step, batch in enumerate(_batches(examples, settings, seed), start=1):
        loss = _accumulate_gradient(model, batch, settings, device)
        result = optimizer.update(step)
        num_bad = 0 if result.is_applied else num_bad + 1
        if num_bad >= MAX_BAD_UPDATES:
            raise OperationError(
                f"supervised step {step}: the gradient was not finite {num_bad} times in a row; "
                "reduce warm_start.sft.optimizer.lr, or check the rows"
            )
        if step % settings.log_every == 0 or step in (1, settings.steps):
            report(step, loss, time.monotonic() - started_s)


def _batches(examples: Sequence[Example], settings: SftSettings, seed: int) -> Iterator[list[Example]]:
    """Yield `settings.steps` batches; every epoch uses each example once, in a different order."""

    def order() -> Iterator[int]:
        epoch = 0
        while True:
            yield from np.random.default_rng([seed, epoch]).permutation(len(examples)).tolist()
            epoch += 1

    indices = order()
    for _ in range(settings.steps):
        yield [examples[next(indices)] for _ in range(settings.batch_size)]


def _accumulate_gradient(
    model: PreTrainedModel, batch: Sequence[Example], settings: SftSettings, device: torch.device
) -> float:
    """Run the backward pass of every micro-batch; returns the batch's loss."""
    num_targets = sum(int(example.loss_mask_T.sum()) for example in batch)
    total = torch.zeros((), device=device)
    for members in pack([len(example.tokens_T) for example in batch], settings.micro_batch_tokens):
        packed = PackedSequences.build(
            [batch[index].tokens_T for index in members], [batch[index].loss_mask_T for index in members]
        ).to(device)
        logprobs_N, _ = token_logprobs(
            model, packed, temperature=1.0, chunk_tokens=LOGPROB_CHUNK_TOKENS, with_entropy=False
        )
        loss = -logprobs_N.sum() / num_targets
        loss.backward()
        total += loss.detach()
    return float(total)
