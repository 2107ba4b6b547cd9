"""benchmarks/sessions.py: all sides sample as many tokens, and only one computes every turn's whole prompt."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from benchmarks.sessions import Case, episodes, measure
from benchmarks.tables import markdown


@pytest.mark.parametrize("task", ["tool_sum", "observations"])
def test_what_is_computed_differs_by_what_is_kept(task: str) -> None:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, intermediate_size=16, max_position_embeddings=768, tie_word_embeddings=False,
    )  # fmt: skip
    case = Case(task, slots=4, episodes=6, context=768, swap_tokens=10**9)
    row = measure(config, case, rounds=1)
    without = kept = one_turn = num_sampled = 0
    for length, turns in episodes(case):
        known = length
        for sampled, given in turns:
            without += known - 1
            known += sampled + given
            num_sampled += sampled
        assert known <= case.context
        kept += length - 1 + sum(given for _, given in turns[:-1])
        one_turn += length - 1
    for name, num_prefilled in (("without", without), ("kept", kept), ("one_turn", one_turn)):
        assert row[f"prefilled_{name}"] == pytest.approx(num_prefilled / num_sampled)
    assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
    assert task in markdown("sessions", {"rows": [row], "command": "x"})
