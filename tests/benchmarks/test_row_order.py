"""benchmarks/row_order.py: both sides generate the same tokens, and one attends its rows in blocks."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from benchmarks.row_order import CONTEXT, FEWEST, Case, answers, measure
from benchmarks.sums import VOCABULARY
from benchmarks.tables import markdown


def test_both_sides_generate_all_answers_and_one_moves_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.kv_cache.CPU_CALL_BYTES", 1)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=16, max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )  # fmt: skip
    case = Case(slots=16, lengths="thinking")
    row = measure(config, case, rounds=1, fewest=64)
    assert row["tokens"] == sum(answer.request.sampling.max_new_tokens for answer in answers(case, 64))
    assert row["moved_rows"] > case.slots
    assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
    assert "| 16 | thinking |" in markdown("row_order", {"rows": [row], "command": "x"})


@pytest.mark.parametrize("lengths", ["task", "thinking"])
def test_answers_of_a_group_have_one_prompt_and_fit_the_context(lengths: str) -> None:
    made = answers(Case(slots=16, lengths=lengths), FEWEST)
    assert len(made) == FEWEST
    for first in range(0, FEWEST, 8):
        prompts = {answer.request.prompt_P.tobytes() for answer in made[first : first + 8]}
        assert len(prompts) == 1
    assert all(len(one.request.prompt_P) + one.request.sampling.max_new_tokens < CONTEXT for one in made)
    assert len({answer.request.sampling.max_new_tokens for answer in made}) > 4
