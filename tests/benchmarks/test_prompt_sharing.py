"""benchmarks/prompt_sharing.py: both sides hold the same answers, and one computes a group's prompt once."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from transformers import AutoConfig

from benchmarks import prompt_sharing
from benchmarks.prompt_sharing import Case, answers, measure
from benchmarks.tables import markdown


def test_what_is_computed_differs_by_the_prompts_of_all_but_one_of_a_group() -> None:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, intermediate_size=16, max_position_embeddings=384, tie_word_embeddings=False,
    )  # fmt: skip
    case = Case(slots=8, group=4, prompts="short", answer_mean=5)
    row = measure(config, case, rounds=2)
    alone, shared = (answers(case, is_shared=is_shared) for is_shared in (False, True))
    for one, other in zip(alone, shared, strict=True):
        assert np.array_equal(one.known_tokens(), other.known_tokens())
    assert row["tokens_alone"] == sum(len(answer.known_tokens()) - 1 for answer in alone)
    spared = sum(3 * (len(alone[number].request.prompt_P) - 1) for number in (0, 4))
    assert row["tokens_shared"] == row["tokens_alone"] - spared
    assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
    assert "8 of 5 tokens, groups of 4, short prompts" in markdown("prompt_sharing", {"rows": [row], "command": "x"})


def test_a_config_without_a_model_of_its_own_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["prompt_sharing", "configs/gsm8k_8b_8gpu.yaml"])
    with pytest.raises(SystemExit, match=r"configs/gsm8k_8b_8gpu.yaml: this benchmark makes its model"):
        prompt_sharing.main()
