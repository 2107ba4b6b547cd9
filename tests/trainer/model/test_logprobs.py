"""Log-probs of packed sequences are the model's own, and their logits never exist at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from areal_like.context_limit import ContextLimit
from areal_like.errors import UserError
from trainer.model import logprobs
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import Head, greedy_logprobs, token_logprobs
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


@pytest.mark.parametrize("chunk_tokens", [4, 1024])
@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_the_likeliest_tokens_are_those_of_single_sequences(
    family: str, chunk_tokens: int, tiny_model: Callable[..., Any], sequences: Any
) -> None:
    model, (tokens, masks) = tiny_model(family), sequences(LENGTHS)
    with torch.no_grad():
        for sequence in tokens:  # half of the tokens are the model's own choice
            logits_TV = model(input_ids=torch.from_numpy(sequence).long()[None], use_cache=False).logits[0]
            sequence[2::2] = logits_TV.argmax(-1)[1:-1:2].numpy()[: len(sequence[2::2])]
        expected_N, _ = _reference(model, tokens, masks, 1.0)
        best_N = []
        for sequence, mask in zip(tokens, masks, strict=True):
            ids = torch.from_numpy(sequence).long()
            best_N.append((model(input_ids=ids[None], use_cache=False).logits[0].argmax(-1)[:-1] == ids[1:])[mask[1:]])
    attach(model, SDPA)
    logprobs_N, is_greedy_N = greedy_logprobs(model, PackedSequences.build(tokens, masks), chunk_tokens=chunk_tokens)
    torch.testing.assert_close(logprobs_N, expected_N, rtol=1e-4, atol=1e-4)
    assert torch.equal(is_greedy_N, torch.cat(best_N))
    assert is_greedy_N.any()
    assert not is_greedy_N.all()
    assert not logprobs_N.requires_grad


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


# ---------------------------------------------------------------- the head


class Config:
    """A model that says only this of its head."""

    def __init__(self, **keys: Any) -> None:
        self.model_type = "x"
        vars(self).update(keys)

    def get_text_config(self) -> Config:
        return self


@pytest.mark.parametrize(
    ("keys", "scale", "cap"),
    [
        ({}, 1.0, None), ({"logit_scale": 0.25}, 0.25, None),
        ({"logit_scale": None, "logits_scaling": 8.0}, 0.125, None),
        ({"logits_scaling": 8.0, "model_type": "hyperclovax"}, 8.0, None), ({"final_logit_softcapping": 30}, 1.0, 30.0),
        ({"logit_scale": None, "final_logit_softcapping": None}, 1.0, None),
    ],
)  # fmt: skip
def test_head_is_what_the_config_says(keys: dict[str, Any], scale: float, cap: float | None) -> None:
    model: Any = SimpleNamespace(config=Config(**keys))
    assert Head.of(model, 0.5) == Head(scale, cap, 0.5)


@pytest.mark.parametrize(
    "head", [Head(1.0, None, 1.0), Head(0.5, None, 0.5), Head(0.5, None, 0.8), Head(2.0, 3.0, 0.7), Head(1.0, 3.0, 1.0)]
)
def test_logits_are_the_scaled_and_capped_output_over_the_temperature(head: Head) -> None:
    raw = torch.linspace(-5.0, 5.0, 12).view(3, 4)
    scaled = head.scale * raw
    capped = scaled if head.cap is None else head.cap * torch.tanh(scaled / head.cap)
    kept = raw.clone()
    with_grad = head.logits(kept)
    torch.testing.assert_close(with_grad, capped / head.temperature)
    assert torch.equal(kept, raw), "what autograd may need is not changed"
    with torch.no_grad():
        torch.testing.assert_close(head.logits(raw.clone()), capped / head.temperature)


@pytest.mark.parametrize("head", [Head(1.0, None, 1.0), Head(0.5, None, 0.8), Head(2.0, 3.0, 0.7)])
def test_gradient_of_the_raw_output_is_autograds(head: Head) -> None:
    raw = torch.linspace(-2.0, 2.0, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    gradient = torch.linspace(1.0, 2.0, 12, dtype=torch.float64).view(3, 4)
    logits = head.logits(raw)
    (expected,) = torch.autograd.grad(logits, raw, gradient)
    torch.testing.assert_close(head.raw_gradient(gradient.clone(), logits.detach().clone()), expected)


def _operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*size, generator=generator) for size in ((20, 6), (11, 6), (11,)))
    targets = torch.randint(0, 11, (20,), generator=generator)
    return hidden.to(dtype), weight, bias, targets


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_chunked_gradients_are_made_for_what_needs_one_alone(which: tuple[int, ...]) -> None:
    *operands, targets = _operands()
    head, results = Head(1.0, None, 0.7), []
    for with_chunks in (False, True):
        made = [x.clone().requires_grad_(place in which) for place, x in enumerate(operands)]
        if with_chunks:
            values, entropy = logprobs._ChunkedLogprobs.apply(*made, targets, head, torch.float32, 7, True)
        else:
            values, entropy = logprobs._direct(*made, targets, head, True)
        _objective(values, entropy).backward()
        results.append([x.grad for x in made])
    for plain, chunked in zip(*results, strict=True):
        assert (plain is None) == (chunked is None)
        if plain is not None:
            torch.testing.assert_close(chunked, plain, rtol=1e-4, atol=1e-5)


def test_gradient_of_the_entropy_alone_is_right() -> None:
    hidden, weight, bias, targets = _operands()
    head, results = Head(1.0, None, 0.7), []
    for with_chunks in (False, True):
        x = hidden.clone().requires_grad_()
        if with_chunks:
            _, entropy = logprobs._ChunkedLogprobs.apply(x, weight, bias, targets, head, torch.float32, 7, True)
        else:
            _, entropy = logprobs._direct(x, weight, bias, targets, head, True)
        (entropy * torch.linspace(0.0, 1.0, 20)).sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_without_entropy_there_is_none_to_differentiate() -> None:
    hidden, weight, bias, targets = _operands()
    values, entropy = logprobs._ChunkedLogprobs.apply(
        hidden.requires_grad_(), weight, bias, targets, Head(1.0, None, 1.0), torch.float32, 7, False
    )
    assert values.requires_grad
    assert not entropy.requires_grad
    assert not entropy.any()


def test_sixteen_bit_products_are_close_and_gradients_have_the_type_of_their_parameter() -> None:
    head, results = Head(1.0, None, 1.0), []
    for dtype in (torch.float32, torch.bfloat16):
        *operands, targets = _operands()
        made = [x.requires_grad_() for x in operands]
        values, _ = logprobs._ChunkedLogprobs.apply(*made, targets, head, dtype, 7, False)
        assert values.dtype == torch.float32
        _objective(values, None).backward()
        assert [x.grad.dtype for x in made if x.grad is not None] == [torch.float32] * 3
        results.append([values.detach(), *(x.grad for x in made)])
    for exact, rough in zip(*results, strict=True):
        assert 0 < (rough - exact).norm() / exact.norm() < 0.05


def test_cpu_multiplies_in_float32_and_others_in_the_type_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(kind: str) -> torch.dtype:
        hidden: Any = SimpleNamespace(device=SimpleNamespace(type=kind))
        return logprobs._compute_dtype(hidden)

    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    for is_on in (False, True):
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind, flag=is_on: flag)
        assert of("cpu") == torch.float32
        assert of("cuda") == (torch.bfloat16 if is_on else torch.float32)


def test_sequence_beyond_the_models_positions_is_refused(
    tiny_model: Callable[..., Any], sequences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3")
    attach(model, SDPA)
    monkeypatch.setattr(logprobs, "model_context", lambda config: ContextLimit(30))
    for length, is_refused in ((30, False), (31, True)):
        packed = PackedSequences.build(*sequences((9, length)))
        with pytest.raises(UserError, match="31") if is_refused else contextlib.nullcontext():
            logprobs.hidden_states(model, packed)


@pytest.mark.parametrize(
    ("dtype", "room", "is_direct"),
    [(torch.float32, 0, True), (torch.float32, -1, False), (torch.bfloat16, 0, False), (torch.bfloat16, -1, False)],
)
def test_only_few_logits_in_float32_are_kept_in_one_piece(
    tiny_model: Callable[..., PreTrainedModel], sequences: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype, room: int, is_direct: bool,
) -> None:  # fmt: skip
    """More would be a micro-batch's logits at once."""
    model, packed = tiny_model(), PackedSequences.build(*sequences((9, 6)))
    attach(model, AttentionChoice("sdpa", "test"))
    taken: list[str] = []
    direct, chunked = logprobs._direct, logprobs._ChunkedLogprobs.apply
    monkeypatch.setattr(logprobs, "DIRECT_LOGITS", packed.num_predictions * model.config.vocab_size + room)
    monkeypatch.setattr(logprobs, "_compute_dtype", lambda hidden: dtype)
    monkeypatch.setattr(logprobs, "_direct", lambda *args: taken.append("direct") or direct(*args))
    monkeypatch.setattr(logprobs._ChunkedLogprobs, "apply", lambda *args: taken.append("chunks") or chunked(*args))
    found_N, entropy_N = token_logprobs(model, packed, temperature=1.0, chunk_tokens=4, with_entropy=False)
    assert taken == ["direct" if is_direct else "chunks"]
    assert len(found_N) == packed.num_predictions
    assert entropy_N is None
