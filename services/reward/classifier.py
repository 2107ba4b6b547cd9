"""A Hugging Face classifier in a local folder, which scores texts in batches.

The text is built in scorers/reward_model.py; the process is model_host.py.

Legend: B texts of a batch, T tokens, L classes. Texts of a batch are padded on the right and masked, so a text's score
does not depend on the other texts of its batch.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from areal_like.errors import OperationError, UserError, first_line
from areal_like.scored_text import scored_text
from services.reward.classifier_folder import WHERE, check_folder
from services.reward.model_wire import Item, Scores
from services.reward.scorer_options import RewardModelOptions


class Classifier:
    """Scores texts. Call `score` from one thread."""

    def __init__(self, options: RewardModelOptions) -> None:
        """Raises UserError if there is no classifier in the folder, or if it cannot be loaded."""
        self._options = options
        self._head = check_folder(options.path, options.label)
        kind = AutoModelForTokenClassification if self._head.is_per_token else AutoModelForSequenceClassification
        torch.set_num_threads(options.threads)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(options.path, local_files_only=True)
            model, info = kind.from_pretrained(
                options.path, dtype=getattr(torch, options.dtype), local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # fault boundary: transformers may raise anything
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{options.path} cannot be loaded ({reason})", where=WHERE) from error
        if missing := sorted(info["missing_keys"]):
            what = f"{options.path} lacks weights ({', '.join(missing[:3])}), which would be randomly initialised"
            raise UserError(what, where=WHERE, remedy="use a folder with the trained classifier and its head")
        num_rows = model.config.get_text_config().vocab_size
        if len(self._tokenizer) > num_rows:
            what = (
                f"the tokenizer of {options.path} has {len(self._tokenizer)} tokens, but the vocabulary of the model "
                f"has only {num_rows}"
            )
            raise UserError(what, where=WHERE, remedy="use the tokenizer that belongs to the model")
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token or self._tokenizer.unk_token
        if self._tokenizer.pad_token_id is None:
            what = f"the tokenizer of {options.path} has no padding token"
            raise UserError(what, where=WHERE, remedy="set pad_token in the tokenizer_config.json of the model")
        if self._head.is_per_token and not self._tokenizer.is_fast:
            what = f"the tokenizer of {options.path} does not report token offsets"
            raise UserError(what, where=WHERE, remedy="use a fast tokenizer (tokenizer.json)")
        model.config.pad_token_id = self._tokenizer.pad_token_id  # decoders use it to find a text's last token
        try:
            self._model: Any = model.eval().to(options.device)
        except (RuntimeError, AssertionError) as error:  # no such device, or not enough memory
            raise UserError(f"device {options.device}: {first_line(error)}", where=WHERE) from error

    def score(self, items: list[Item]) -> list[Scores]:
        """Score items, with one Scores per item in the same order; `max_batch` texts at a time, grouped by length.

        Raises OperationError if a forward pass fails.
        """
        encoded = [self._encode(item) for item in items]
        scores: list[Scores | None] = [made if isinstance(made, Scores) else None for made in encoded]
        order = sorted((len(made[0]), index) for index, made in enumerate(encoded) if not isinstance(made, Scores))
        size = self._options.max_batch
        for start in range(0, len(order), size):
            indices = [index for _, index in order[start : start + size]]
            batch = [made for index in indices if not isinstance(made := encoded[index], Scores)]
            for index, made in zip(indices, self._forward(batch), strict=True):
                scores[index] = made
        return [made for made in scores if made is not None]

    def _encode(self, item: Item) -> tuple[list[int], list[int], int] | Scores:
        """Token ids, positions of the scores, and number of omitted tokens; or why there is nothing to score."""
        try:
            text, adds_special = scored_text(self._tokenizer, item.text, item.messages)
        except Exception as error:  # fault boundary: a model's template may raise anything
            return Scores(values=[], problem=f"the chat template rejects the row ({first_line(error)})")
        try:
            made = self._tokenizer(
                text, add_special_tokens=adds_special, return_offsets_mapping=self._head.is_per_token
            )
        except Exception as error:  # fault boundary: tokenizers raise bare Exception for a character without a token
            return Scores(values=[], problem=f"the tokenizer cannot encode the text ({first_line(error)})")
        ids, places = made["input_ids"], []
        if not ids:
            return Scores(values=[], problem="there are no tokens to score")
        if self._head.is_per_token:
            answer = item.answer.rstrip() or item.answer  # chat templates strip trailing white space of an answer
            begin = text.rfind(answer)
            if begin < 0:
                return Scores(
                    values=[], problem="the template changes the answer, so the steps of the answer cannot be found"
                )
            places = [_token_at(made["offset_mapping"], begin + min(end, len(answer))) for end in item.ends]
        num_cut = max(0, len(ids) - self._options.max_tokens)
        if num_cut and self._options.on_long == "invalid":
            return Scores(
                values=[],
                problem=f"the text has {len(ids)} tokens, which is more than max_tokens {self._options.max_tokens}",
            )
        if num_cut and min(places, default=num_cut) < num_cut:
            return Scores(values=[], problem=f"steps begin beyond the last {self._options.max_tokens} tokens")
        return ids[num_cut:], [place - num_cut for place in places], num_cut

    def _forward(self, batch: list[tuple[list[int], list[int], int]]) -> list[Scores]:
        device, pad = self._options.device, self._tokenizer.pad_token_id
        longest = max(len(ids) for ids, _, _ in batch)
        ids_BT = torch.full((len(batch), longest), pad, dtype=torch.long)
        mask_BT = torch.zeros((len(batch), longest), dtype=torch.long)
        for row, (ids, _, _) in enumerate(batch):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
            mask_BT[row, : len(ids)] = 1
        try:
            with torch.inference_mode():
                logits = self._model(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device)).logits
        except (RuntimeError, IndexError) as error:  # no memory, a token beyond the vocabulary, a broken device
            raise OperationError(f"the reward model failed on {len(batch)} texts ({first_line(error)})") from error
        values = self._values(logits.float().cpu())
        if self._head.is_per_token:  # values: B x T
            return [
                Scores(values=[float(values[row, place]) for place in places], num_cut=num_cut)
                for row, (_, places, num_cut) in enumerate(batch)
            ]
        return [Scores(values=[float(values[row])], num_cut=num_cut) for row, (_, _, num_cut) in enumerate(batch)]

    def _values(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores of the configured class, from the last axis (L)."""
        if self._options.output == "probability":
            logits = logits.sigmoid() if self._head.num_labels == 1 else logits.softmax(-1)
        return logits[..., self._head.label]


def _token_at(offsets: list[tuple[int, int]], end: int) -> int:
    """The last token that begins before character `end`, except special tokens (which have no characters)."""
    places = [index for index, (start, stop) in enumerate(offsets) if start < end and stop > start]
    return places[-1] if places else len(offsets) - 1
