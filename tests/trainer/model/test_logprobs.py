"""Log-probs of packed sequences are the model's own, and their logits never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from trainer.model import logprobs
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import Head, token_logprobs
from trainer.model.packed import PackedSequences

SDPA = AttentionChoice("sdpa", "test")
LENGTHS = (9, 30, 5, 31, 17)
TEMPERATURE = 0.8


def _reference(
    model: PreTrainedModel, tokens: list[Any], masks: list[Any], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers, one sequence at a time: log-probs and entropies of the masked tokens."""
    model.set_attn_implementation("eager")
    picked, entropies = [], []
    for sequence, mask in zip(tokens, masks, strict=True):
        ids = torch.from_numpy(sequence).long()
        logp_TV = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0] / temperature, -1)[:-1]
        keep = torch.from_numpy(mask)[1:]
        picked.append(logp_TV.gather(-1, ids[1:, None])[:, 0][keep])
        entropies.append(-(logp_TV.exp() * logp_TV).sum(-1)[keep])
    return torch.cat(picked), torch.cat(entropies)


def _gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def _objective(logprobs_N: torch.Tensor, entropy_N: torch.Tensor | None) -> torch.Tensor:
    weights_N = torch.linspace(-1.0, 2.0, len(logprobs_N))
    loss = (weights_N * logprobs_N).sum()
    return loss if entropy_N is None else loss + 0.3 * (weights_N.flip(0) * entropy_N).sum()


@pytest.mark.parametrize("path", ["direct", "chunked"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "granite", "cohere", "nanochat"])
def test_packed_logprobs_entropies_and_gradients_equal_those_of_single_sequences(
    family: str, path: str, tiny_model: Callable[..., Any], sequences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "DIRECT_LOGITS", 1 << 30 if path == "direct" else 0)
    model, (tokens, masks) = tiny_model(family), sequences(LENGTHS)
    expected_logprobs_N, expected_entropy_N = _reference(model, tokens, masks, TEMPERATURE)
    _objective(expected_logprobs_N, expected_entropy_N).backward()
    expected = _gradients(model)
    attach(model, SDPA)
    ours_N, entropy_N = token_logprobs(
        model, PackedSequences.build(tokens, masks), temperature=TEMPERATURE, chunk_tokens=13, with_entropy=True
    )
    assert entropy_N is not None
    assert (ours_N - expected_logprobs_N).abs().max() < 1e-5
    assert (entropy_N - expected_entropy_N).abs().max() < 1e-5
    _objective(ours_N, entropy_N).backward()
    ours = _gradients(model)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_chunked_gradient_without_entropy_and_with_a_bias_equals_plain_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 6, generator=generator, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(11, 6, generator=generator, requires_grad=True)
    bias = torch.randn(11, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (20,), generator=generator)
    head = Head(scale=0.5, cap=2.0, temperature=0.7)
    results = []
    for with_chunks in (False, True):
        if with_chunks:
            values, _ = logprobs._ChunkedLogprobs.apply(hidden, weight, bias, targets, head, torch.float32, 7, False)
        else:
            values, _ = logprobs._direct(hidden, weight, bias, targets, head, False)
        _objective(values, None).backward()
        results.append([values.detach(), *(x.grad.clone() for x in (hidden, weight, bias))])
        hidden.grad = weight.grad = bias.grad = None
    for plain, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-4, atol=1e-5)


class _LargestTensor(TorchDispatchMode):
    """Remembers the most numbers any one result had whose last dimension is the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.numel = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and value.ndim and value.shape[-1] == self.vocabulary:
                self.numel = max(self.numel, value.numel())
        return result


def test_a_micro_batchs_logits_never_exist_at_once(tiny_model: Callable[..., Any], sequences: Any) -> None:
    vocabulary, chunk = 50_021, 40  # more than the hidden size, so that the head itself is no larger
    model = tiny_model("qwen3", vocab_size=vocabulary)
    attach(model, SDPA)
    packed = PackedSequences.build(*sequences((60, 70, 80)))
    assert packed.num_predictions * vocabulary > 2 * logprobs.DIRECT_LOGITS
    with _LargestTensor(vocabulary) as largest:
        values_N, _ = token_logprobs(model, packed, temperature=1.0, chunk_tokens=chunk, with_entropy=True)
        values_N.sum().backward()
    assert 0 < largest.numel <= chunk * vocabulary


def test_small_logits_are_kept_in_one_piece(
    tiny_model: Callable[..., Any], sequences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3")
    attach(model, SDPA)
    monkeypatch.setattr(logprobs._ChunkedLogprobs, "apply", lambda *_: pytest.fail("chunked"))
    token_logprobs(
        model, PackedSequences.build(*sequences(LENGTHS)), temperature=1.0, chunk_tokens=4, with_entropy=True
    )


def test_only_masked_positions_get_logits(tiny_model: Callable[..., Any], sequences: Any) -> None:
    model = tiny_model("qwen3")
    attach(model, SDPA)
    packed = PackedSequences.build(*sequences(LENGTHS))
    with torch.no_grad(), _LargestTensor(model.config.vocab_size) as largest:
        token_logprobs(model, packed, temperature=1.0, chunk_tokens=512, with_entropy=False)
    assert (
        largest.numel == packed.num_predictions * model.config.vocab_size < packed.num_tokens * model.config.vocab_size
    )


def test_transformers_own_attention_is_refused(tiny_model: Callable[..., Any], sequences: Any) -> None:
    with pytest.raises(AssertionError, match="attach"):
        token_logprobs(
            tiny_model("qwen3"),
            PackedSequences.build(*sequences((5,))),
            temperature=1.0,
            chunk_tokens=8,
            with_entropy=False,
        )


def test_softmax_is_float32_under_bfloat16_autocast(tiny_model: Callable[..., Any], sequences: Any) -> None:
    model = tiny_model("qwen3", initializer_range=0.05)
    attach(model, SDPA)
    packed = PackedSequences.build(*sequences(LENGTHS))
    with torch.no_grad():
        exact_N, _ = token_logprobs(model, packed, temperature=1.0, chunk_tokens=8, with_entropy=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough_N, entropy_N = token_logprobs(model, packed, temperature=1.0, chunk_tokens=8, with_entropy=True)
    assert rough_N.dtype == torch.float32
    assert entropy_N is not None
    assert entropy_N.dtype == torch.float32
    assert (rough_N - exact_N).abs().max() < 0.05
