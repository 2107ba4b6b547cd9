"""Which tokens a sample of a graph of models may train."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from areal_like.errors import UserError
from areal_like.trajectory import Segment, Trajectory
from rollout.models.trained import check_trained


def segment(*tokens: int) -> Segment:
    count = len(tokens)
    return Segment(np.array(tokens, np.int32), np.full(count, -0.5, np.float32), np.zeros(count, np.int32))


@dataclass
class Episode:
    """A trajectory of one answer for each number."""

    numbers: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def trajectory(self) -> Trajectory:
        made = Trajectory.from_prompt(np.arange(3, dtype=np.int32), segment(*self.tokens), "stop")
        ends = np.arange(1, len(self.tokens) + 1, dtype=np.int32)
        return msgspec.structs.replace(made, answer_ends_A=ends, answer_ids_A=np.array(self.numbers, np.int32))


def test_answers_of_this_lease_are_compared_by_their_numbers() -> None:
    episode = Episode((0, 1), (7, 8)).trajectory
    check_trained([episode], {0: segment(7), 1: segment(8)}, 0)
    for sampled in ({0: segment(7)}, {0: segment(8), 1: segment(7)}, {0: segment(7), 1: segment(9)}, {}):
        with pytest.raises(
            UserError, match="marks tokens for training that were not sampled by a trained role of the policy"
        ):
            check_trained([episode], sampled, 0)


def test_answers_of_earlier_leases_were_checked_there() -> None:
    episode = Episode((0, 1), (7, 8)).trajectory
    check_trained([episode], {1: segment(8)}, 1)
    with pytest.raises(UserError, match="marks tokens for training"):
        check_trained([episode], {0: segment(7)}, 1)


def test_an_answer_without_a_number_equals_one_that_was_sampled() -> None:
    episode = Trajectory.from_prompt(np.arange(3, dtype=np.int32), segment(7), "stop")
    check_trained([episode], {4: segment(6), 5: segment(7)}, 3)
    with pytest.raises(UserError, match="marks tokens for training"):
        check_trained([episode], {4: segment(6)}, 3)
