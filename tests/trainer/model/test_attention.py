"""Packed attention: right on every sequence, chosen out loud, refused where it cannot be right."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError
from trainer.model import agreement
from trainer.model.attention import (
    AttentionChoice,
    attach,
    choose,
    implementation_name,
    is_attached,
    packed_attention,
)
from trainer.model.logprobs import hidden_states
from trainer.model.packed import PackedSequences
from trainer.model.segments import make_segments

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SDPA = AttentionChoice("sdpa", "test")
LENGTHS = (9, 30, 5, 31, 17, 64)


def _logits_apart(model: PreTrainedModel, tokens: list[np.ndarray]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = [model(input_ids=torch.from_numpy(t).long()[None], use_cache=False).logits[0] for t in tokens]
    return torch.cat(rows)


def _logits_packed(model: PreTrainedModel, packed: PackedSequences) -> torch.Tensor:
    attach(model, SDPA)
    with torch.no_grad():
        return model.get_output_embeddings()(hidden_states(model, packed))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_packed_sequences_do_not_see_each_other(family: str, tiny_model: Callable[..., Any], sequences: Any) -> None:
    model, (tokens, masks) = tiny_model(family), sequences(LENGTHS)
    apart = _logits_apart(model, tokens)
    packed = _logits_packed(model, PackedSequences.build(tokens, masks))
    assert (packed - apart).abs().max() < 1e-5


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_transformers_own_ways_are_silently_wrong_on_packed_sequences_and_ours_is_not(
    implementation: str, tiny_model: Callable[..., Any], sequences: Any
) -> None:
    model, (tokens, masks) = tiny_model("qwen3"), sequences(LENGTHS)
    apart = _logits_apart(model, tokens)
    packed = PackedSequences.build(tokens, masks)
    ids, positions = packed.tokens_T[None], packed.positions_T[None]
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        default = model(input_ids=ids, position_ids=positions).logits[0]
        ones = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
    assert (default - apart).abs().max() > 0.1
    assert (ones.logits[0] - apart).abs().max() > 0.1
    assert (_logits_packed(model, packed) - apart).abs().max() < 1e-5


def test_gradients_through_padded_groups_equal_those_of_single_sequences(
    tiny_model: Callable[..., Any], sequences: Any
) -> None:
    model, (tokens, masks) = tiny_model("qwen3"), sequences(LENGTHS)
    attach(model, SDPA)

    def gradients(batches: list[PackedSequences]) -> list[torch.Tensor]:
        model.zero_grad()
        for packed in batches:
            hidden_TD = hidden_states(model, packed)
            (hidden_TD * torch.linspace(-1, 1, hidden_TD.shape[1])).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    together = gradients([PackedSequences.build(tokens, masks)])
    apart = gradients([PackedSequences.build([t], [m]) for t, m in zip(tokens, masks, strict=True)])
    for ours, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_gradient_checkpointing_changes_nothing(tiny_model: Callable[..., Any], sequences: Any) -> None:
    tokens, masks = sequences(LENGTHS)
    packed = PackedSequences.build(tokens, masks)
    results = []
    for is_on in (False, True):
        model = tiny_model("qwen3")
        attach(model, SDPA)
        if is_on:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        hidden_states(model, packed).square().sum().backward()
        results.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert torch.equal(*results)


def test_similar_lengths_share_a_call_and_padding_stays_small() -> None:
    rng = np.random.default_rng(0)
    lengths = (10 + rng.geometric(0.03, 400)).tolist()
    segments = make_segments(lengths)
    assert sum(number for number, _ in segments.groups) == 400
    assert len(segments.groups) < 25
    assert len(segments.to_padded_P) < 1.25 * sum(lengths)
    assert torch.equal(segments.to_padded_P[segments.to_packed_T], torch.arange(sum(lengths)))
    assert segments.longest == max(lengths)
    assert segments.cu_seqlens.tolist()[-1] == sum(lengths)


# ---------------------------------------------------------------- choosing


def test_auto_on_a_cpu_is_sdpa_with_a_reason() -> None:
    choice = choose("auto", CPU)
    assert choice.name == "sdpa"
    assert "cpu" in choice.reason


@pytest.mark.parametrize("name", ["flash_attn", "varlen"])
def test_naming_a_kernel_that_cannot_run_here_is_an_error(name: str) -> None:
    with pytest.raises(UserError, match="CUDA"):
        choose(name, CPU)


def test_naming_flash_attn_where_it_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed"):
        choose("flash_attn", CUDA, "bfloat16")


def test_auto_on_cuda_prefers_varlen_then_flash_attn_then_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"torch.nn.attention.varlen", "flash_attn"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in present else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose("auto", CUDA, "bfloat16").name == "varlen"
    present.remove("torch.nn.attention.varlen")
    assert choose("auto", CUDA, "bfloat16").name == "flash_attn"
    present.remove("flash_attn")
    assert choose("auto", CUDA, "bfloat16").name == "sdpa"


def test_sixteen_bit_kernels_are_not_chosen_for_float32() -> None:
    choice = choose("auto", CUDA, "float32")
    assert choice.name == "sdpa"
    with pytest.raises(UserError, match="16 bits"):
        choose("varlen", CUDA, "float32")


def test_an_unknown_kernel_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match="auto, flash_attn, varlen or sdpa"):
        choose("flex", CPU)


def test_registered_names_never_look_like_transformers_own_flash_attention() -> None:
    names = [implementation_name(kernel) for kernel in ("sdpa", "varlen", "flash_attn")]
    assert len(set(names)) == 3
    assert not any("flash" in name for name in names)


def test_the_registered_name_is_not_saved_with_the_config(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen3")
    attach(model, SDPA)
    assert is_attached(model)
    assert "areal_like" not in model.config.to_json_string(use_diff=False)


# ---------------------------------------------------------------- refusing


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
        ("mistral", {"num_key_value_heads": 2}),
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 8}),
        ("mamba", {}),
        ("bloom", {"n_layer": 1, "n_head": 4}),
    ],
)
def test_architectures_that_cannot_be_packed_are_refused_with_a_sentence(
    family: str, changes: dict[str, Any], tiny_model: Callable[..., Any]
) -> None:
    with pytest.raises(UserError, match="model"):
        attach(tiny_model(family, **changes), SDPA)


def test_a_model_that_drops_the_boundaries_is_refused(tiny_model: Callable[..., Any], sequences: Any) -> None:
    model, (tokens, masks) = tiny_model("qwen3"), sequences((5, 6))
    attach(model, SDPA)
    packed = PackedSequences.build(tokens, masks)
    with pytest.raises(UserError, match="does not pass the boundaries of packed sequences"):
        model(input_ids=packed.tokens_T[None], position_ids=packed.positions_T[None], use_cache=False)


@pytest.mark.parametrize("family", ["qwen3", "granite", "cohere", "nanochat"])
def test_agreement_check_passes_where_heads_scale_or_cap_their_logits(
    family: str, tiny_model: Callable[..., Any]
) -> None:
    assert agreement.check(tiny_model(family), SDPA, torch.float32, temperature=0.7) < 1e-4


def test_agreement_check_refuses_a_layer_that_mixes_neighbouring_sequences(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen3")
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs).cumsum(1)  # like a recurrence over the row
    with pytest.raises(UserError, match="which can be trained on packed sequences"):
        agreement.check(model, SDPA, torch.float32)


def test_agreement_check_refuses_an_unknown_transformation_of_the_logits(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen3")
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 0.5 * forward(hidden)
    with pytest.raises(UserError, match="differ by"):
        agreement.check(model, SDPA, torch.float32)


# ---------------------------------------------------------------- calls to the variable-length kernels, played on a CPU


def _per_segment(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float) -> torch.Tensor:
    rows = []
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        piece = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*piece, is_causal=True, scale=scale, enable_gqa=True)
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)


def _varlen_oldest(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool = False
) -> Any:
    assert is_causal
    assert query.shape[1] == key.shape[1]
    return _per_segment(query, key, value, cu_seq_q, query.shape[-1] ** -0.5)


def _varlen_newest(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Any:
    assert window_size == (-1, 0)
    assert enable_gqa
    assert scale is not None
    assert max_q == max_k == max(LENGTHS)
    return _per_segment(query, key, value, cu_seq_q, scale)


def _flash_attn_2(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    causal: bool,
    softmax_scale: float,
    **_: Any,
) -> Any:
    assert causal
    return _per_segment(q, k, v, cu_q, softmax_scale)


@pytest.mark.parametrize("played", [_varlen_oldest, _varlen_newest, _flash_attn_2])
def test_kernels_are_called_by_the_signature_they_have(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = "flash_attn" if played is _flash_attn_2 else "varlen"
    module = types.SimpleNamespace(varlen_attn=played, flash_attn_varlen_func=played)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen" if kernel == "varlen" else "flash_attn", module)
    segments, generator = make_segments(LENGTHS), torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(LENGTHS), 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    layer = torch.nn.Identity()
    ours, _ = packed_attention(kernel, layer, query, key, value, None, scaling=0.3, packed_segments=segments)
    sdpa, _ = packed_attention("sdpa", layer, query, key, value, None, scaling=0.3, packed_segments=segments)
    torch.testing.assert_close(ours, sdpa)
    with pytest.raises(UserError, match="16 bits"):
        packed_attention(kernel, layer, query.float(), key.float(), value.float(), None, packed_segments=segments)


@pytest.mark.parametrize("kernel", ["varlen", "flash_attn"])
def test_under_autocast_the_16_bit_kernels_get_16_bits(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Any], sequences: Any
) -> None:
    """Rotation with float32 angles and a norm with a float32 weight make queries and keys float32 again."""
    played = _flash_attn_2 if kernel == "flash_attn" else _varlen_newest
    module = types.SimpleNamespace(varlen_attn=played, flash_attn_varlen_func=played)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen" if kernel == "varlen" else "flash_attn", module)
    model, packed = tiny_model("qwen3"), PackedSequences.build(*sequences(LENGTHS))
    results = []
    for name in (kernel, "sdpa"):
        attach(model, AttentionChoice(name, "a test"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(hidden_states(model, packed))
    torch.testing.assert_close(results[0], results[1], rtol=0.05, atol=0.05)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA device")
@pytest.mark.parametrize("name", ["varlen", "flash_attn", "sdpa"])
def test_cuda_kernels_agree_with_sdpa_on_the_cpu(name: str, tiny_model: Callable[..., Any], sequences: Any) -> None:
    model, (tokens, masks) = tiny_model("qwen3", head_dim=64), sequences(LENGTHS)
    try:
        choice = choose(name, CUDA, "bfloat16")
    except UserError as error:
        pytest.skip(str(error))
    packed = PackedSequences.build(tokens, masks)
    attach(model, SDPA)
    expected = hidden_states(model, packed)
    expected.square().sum().backward()
    expected_gradient = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    model.cuda()
    agreement.check(model, choice, torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours = hidden_states(model, packed.to(CUDA))
    ours.square().sum().backward()
    torch.testing.assert_close(ours.float().cpu(), expected, rtol=0.1, atol=0.1)
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad.cpu()
    assert torch.nn.functional.cosine_similarity(gradient.flatten(), expected_gradient.flatten(), dim=0) > 0.98
