"""Text to prompt tokens and answer tokens to text: the only place of a rollout worker that knows a tokenizer.

Owns: chat template, prompt template, the BOS rule, end-of-sequence ids, decoding. Refuses: to tokenise an answer
(tokens in, tokens out), and to add anything after the prompt (no EOS there, whatever the tokenizer would do by itself).

Shape legend: P tokens of the prompt, R tokens of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from areal_like.errors import UserError

PLACEHOLDER = "{prompt}"
BUILT_IN_TOKENIZERS = ("from_model", "characters:", "bytes")
"""These lie in the model's own folder by the time a worker starts; anything else is a folder or a hub name."""


class PromptTokens:
    """Makes prompts out of data rows, and text out of answers.

    `tokenizer` is a Hugging Face tokenizer. `template`: text with {prompt}, or None for the chat template where the
    tokenizer has one. `max_context` bounds prompt plus answer. Raises UserError when settings contradict each other.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None,
        add_bos: Literal["auto", "always", "never"],
        max_context: int,
        stop_ids: tuple[int, ...] = (),
    ) -> None:
        if template is not None and PLACEHOLDER not in template:
            raise UserError(
                f"the template has no {PLACEHOLDER}",
                where="rollout.prompt_template",
                remedy=f"write {PLACEHOLDER} in it",
            )
        if add_bos == "always" and tokenizer.bos_token_id is None:
            raise UserError("the tokenizer has no BOS token", where="rollout.add_bos", remedy="use auto or never")
        self._tokenizer = tokenizer
        self._template = template
        self._add_bos = add_bos
        self._bos_id: int | None = tokenizer.bos_token_id
        self._tokenizer_adds_bos = _adds_bos(tokenizer)
        self._has_chat_template = bool(getattr(tokenizer, "chat_template", None))
        self.max_context = max_context
        self.stop_ids = stop_ids
        """End-of-sequence ids of the model: sampled last, they end an answer."""

    def limit_context(self, max_context: int) -> None:
        """The engine's context turned out to be this (a model may have fewer positions than the settings allow)."""
        self.max_context = min(self.max_context, max_context)

    def prompt(self, row: Mapping[str, Any]) -> np.ndarray:
        """Prompt tokens of a data row [P], int32. Raises UserError for a row that cannot become a prompt."""
        if row.get("messages") is not None:
            prompt_P = self._encode(self._chat_text(row["messages"]), is_chat=True)
        else:
            prompt_P = self._prompt_of_text(row)
        if not len(prompt_P):
            raise UserError("the prompt is empty", remedy="remove the row, or mend data.columns")
        if len(prompt_P) >= self.max_context:
            raise UserError(
                f"the prompt has {len(prompt_P)} tokens and leaves no room for an answer in a context of "
                f"{self.max_context}",
                remedy="shorten the prompt, filter long rows, or raise rollout.engine.max_context",
            )
        return prompt_P

    def decode(self, tokens_R: np.ndarray) -> str:
        """Text of answer tokens, without special tokens (the end-of-sequence token is one)."""
        return str(
            self._tokenizer.decode(
                [int(token) for token in tokens_R], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _prompt_of_text(self, row: Mapping[str, Any]) -> np.ndarray:
        text = row.get("prompt")
        if not isinstance(text, str):
            raise UserError(
                f"a row needs `prompt` (text) or `messages` (a list); this one has {sorted(row)}",
                remedy="name the columns in data.columns",
            )
        if not text.strip():
            raise UserError("the prompt is empty", remedy="remove the row, or mend data.columns")
        if self._template is not None:
            return self._encode(self._template.replace(PLACEHOLDER, text), is_chat=False)
        if self._has_chat_template:
            return self._encode(self._chat_text([{"role": "user", "content": text}]), is_chat=True)
        return self._encode(text, is_chat=False)

    def _chat_text(self, messages: Any) -> str:
        if not self._has_chat_template:
            raise UserError(
                "the row has `messages` but the tokenizer has no chat template", remedy="use a `prompt` column"
            )
        is_list = isinstance(messages, (list, tuple)) and len(messages) > 0
        if not is_list or not all(isinstance(one, Mapping) and "role" in one and "content" in one for one in messages):
            raise UserError("`messages` must be a list of {role, content}, at least one")
        is_continuation = messages[-1]["role"] == "assistant"
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(one) for one in messages],
                    tokenize=False,
                    add_generation_prompt=not is_continuation,
                    continue_final_message=is_continuation,
                )
            )
        except Exception as error:  # the template is the model author's program: it may raise anything
            raise UserError(f"the chat template refused the messages ({error})") from error

    def _encode(self, text: str, *, is_chat: bool) -> np.ndarray:
        """Tokens of `text` under the BOS rule. A chat template writes its own BOS, so `auto` adds none to its text."""
        try:
            ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # tokenizers raise bare Exception, e.g. for a character they have no token for
            raise UserError(f"the prompt cannot be tokenised ({error})") from error
        if self._bos_id is None:
            return np.asarray(ids, np.int32)
        had_bos = False
        while ids and ids[0] == self._bos_id:
            had_bos = True
            ids.pop(0)
        by_itself = had_bos or (self._tokenizer_adds_bos and not is_chat)
        wants_bos = self._add_bos == "always" or (self._add_bos == "auto" and by_itself)
        return np.asarray([self._bos_id, *ids] if wants_bos and ids else ids, np.int32)


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a BOS before plain text by itself."""
    if tokenizer.bos_token_id is None:
        return False
    return list(tokenizer.encode("", add_special_tokens=True))[:1] == [tokenizer.bos_token_id]


def load_tokenizer(model_dir: Path, tokenizer: str) -> Any:
    """The run's tokenizer: `ModelSettings.tokenizer` says where it lies. Raises UserError when it cannot be read."""
    place = str(model_dir) if tokenizer.startswith(BUILT_IN_TOKENIZERS) else tokenizer
    from transformers import AutoTokenizer  # heavy, and only needed in the real process

    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError, ... for a bad folder
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"no tokenizer can be read from {place} ({first_line})", where="model.tokenizer") from error


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
        raise UserError(f"not readable as JSON ({error})", where=str(path)) from error
    if not isinstance(config, dict):
        raise UserError("not a JSON object", where=str(path))
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), dict):
        value = config["text_config"].get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(one) for one in (value if isinstance(value, list) else [value]))
