"""Models whose log-probs depend on the length of a sequence: exact within their limit, refused beyond it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from areal_like.context_limit import ContextLimit
from areal_like.errors import UserError
from trainer.model import agreement, logprobs
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import token_logprobs
from trainer.model.packed import PackedSequences

SDPA = AttentionChoice("sdpa", "test")
ORIGINAL, LONGEST = 24, 128
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
SCALED: dict[str, dict[str, Any]] = {
    "longrope": {
        "family": "phi3", "num_key_value_heads": 2, "sliding_window": None, "max_position_embeddings": LONGEST,
        "original_max_position_embeddings": ORIGINAL, "rope_parameters": LONGROPE,
    },
    "dynamic": {
        "family": "llama", "max_position_embeddings": ORIGINAL,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    },
}  # fmt: skip
FIXED: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
}  # fmt: skip


def worst_error(model: PreTrainedModel, lengths: tuple[int, ...]) -> float:
    """Largest difference of a packed log-prob from that of its sequence alone, by transformers."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, 61, length) for length in lengths]
    packed = PackedSequences.build(tokens, [np.arange(length) > 0 for length in lengths])
    attach(model, SDPA)
    with torch.no_grad():
        ours_N, _ = token_logprobs(model, packed, temperature=1.0, chunk_tokens=64, with_entropy=False)
        model.set_attn_implementation("eager")
        theirs = [agreement._alone(model, sequence, 0, torch.device("cpu"), 1.0) for sequence in tokens]
    return float((ours_N - torch.cat(theirs)).abs().max())


@pytest.mark.parametrize("kind", list(SCALED))
def test_within_the_original_context_packed_logprobs_are_exact(kind: str, tiny_model: Callable[..., Any]) -> None:
    assert worst_error(tiny_model(**SCALED[kind]), (ORIGINAL, 3, 17, ORIGINAL - 1, 9)) < 1e-4


@pytest.mark.parametrize("kind", list(SCALED))
def test_a_sequence_beyond_the_original_context_is_refused(kind: str, tiny_model: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=rf"{ORIGINAL + 1} is more than {ORIGINAL} positions.*{kind}"):
        worst_error(tiny_model(**SCALED[kind]), (9, ORIGINAL + 1))


@pytest.mark.parametrize("kind", list(SCALED))
def test_a_context_beyond_the_original_one_is_refused_when_the_model_is_loaded(
    kind: str, tiny_model: Callable[..., Any]
) -> None:
    model = tiny_model(**SCALED[kind])
    assert agreement.check(model, SDPA, torch.float32, max_context=ORIGINAL) < 1e-4
    with pytest.raises(UserError, match=r"rollout.engine.max_context: 96 is more than 24 positions"):
        agreement.check(model, SDPA, torch.float32, max_context=96)


@pytest.mark.parametrize("kind", list(SCALED))
def test_agreement_check_sees_what_depends_on_the_longest_sequence_by_itself(
    kind: str, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a variant that no config names: the check alone stands between the model and wrong log-probs."""
    for module in (agreement, logprobs):
        monkeypatch.setattr(module, "model_context", lambda config: ContextLimit(LONGEST))
    with pytest.raises(UserError, match="differ by"):
        agreement.check(tiny_model(**SCALED[kind]), SDPA, torch.float32, max_context=LONGEST)


@pytest.mark.parametrize("kind", list(FIXED))
def test_variants_with_fixed_frequencies_are_exact_beyond_the_original_context(
    kind: str, tiny_model: Callable[..., Any]
) -> None:
    model = tiny_model("llama", max_position_embeddings=LONGEST, rope_parameters=FIXED[kind])
    assert agreement.check(model, SDPA, torch.float32, max_context=LONGEST) < 1e-4
    assert worst_error(model, (LONGEST, 3, ORIGINAL, 90)) < 1e-4


def test_equal_factors_make_longrope_exact_at_every_length(tiny_model: Callable[..., Any]) -> None:
    rope = {**LONGROPE, "short_factor": LONGROPE["long_factor"]}
    model = tiny_model(**{**SCALED["longrope"], "rope_parameters": rope})
    assert agreement.check(model, SDPA, torch.float32, max_context=LONGEST) < 1e-4
    assert worst_error(model, (LONGEST, 3, ORIGINAL, 90)) < 1e-4


def test_positions_are_learned_up_to_the_last_one_and_refused_beyond(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=ORIGINAL, max_position_embeddings=ORIGINAL)
    assert agreement.check(model, SDPA, torch.float32) < 1e-4
    assert worst_error(model, (ORIGINAL, 3)) < 1e-4
    with pytest.raises(UserError, match="max_position_embeddings"):
        worst_error(model, (ORIGINAL + 1, 3))


# ---------------------------------------------------------------- models that cannot be packed


def test_a_class_without_sdpa_is_refused_by_name(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("gemma2", head_dim=8, num_key_value_heads=2, layer_types=["full_attention"] * 2)
    with pytest.raises(UserError, match=r"Gemma2ForCausalLM has no SDPA attention.*use a different model"):
        attach(model, SDPA)


def test_a_model_that_masks_by_itself_is_refused(tiny_model: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="DogeAttention creates its own attention mask"):
        agreement.check(tiny_model("doge", num_key_value_heads=2), SDPA, torch.float32)


def test_a_model_that_fails_on_a_packed_row_is_refused_by_name(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen3")
    forward = model.model.forward
    model.model.forward = lambda input_ids, position_ids, use_cache: forward(input_ids, position_ids, use_cache)
    with pytest.raises(UserError, match=r"not supported by Qwen3ForCausalLM .TypeError.*packed_segments"):
        agreement.check(model, SDPA, torch.float32)


def test_attention_scaled_by_the_place_in_the_row_is_refused(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama4_text", head_dim=8, num_local_experts=2, intermediate_size_mlp=48,
                       layer_types=["full_attention"] * 2, no_rope_layers=[0, 0])  # fmt: skip
    with pytest.raises(UserError, match="scales attention by a token's position in the packed row"):
        attach(model, SDPA)
