"""Converts text to prompt tokens, and answer tokens to text: the only module of a rollout worker that uses a tokenizer.

The conversion of rows to prompts is shared (areal_like/prompts.py). Answers are never tokenised (tokens in, tokens
out): `encode` is for text that the policy did not sample.

Shape legend: P tokens of the prompt, R tokens of the answer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areal_like.config import BUILT_IN_TOKENIZERS, AddBos
from areal_like.errors import UserError, first_line
from areal_like.prompts import CHAT_COLUMN, PromptEncoder, TurnEnd, encode_text
from areal_like.wire.messages import Sampling
from rollout.stop_strings import StopStrings

SHORT_TEXT, MAX_SHORT_TEXTS = 64, 4096
"""Largest text whose tokens are cached (in characters), and number of cached texts."""


class PromptTooLong(UserError):
    """A prompt that leaves no room for an answer."""


class PromptTokens:
    """Converts data rows to prompts, and answers to text.

    `tokenizer`, `template` and `add_bos` as in `PromptEncoder`. `max_context` bounds prompt plus answer. Raises
    UserError if settings contradict each other.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None,
        add_bos: AddBos,
        max_context: int,
        stop_ids: tuple[int, ...] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, template=template, add_bos=add_bos)
        self._views: dict[str, PromptTokens] = {}
        """For rows with arguments of the chat template, by those."""
        self._newest: tuple[str, list[int]] | None = None
        """The last encoded row: the samples of a group have the same row and follow each other."""
        self._encoded: dict[str, np.ndarray] = {}
        """Cache of short texts: markers and tool outputs are encoded repeatedly, and a tokenizer's call is
        expensive.
        """
        self._num_ids: int | None = None
        self.max_context = max_context
        self.stop_ids = stop_ids
        """End-of-sequence ids of the model: sampled last, they end an answer."""

    def limit_context(self, max_context: int) -> None:
        """Limit the context to the engine's (a model may have fewer positions than the settings allow)."""
        self.max_context = min(self.max_context, max_context)
        self._views.clear()

    def for_row(self, row: Mapping[str, Any]) -> PromptTokens:
        """The tokens of a sample of this row: every text of the chat template is made with the arguments that its data
        source gives (`data.*.chat_template_kwargs`)."""
        kwargs = (row.get(CHAT_COLUMN) or {}).get("kwargs")
        if not kwargs:
            return self
        key = repr(kwargs)
        if key not in self._views:
            view = self._views[key] = copy.copy(self)
            view._encoder, view._newest, view._views = self._encoder.for_row(row), None, {}
        return self._views[key]

    @property
    def chat_template(self) -> Any:
        """The tokenizer's chat template; None if it has none."""
        return getattr(self._tokenizer, "chat_template", None)

    @property
    def num_ids(self) -> int:
        """Upper bound (exclusive) of the tokenizer's ids."""
        if self._num_ids is None:
            self._num_ids = max(self._tokenizer.get_vocab().values()) + 1
        return self._num_ids

    def prompt(self, row: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Prompt tokens of a data row [P], int32. `tools`: declared to the policy by the chat template. Raises
        UserError for a row that cannot become a prompt; PromptTooLong is a subclass."""
        prompt_P = self._encode(row, tools)
        if len(prompt_P) >= self.max_context:
            raise PromptTooLong(
                f"the prompt has {len(prompt_P)} tokens and leaves no room for an answer in a context of "
                f"{self.max_context}",
                remedy="shorten the prompt, remove long rows, or increase rollout.engine.max_context",
            )
        return np.asarray(prompt_P, np.int32)

    def _encode(self, row: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        words = repr(
            (row.get("prompt"), row.get("messages"), row.get(CHAT_COLUMN), tools)
        )  # not the row itself: a workflow may change it
        if self._newest is None or self._newest[0] != words:
            self._newest = (words, self._encoder.for_row(row).encode(row, tools))
        return self._newest[1]

    def encode(self, text: str) -> np.ndarray:
        """Tokens of an unchanged text, int32: no template, no BOS. For text between two generations, such as a tool's
        output. Raises UserError with the characters that have no token."""
        known = self._encoded.get(text)
        if known is None:
            known = np.asarray(encode_text(self._tokenizer, text, what="the text"), np.int32)
            if len(text) <= SHORT_TEXT and len(self._encoded) < MAX_SHORT_TEXTS:
                self._encoded[text] = known
        return known.copy()

    def observation(self, text: str, stop_token: int) -> np.ndarray:
        """Tokens of an observation after a turn of the policy that `stop_token` ended, int32: as the user's next
        message if prompts use the chat template, else the unchanged text. Raises UserError as in `encode`."""
        stop = str(self._tokenizer.convert_ids_to_tokens(stop_token))
        words = self._encoder.between_turns(text, stop)
        return self.encode(text) if words is None else np.asarray(words, np.int32)

    def tool_results(
        self,
        called: Mapping[str, Any],
        results: Sequence[Mapping[str, Any]],
        stop_token: int,
        stop_marks: Sequence[str] = (),
    ) -> np.ndarray:
        """Tokens between a turn with tool calls that `stop_token` ended and the next one, int32: messages of role
        `tool`. `stop_marks`: other texts with which the template may end such turns. `called` and errors as in
        `PromptEncoder.after_calls`."""
        stop = str(self._tokenizer.convert_ids_to_tokens(stop_token))
        return np.asarray(self._encoder.after_calls(called, results, (stop, *stop_marks)), np.int32)

    def plain(self, value: Any) -> Any:
        """A JSON-like value with `PromptEncoder.plain` applied to every text. Raises UserError if it is nested too
        deep."""
        try:
            return _each_text(value, self._encoder.plain)
        except RecursionError as error:
            raise UserError("the messages or tools are nested too deeply") from error

    def turn_end(
        self,
        messages: Sequence[Mapping[str, Any]],
        covered: int,
        stops: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
    ) -> TurnEnd:
        """How the chat template goes on after the first `covered` messages, the last of which is an answer. Arguments
        and errors as in `PromptEncoder.turn_end`."""
        return self._encoder.turn_end(messages, covered, stops, tools)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """Apply the chat template to messages, up to the start of the next answer. Raises UserError as in
        `PromptEncoder.chat_text`."""
        return self._encoder.chat_text(messages, tools=tools)

    def decode(self, tokens_R: np.ndarray, *, with_special_tokens: bool = False) -> str:
        """Text of answer tokens, usually without special tokens (the end-of-sequence token is one)."""
        return str(
            self._tokenizer.decode(
                [int(token) for token in tokens_R],
                skip_special_tokens=not with_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )


def stop_strings(tokens: PromptTokens, sampling: Sampling) -> StopStrings | None:
    """What finds `sampling.stop`; None where that is empty, or answers have a length drawn before."""
    if not sampling.stop or sampling.ignore_eos:
        return None
    return StopStrings(sampling.stop, partial(tokens.decode, with_special_tokens=True))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each_text(key, change): _each_text(one, change) for key, one in value.items()}
    return [_each_text(one, change) for one in value] if isinstance(value, (list, tuple)) else value


def load_tokenizer(model_dir: Path, tokenizer: str) -> Any:
    """Load the run's tokenizer, as named by `ModelSettings.tokenizer`. Raises UserError if it cannot be read."""
    is_in_model_dir = tokenizer in ("from_model", *BUILT_IN_TOKENIZERS)  # saved there when the model was prepared
    place = str(model_dir) if is_in_model_dir else tokenizer
    from transformers import AutoTokenizer  # slow to import, and only needed in the real process

    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError, ... for a bad folder
        what = f"no tokenizer can be read from {place} ({first_line(error)})"
        raise UserError(what, where="model.tokenizer") from error


def stop_ids(model_dir: Path, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json (an id or a list), else config.json, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        ids = _eos_of(model_dir / name)
        if ids:
            return ids
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def _eos_of(path: Path) -> tuple[int, ...]:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise UserError(f"the file cannot be read as JSON ({error})", where=str(path)) from error
    if not isinstance(config, dict):
        raise UserError("the file is not a JSON object", where=str(path))
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), dict):
        value = config["text_config"].get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(one) for one in (value if isinstance(value, list) else [value]))
