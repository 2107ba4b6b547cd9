"""Assigns rows to steps and to micro-batches.

With several ranks it also divides a step among them. Tokens of a row are computed in encoding.py, losses in
objectives.py.

Shapes: T tokens of one sequence, S sequences of a row, N predicted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.dealing import deal
from trainer.data.dealing import micro_batches as fitting
from trainer.model.packed import PackedSequences
from trainer.ranks import Ranks


@dataclass(frozen=True)
class Item:
    """One row as tokens; its sequences are kept together in one micro-batch.

    tokens_S: int32 [T] each; masks_S: bool [T], True where a token is predicted.
    """

    where: str
    tokens_S: tuple[np.ndarray, ...]
    masks_S: tuple[np.ndarray, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all its sequences."""
        return sum(len(tokens_T) for tokens_T in self.tokens_S)

    @property
    def num_targets(self) -> int:
        """Number of predicted tokens of all its sequences."""
        return sum(int(mask_T.sum()) for mask_T in self.masks_S)


@dataclass(frozen=True)
class Schedule:
    """The rows of each step, a pure function of the seed: each epoch uses every row once, in a different order.

    The last step of an epoch has the remaining rows, so that no batch mixes two epochs. max_steps: an earlier end.
    """

    num_rows: int
    batch_size: int
    epochs: int
    seed: int
    max_steps: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        """ceil(num_rows / batch_size)"""
        return -(-self.num_rows // self.batch_size)

    @property
    def num_steps(self) -> int:
        """epochs * steps_per_epoch, at most max_steps"""
        total = self.epochs * self.steps_per_epoch
        return total if self.max_steps is None else min(total, self.max_steps)

    def epoch_of(self, step: int) -> float:
        """Return the number of passes over the rows after `step`."""
        whole, part = divmod(step, self.steps_per_epoch)
        return whole + min(1.0, part * self.batch_size / self.num_rows)

    def rows_of(self, step: int) -> list[int]:
        """Return the indices of the rows of step 1, 2, ..."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        found: list[int] = order[place * self.batch_size : (place + 1) * self.batch_size].tolist()
        return found


def micro_batches(items: Sequence[Item], capacity: int) -> Iterator[list[Item]]:
    """Yield `items` in few micro-batches of `capacity` tokens; a longer row has one of its own."""
    for members in fitting([item.num_tokens for item in items], capacity):
        yield [items[index] for index in members]


def own_micro_batches(items: Sequence[Item], capacity: int, ranks: Ranks) -> Iterator[tuple[list[Item], bool]]:
    """Yield this rank's micro-batches, and whether each is a dummy. Ranks have nearly equal tokens.

    Ranks synchronise in each pass, so all get the same number. A dummy has a row that another rank trains on, and must
    not count.
    """
    if ranks.size == 1 or not items:
        yield from ((members, False) for members in micro_batches(items, capacity))
        return
    shortest = min(items, key=lambda item: item.num_tokens)
    for members in deal([item.num_tokens for item in items], ranks.size, capacity)[ranks.rank]:
        yield ([items[index] for index in members], False) if members else ([shortest], True)


def packed(items: Sequence[Item]) -> PackedSequences:
    """Pack all sequences of `items`, row by row."""
    return PackedSequences.build(
        [tokens_T for item in items for tokens_T in item.tokens_S],
        [mask_T for item in items for mask_T in item.masks_S],
    )
