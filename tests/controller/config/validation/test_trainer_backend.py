"""Sequence groups whose ranks cannot share the heads of a model are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from valid_config import make

from controller.config.validation.trainer_backend import backend_problems, head_problems

SHARED = {"trainer__backend": "fsdp", "trainer__ranks": 4, "trainer__sequence_parallel": 4}


@pytest.mark.parametrize("model", [{}, {"num_attention_heads": 8}, {"text_config": {"num_attention_heads": 4}}])
def test_heads_that_four_ranks_share_are_no_problem(model: dict[str, Any]) -> None:
    assert not list(head_problems(make(**SHARED), model))


@pytest.mark.parametrize("model", [{"num_attention_heads": 6}, {"text_config": {"num_attention_heads": 6}}])
def test_heads_that_four_ranks_cannot_share_are_one_problem(model: dict[str, Any]) -> None:
    (problem,) = head_problems(make(**SHARED), model)
    assert problem.keys == ("trainer.sequence_parallel", "model.path")
    assert "4 ranks cannot share the model's 6 attention heads equally" in str(problem)
    assert "1, 2, 3, 6" in str(problem)


SPLIT = {"trainer__backend": "fsdp", "trainer__ranks": 4, "trainer__tensor_parallel": 4}
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}


@pytest.mark.parametrize("model", [{}, SIZES, {"text_config": SIZES}])
def test_sizes_that_four_ranks_split_are_no_problem(model: dict[str, Any]) -> None:
    assert not list(head_problems(make(**SPLIT), model))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 6}, "4 ranks cannot split the model's 6 attention heads equally"),
        ({"num_key_value_heads": 2}, "4 ranks cannot split the model's 2 heads of keys and values equally"),
        ({"intermediate_size": 98}, "the model's 98 columns of the feed-forward layers"),
    ],
)
def test_sizes_that_four_ranks_cannot_split_are_one_problem(change: dict[str, int], words: str) -> None:
    (problem,) = head_problems(make(**SPLIT), SIZES | change)
    assert problem.keys == ("trainer.tensor_parallel", "model.path")
    assert words in str(problem)
    assert "set tensor_parallel to one of 1, 2" in str(problem)


def test_a_mixture_of_experts_is_not_split() -> None:
    (problem,) = head_problems(make(**SPLIT), SIZES | {"num_experts": 8})
    assert "the matrices of a mixture of experts cannot be split over ranks" in str(problem)


def test_replay_needs_an_engine_that_records_routes() -> None:
    (problem,) = backend_problems(make(trainer__router_replay=True))
    assert problem.keys == ("trainer.router_replay", "rollout.engine.kind")
    engine = {"kind": "sglang", "device": "cuda", "sglang": {"routed_experts": True}}
    assert not list(backend_problems(make(trainer__router_replay=True, rollout__engine=engine)))
