"""Claims about the proof that packed log-probs are the model's own: where it looks, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_like.context_limit import ContextLimit
from areal_like.errors import UserError
from trainer.model import agreement
from trainer.model.agreement import LENGTHS, TOLERANCE_NATS, check
from trainer.model.attention import AttentionChoice, attach
from trainer.model.packed import PackedSequences

SDPA = AttentionChoice("sdpa", "test")
CPU = torch.device("cpu")


def packed_off_by(
    difference: float, monkeypatch: pytest.MonkeyPatch, seen: list[PackedSequences] | None = None
) -> None:
    """The packed log-probs differ from the single ones by so much, in one place."""
    right = agreement._packed

    def wrong(model: Any, packed: PackedSequences, choice: AttentionChoice, temperature: float) -> torch.Tensor:
        if seen is not None:
            seen.append(packed)
        logprobs_N = right(model, packed, choice, temperature)
        logprobs_N[5] += difference
        return logprobs_N

    monkeypatch.setattr(agreement, "_packed", wrong)


def test_largest_difference_is_returned_and_the_attention_stays_ours(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_off_by(-5e-4, monkeypatch)
    model = tiny_model()
    assert check(model, SDPA, torch.float32) == pytest.approx(5e-4, rel=0.05)
    assert model.config._attn_implementation == SDPA.implementation


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.25)])
def test_difference_beyond_what_rounding_makes_is_refused(
    dtype: torch.dtype, tolerance: float, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TOLERANCE_NATS[dtype] == tolerance
    packed_off_by(1.5 * tolerance, monkeypatch)
    with pytest.raises(UserError, match=r"log-probs of Qwen3ForCausalLM differ by .* nats between packed .*\(sdpa att"):
        check(tiny_model(initializer_range=0.02), SDPA, dtype)


def test_logprobs_that_are_not_finite_name_the_weights(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_off_by(float("nan"), monkeypatch)
    with pytest.raises(UserError, match="the log-probs of Qwen3ForCausalLM are not finite") as raised:
        check(tiny_model(), SDPA, torch.float32)
    assert "weights or config.json may be damaged" in raised.value.remedy


def test_attention_is_ours_again_also_where_the_models_own_fails(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("broken")

    monkeypatch.setattr(agreement, "_alone", fail)
    model = tiny_model()
    with pytest.raises(RuntimeError, match="broken"):
        check(model, SDPA, torch.float32)
    assert model.config._attn_implementation == SDPA.implementation


def test_sequences_differ_in_tokens_and_lengths_and_one_ends_at_the_last_position(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PackedSequences] = []
    packed_off_by(0.0, monkeypatch, seen)
    check(tiny_model(), SDPA, torch.float32, max_context=100)
    (packed,) = seen
    assert packed.lengths == LENGTHS
    assert len({*LENGTHS}) == 3
    assert packed.positions_T.tolist() == [*range(9), *range(7), *range(92, 100)]
    assert packed.num_predictions == sum(LENGTHS) - 3, "every token but the first is predicted"
    parts = packed.tokens_T.split(list(LENGTHS))
    assert len({part[0].item() for part in parts}) == 3
    assert all(len({*part.tolist()}) > 5 for part in parts)


@pytest.mark.parametrize(
    ("limit", "max_context", "starts"),
    [
        (None, None, (0, 0)), (None, 8, (0, 0)), (None, 9, (0, 0, 1)), (None, 50, (0, 0, 42)),
        (30, None, (0, 0, 22)), (30, 20, (0, 0, 12)), (8, None, (0, 0)),
    ],
)  # fmt: skip
def test_third_sequence_ends_where_the_longest_one_does(
    limit: int | None, max_context: int | None, starts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "model_context", lambda config: None if limit is None else ContextLimit(limit))
    model: Any = SimpleNamespace(config=None)
    assert tuple(agreement._starts(model, max_context)) == starts


@pytest.mark.parametrize(
    ("name", "where", "words"),
    [
        ("sdpa", "model", r"packed sequences are not supported by Identity \(ValueError: bad shape\)"),
        ("varlen", "trainer.attention", r"varlen attention does not support Identity \(ValueError: bad shape\)"),
    ],
)
def test_bare_error_of_a_pass_becomes_one_sentence(
    name: Any, where: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("bad shape\nand more")

    monkeypatch.setattr(agreement, "token_logprobs", fail)
    model: Any = torch.nn.Identity()
    with pytest.raises(UserError, match=words) as raised:
        agreement._packed(model, None, AttentionChoice(name, "test"), 1.0)  # type: ignore[arg-type]
    assert raised.value.where == where


@pytest.mark.parametrize("error", [UserError("one sentence already"), torch.OutOfMemoryError("no room")])
def test_sentence_and_lack_of_memory_stay_what_they_are(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(agreement, "token_logprobs", fail)
    with pytest.raises(type(error)) as raised:
        agreement._packed(None, None, SDPA, 1.0)  # type: ignore[arg-type]
    assert raised.value is error


def test_both_passes_are_at_the_temperature_and_without_gradients(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = tiny_model(), []
    right = agreement.token_logprobs

    def watched(*arguments: Any, **options: Any) -> Any:
        asked.append((options["temperature"], options["with_entropy"], torch.is_grad_enabled()))
        return right(*arguments, **options)

    monkeypatch.setattr(agreement, "token_logprobs", watched)
    check(model, SDPA, torch.float32, temperature=0.3)
    assert asked == [(0.3, False, False)]
    tokens = torch.arange(4).numpy()
    attach(model, SDPA)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        warm, cold = (agreement._alone(model, tokens, 0, CPU, t) for t in (2.0, 0.5))
        later = agreement._alone(model, tokens, 40, CPU, 2.0)
    assert not torch.allclose(warm, cold)
    torch.testing.assert_close(warm, later, rtol=1e-3, atol=1e-3)  # rotary positions are relative
    assert len(warm) == 3
