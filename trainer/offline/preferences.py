"""Direct preference optimisation: raises the probability of the chosen answer of a pair relative to the rejected one,
compared with the starting model.

The formula is in objectives.py, reading rows in rows.py.

Log-probs of the starting model are computed once, before the first step, from the rows in the order of the file, so
that only one model is in memory at a time. A pair is in one micro-batch, because its loss needs both answers.

Metrics: `accuracy`, the share of pairs whose implicit reward, beta (log p - log p of the starting model), is higher for
the chosen answer; equal ones count half (the starting model has 0.5). `margin`, the mean difference of the rewards.

Shapes: S answers of a micro-batch, two for each of B pairs, chosen first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainer.backends.port import OfflineBackend, Setup
from trainer.offline.config import DpoSettings
from trainer.offline.objectives import preference_losses
from trainer.offline.packing import Item, own_micro_batches, packed
from trainer.offline.pairs import PairTask, pair_sums
from trainer.offline.rows import Pair
from trainer.offline.supervised import demonstration_item
from trainer.offline.task import Sums
from trainer.sft import ExampleEncoder

Reference = Mapping[str, tuple[float, float]]
"""Log-probs of a row's chosen and rejected answers under the starting model, by the location of the row."""


class PreferenceTask(PairTask):
    """See trainer.offline.task.Task."""

    needs_start = True

    def __init__(self, setup: Setup, settings: DpoSettings) -> None:
        self._setup, self._settings = setup, settings
        self._reference: dict[str, tuple[float, float]] = {}

    def refer_to(self, policy: OfflineBackend, items: Sequence[Item]) -> None:
        """Compute and keep the log-probs of these rows under `policy`, which is the starting model at this time.

        Each rank computes its share, and all keep the whole, since steps divide the rows in other ways.
        """
        ranks = self._setup.ranks
        places = {item.where: place for place, item in enumerate(items)}
        known_B2 = torch.zeros(len(items), 2, dtype=torch.float64, device=ranks.device)
        with torch.no_grad():
            for members, is_dummy in own_micro_batches(items, self._setup.settings.micro_batch_tokens, ranks):
                logprobs_B2 = self._answers(policy, members).double().view(-1, 2)
                if not is_dummy:
                    known_B2[[places[item.where] for item in members]] = logprobs_B2
        if items:
            ranks.sum(known_B2)
        pairs = known_B2.tolist()
        self._reference |= {where: (pairs[place][0], pairs[place][1]) for where, place in places.items()}

    def _losses(self, policy: OfflineBackend, items: Sequence[Item]) -> tuple[torch.Tensor, Sums]:
        pairs_B2 = self._answers(policy, items).view(-1, 2)
        known = [self._reference[item.where] for item in items]
        reference_B2 = torch.tensor(known, dtype=pairs_B2.dtype, device=pairs_B2.device)
        losses_B = preference_losses(
            pairs_B2[:, 0], pairs_B2[:, 1], reference_B2[:, 0], reference_B2[:, 1], self._settings
        )
        rewards_B2 = self._settings.beta * (pairs_B2.detach() - reference_B2)
        return losses_B, pair_sums(losses_B, rewards_B2[:, 0] - rewards_B2[:, 1])

    def _answers(self, policy: OfflineBackend, items: Sequence[Item]) -> torch.Tensor:
        """Log-prob of each answer [S]: the sum over its tokens, or their mean for `ipo`."""
        batch = packed(items).to(self._setup.ranks.device)
        logprobs_N, _ = policy.logprobs(batch, with_entropy=False)
        zeros_S = torch.zeros(len(batch.lengths), dtype=logprobs_N.dtype, device=logprobs_N.device)
        sums_S = zeros_S.index_add(0, batch.sequence_N, logprobs_N)
        if self._settings.loss != "ipo":
            return sums_S
        return sums_S / zeros_S.index_add(0, batch.sequence_N, torch.ones_like(logprobs_N))


def pair_item(encoder: ExampleEncoder, row: Pair) -> Item:
    """Encode a row as two sequences, the chosen answer first. Raises UserError, SequenceTooLong."""
    parts = [demonstration_item(encoder, answer) for answer in (row.chosen, row.rejected)]
    return Item(
        row.where,
        tuple(tokens_T for part in parts for tokens_T in part.tokens_S),
        tuple(mask_T for part in parts for mask_T in part.masks_S),
    )
