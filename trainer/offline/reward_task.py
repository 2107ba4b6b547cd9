"""Reward models: trains a head of one number to score the chosen answer of a pair higher than the rejected one.

The formula is in objectives.py, the text in areal_like/scored_text.py.

The score of an answer is the head's number at the last token of its text, as in the scorer `reward_model`.

Metrics: `accuracy`, the share of pairs whose chosen answer has the higher score, equal ones count half; `margin`, the
mean difference of the two scores.

Shapes: T tokens of a micro-batch, S texts of it, two for each of B pairs, chosen first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from areal_like.errors import UserError, first_line
from areal_like.scored_text import padding_id, scored_text
from trainer.backends.port import OfflineBackend, Setup
from trainer.offline.encoding import LENGTH_REMEDY
from trainer.offline.objectives import bradley_terry_losses
from trainer.offline.packing import Item, packed
from trainer.offline.pairs import PairTask, pair_sums
from trainer.offline.rows import Demonstration, Pair
from trainer.offline.task import Sums
from trainer.sft import SequenceTooLong


class RewardTask(PairTask):
    """See trainer.offline.task.Task. `setup` is that of a critic: the backend returns a value for each token."""

    needs_start = False

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def refer_to(self, policy: OfflineBackend, items: Sequence[Item]) -> None:
        """Does nothing: no reference is needed."""

    def _losses(self, policy: OfflineBackend, items: Sequence[Item]) -> tuple[torch.Tensor, Sums]:
        batch = packed(items).to(self._setup.ranks.device)
        values_T, _ = policy.logprobs(batch, with_entropy=False)
        scores_B2 = values_T[batch.segments.cu_seqlens[1:].long() - 1].view(-1, 2)
        losses_B = bradley_terry_losses(scores_B2[:, 0], scores_B2[:, 1])
        margins_B = (scores_B2[:, 0] - scores_B2[:, 1]).detach()
        return losses_B, pair_sums(losses_B, margins_B)


class TextEncoder:
    """Encodes the texts of pairs, in the same way as the scorer `reward_model`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens, self._padding = tokenizer, max_tokens, padding_id(tokenizer)

    def item(self, row: Pair) -> Item:
        """Encode a row as two sequences, the chosen answer first. Raises UserError, SequenceTooLong."""
        chosen_T, rejected_T = tokens = (self._tokens(row.chosen), self._tokens(row.rejected))
        if np.array_equal(chosen_T, rejected_T):
            raise UserError("`chosen` and `rejected` have the same tokens", where=row.where, remedy="remove the row")
        return Item(row.where, tokens, tuple(np.arange(len(one)) > 0 for one in tokens))

    def _tokens(self, answer: Demonstration) -> np.ndarray:
        fields = answer.fields
        if "messages" in fields:
            text, messages = "", fields["messages"]
            if not getattr(self._tokenizer, "chat_template", None):
                what = "the row has messages but the tokenizer has no chat template"
                raise UserError(what, where=answer.where, remedy="give texts")
        else:
            text = fields["prompt"] + fields["response"]
            turns = zip(("user", "assistant"), (fields["prompt"], fields["response"]), strict=True)
            messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text, adds_special = scored_text(self._tokenizer, text, messages)
            ids = list(self._tokenizer(text, add_special_tokens=adds_special)["input_ids"])
        except Exception as error:  # chat templates and tokenizers may raise any exception
            what = f"the tokenizer cannot encode the row ({first_line(error)})"
            raise UserError(what, where=answer.where, remedy="correct the row, or use a different model") from error
        while ids and ids[-1] == self._padding:  # the score is at the last token that is not padding
            ids.pop()
        if len(ids) < 2:
            raise UserError(
                "the prompt and the answer together have fewer than two tokens",
                where=answer.where,
                remedy="remove the row",
            )
        if len(ids) > self._max_tokens:
            what = f"prompt and answer have {len(ids)} tokens, but the limit is {self._max_tokens}"
            raise SequenceTooLong(what, where=answer.where, remedy=LENGTH_REMEDY)
        return np.asarray(ids, np.int32)
