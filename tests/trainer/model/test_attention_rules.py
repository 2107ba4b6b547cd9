"""Claims about packed attention's rules: which kernel is chosen and why, what is refused."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from areal_like.errors import UserError
from trainer.model.attention import AttentionChoice, attach, choose, packed_attention
from trainer.model.segments import make_segments

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# ---------------------------------------------------------------- choosing


def test_reason_says_what_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose("auto", CPU).reason == (
        "auto: cpu has no variable-length kernel; using SDPA, one call per group of similar lengths"
    )
    assert choose("sdpa", CUDA) == AttentionChoice("sdpa", "set in the configuration")
    assert choose("auto", CUDA, "bfloat16").reason == (
        "auto: torch.nn.attention.varlen is not installed; flash_attn is not installed"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose("auto", CUDA, "bfloat16").reason == "auto: torch.nn.attention.varlen is available"
    for name in ("varlen", "flash_attn"):
        assert choose(name, CUDA, "bfloat16") == AttentionChoice(name, "set in the configuration")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "flash_attn" else None)
    assert choose("auto", CUDA, "bfloat16").reason == (
        "auto: flash-attn is installed (torch.nn.attention.varlen is not installed)"
    )


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True), ((8, 6), True), ((9, 0), True)])
def test_sixteen_bit_kernels_need_an_ampere_gpu(
    capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose("auto", CUDA, "bfloat16").name == ("varlen" if fits else "sdpa")
    if not fits:
        with pytest.raises(UserError, match=r"requires compute capability 8.0 \(Ampere\) or newer"):
            choose("flash_attn", CUDA, "bfloat16")


MAX_FLASH_HEAD_DIM = 256
"""What the kernels take."""


@pytest.mark.parametrize(("head_dim", "fits"), [(MAX_FLASH_HEAD_DIM, True), (MAX_FLASH_HEAD_DIM + 8, False)])
def test_heads_that_are_too_wide_for_a_flash_kernel_are_refused(head_dim: int, fits: bool, tiny_model: Any) -> None:
    model = tiny_model("qwen3", head_dim=head_dim)
    attach(model, AttentionChoice("sdpa", "test"))
    if fits:
        attach(model, AttentionChoice("varlen", "test"))
        return
    with pytest.raises(UserError, match=f"head dimensions up to {MAX_FLASH_HEAD_DIM}, but qwen3 has {head_dim}"):
        attach(model, AttentionChoice("varlen", "test"))


def test_width_of_a_head_that_no_config_names_is_its_share_of_the_hidden_size(tiny_model: Any) -> None:
    model = tiny_model("llama", hidden_size=4 * (MAX_FLASH_HEAD_DIM + 8))
    model.config.head_dim = None
    with pytest.raises(UserError, match=f"has {MAX_FLASH_HEAD_DIM + 8}"):
        attach(model, AttentionChoice("flash_attn", "test"))


# ---------------------------------------------------------------- the function


def attended(module: Any = None, mask: Any = None, segments: Any = None, **more: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    segments = make_segments((4, 5)) if segments is None else segments
    out, weights = packed_attention(
        "sdpa", module or torch.nn.Identity(), query, key, value, mask, packed_segments=segments, **more
    )
    assert weights is None
    assert out.shape == (1, 9, 4, 8)
    return out


def test_scores_are_scaled_by_the_width_of_a_head_where_the_model_does_not_say() -> None:
    assert torch.equal(attended(), attended(scaling=8**-0.5))
    assert not torch.allclose(attended(), attended(scaling=0.9))


def test_one_sequence_alone_is_plain_causal_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attended(segments=make_segments((9,))), plain.transpose(1, 2))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"mask": torch.ones(1)}, "creates its own attention mask"),
        ({"module": types.SimpleNamespace(is_causal=False)}, "does not use causal attention"),
        ({"is_causal": False}, "does not use causal attention"),
        ({"sliding_window": 4}, "has a sliding window of 4 tokens, but a sequence has 5"),
        ({"softcap": 3.0}, "requires softcap, which packed training does not support"),
        ({"s_aux": torch.ones(1)}, "requires s_aux, which packed training does not support"),
        ({"position_bias": torch.ones(1)}, "requires position_bias, which packed training does not support"),
    ],
)
def test_what_packing_cannot_do_right_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        attended(**more)


def test_harmless_options_of_a_layer_change_nothing() -> None:
    plain = attended()
    for more in (
        {"sliding_window": 5},
        {"sliding_window": None},
        {"softcap": None},
        {"is_causal": True},
        {"dropout": 0.5},
    ):
        assert torch.equal(attended(**more), plain)
    assert torch.equal(attended(types.SimpleNamespace(is_causal=True)), plain)


def test_boundaries_of_another_batch_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="another batch"):
        attended(segments=make_segments((4, 4)))


def test_flash_kernel_computes_without_dropout_and_as_deterministically_as_torch_is_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, Any]] = []

    def kernel(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **options: Any) -> Any:
        assert cu_q.tolist() == cu_k.tolist() == [0, 4, 9]
        assert max_q == max_k == 5
        seen.append(options)
        return q

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=kernel))
    query, key, value = (torch.ones(1, heads, 9, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    for is_deterministic in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda flag=is_deterministic: flag)
        packed_attention(
            "flash_attn",
            torch.nn.Identity(),
            query,
            key,
            value,
            None,
            scaling=0.3,
            packed_segments=make_segments((4, 5)),
        )
    common = {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": True}
    assert seen == [{**common, "deterministic": False}, {**common, "deterministic": True}]


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            "of unsupported types: sliding_attention",
        ),
        ("mistral", {"sliding_window": 8}, "uses sliding-window attention with a window of 8 tokens"),
    ],
)
def test_model_with_other_than_full_attention_is_refused(
    model_type: str, changes: dict[str, Any], words: str, tiny_model: Any
) -> None:
    with pytest.raises(UserError, match=words):
        attach(tiny_model(model_type, **changes), AttentionChoice("sdpa", "test"))


def test_sliding_window_that_is_switched_off_is_none(tiny_model: Any) -> None:
    model = tiny_model("qwen2", sliding_window=8, use_sliding_window=False)
    model.config.layer_types = None
    model.config.sliding_window = 8
    attach(model, AttentionChoice("sdpa", "test"))
    model.config.use_sliding_window = True
    with pytest.raises(UserError, match="sliding-window attention with a window of 8 tokens"):
        attach(model, AttentionChoice("sdpa", "test"))


def test_model_that_scales_attention_by_the_place_in_the_row_is_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    model.config.attn_temperature_tuning = True
    with pytest.raises(UserError, match="scales attention by a token's position in the packed row"):
        attach(model, AttentionChoice("sdpa", "test"))
