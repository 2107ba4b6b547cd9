"""The attention function for packed sequences, registered with transformers, with a choice of three kernels.

The boundaries of sequences are in segments.py. Masks, caches, dropout, sliding windows, attention sinks, soft-capped
scores, position biases and non-causal attention are not supported: what a packed pass cannot compute correctly raises
an error here.

transformers builds a block-diagonal mask from position_ids only if no attention mask and no cache are given; with its
default (use_cache on), packed sequences silently attend to each other. For a registered name that is absent from its
mask registry it builds no mask. The boundaries are then passed as the model keyword `packed_segments`, and a model that
drops the keyword is refused because the function does not receive it.

With a group of ranks (`Segments.sequence_group`) the row is split over them: each passes its part of the tokens with
all heads, attends over the whole row with its part of the heads, and returns its tokens again (sequence_group.py).

Shapes: T packed tokens, P of them after padding inside groups, B sequences, H query heads, K key/value heads,
D width of a head.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from areal_like.errors import UserError
from trainer.model.gather import gather_rows
from trainer.model.segments import Segments

Kernel = Literal["sdpa", "varlen", "flash_attn"]

PREFIX = "areal_like_"
"""Prefix of the function's names in transformers: `areal_like_sdpa`, `areal_like_varlen` and `areal_like_fa`."""

MAX_FLASH_HEAD_DIM = 256


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel of a run and the reason for it; the caller prints and records them."""

    name: Kernel
    reason: str

    @property
    def implementation(self) -> str:
        """The name in transformers (`attn_implementation`)."""
        return implementation_name(self.name)


def implementation_name(kernel: Kernel) -> str:
    """Return the name of a kernel for `register`. It must not contain "flash", which transformers treats as its own."""
    return PREFIX + {"sdpa": "sdpa", "varlen": "varlen", "flash_attn": "fa"}[kernel]


# ---------------------------------------------------------------- choosing


def choose(setting: str, device: torch.device, precision: str = "float32") -> AttentionChoice:
    """Choose the kernel for `setting` (auto, flash_attn, varlen, sdpa) on `device` at `precision`.

    Raises UserError if a named kernel cannot run on this machine, device or precision.
    """
    if setting not in ("auto", "flash_attn", "varlen", "sdpa"):
        raise UserError(
            f"{setting!r} is not an attention kernel",
            where="trainer.attention",
            remedy="set trainer.attention to auto, flash_attn, varlen or sdpa",
        )
    device = torch.device(device)
    if setting == "sdpa":
        return AttentionChoice("sdpa", "set in the configuration")
    if setting in ("flash_attn", "varlen"):
        kernel: Kernel = "flash_attn" if setting == "flash_attn" else "varlen"
        obstacle = _obstacle(kernel, device, precision)
        if obstacle:
            what = f"{setting} cannot be used: {obstacle}"
            raise UserError(what, where="trainer.attention", remedy="set trainer.attention to auto or sdpa")
        return AttentionChoice(kernel, "set in the configuration")
    if device.type != "cuda":
        return AttentionChoice(
            "sdpa",
            f"auto: {device.type} has no variable-length kernel; using SDPA, one call per group of similar lengths",
        )
    varlen = _obstacle("varlen", device, precision)
    if varlen is None:
        return AttentionChoice("varlen", "auto: torch.nn.attention.varlen is available")
    flash = _obstacle("flash_attn", device, precision)
    if flash is None:
        return AttentionChoice("flash_attn", f"auto: flash-attn is installed ({varlen})")
    return AttentionChoice("sdpa", f"auto: {varlen}; {flash}")


def _obstacle(kernel: Kernel, device: torch.device, precision: str) -> str | None:
    """Return why `kernel` cannot run here, or None."""
    module = "torch.nn.attention.varlen" if kernel == "varlen" else "flash_attn"
    if device.type != "cuda":
        return f"{kernel} requires a CUDA device, not {device.type}"
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    if precision != "bfloat16":
        return f"{kernel} computes in 16 bits, but the precision is {precision}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{kernel} requires compute capability 8.0 (Ampere) or newer"
    return None


def register() -> None:
    """Register our function with transformers. Further calls change nothing."""
    kernels: tuple[Kernel, ...] = ("sdpa", "varlen", "flash_attn")
    for kernel in kernels:
        AttentionInterface.register(implementation_name(kernel), functools.partial(packed_attention, kernel))


def attach(model: PreTrainedModel, choice: AttentionChoice) -> None:
    """Make `model` use our attention function. Raises UserError for an architecture whose layers cannot be packed."""
    register()
    config = model.config.get_text_config()
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    if kinds - {"full_attention"}:
        raise UserError(
            f"{config.model_type} has layers of unsupported types: {', '.join(sorted(kinds - {'full_attention'}))}",
            where="model",
            remedy="use a different model; only full causal attention can be trained on packed sequences",
        )
    if getattr(config, "sliding_window", None) and not kinds and getattr(config, "use_sliding_window", True):
        raise UserError(
            f"{config.model_type} uses sliding-window attention with a window of {config.sliding_window} tokens, which "
            "packed training does not support",
            where="model",
            remedy="set sliding_window to null in the config.json of the model if your sequences are shorter than the "
            "window, or use a different model",
        )
    if getattr(config, "attn_temperature_tuning", False):
        raise UserError(
            f"{config.model_type} scales attention by a token's position in the packed row instead of in its sequence, "
            "which gives wrong results",
            where="model",
            remedy="set attn_temperature_tuning to false in the config.json of the model if your sequences are shorter "
            "than floor_scale, or use a different model",
        )
    if choice.name != "sdpa":
        _check_heads(config, choice)
    if model.config._attn_implementation != choice.implementation:
        try:
            model.set_attn_implementation(choice.implementation)
        except ValueError as error:  # transformers refuses a class that declares no SDPA
            raise UserError(
                f"{type(model).__name__} has no SDPA attention in the installed transformers, but SDPA is required for "
                "training on packed sequences",
                where="model",
                remedy="use a different model; with the attention of this model, packed sequences would attend to each "
                "other",
            ) from error
    if model.config._attn_implementation != choice.implementation:
        raise UserError(
            f"{type(model).__name__} does not allow its attention to be replaced",
            where="model",
            remedy="use a different model, such as a Qwen3 or Llama model",
        )


def _check_heads(config: PreTrainedConfig, choice: AttentionChoice) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim > MAX_FLASH_HEAD_DIM:
        raise UserError(
            f"{choice.name} supports head dimensions up to {MAX_FLASH_HEAD_DIM}, but {config.model_type} has "
            f"{head_dim}",
            where="trainer.attention",
            remedy="use sdpa",
        )


def is_attached(model: PreTrainedModel) -> bool:
    """True if `model` uses our attention function."""
    return str(model.config._attn_implementation).startswith(PREFIX)


# ---------------------------------------------------------------- the function


def packed_attention(
    kernel: Kernel,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed_segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention inside each sequence of one packed row: query [1, H, T, D], key and value [1, K, T, D].

    Returns [1, T, H, D]. The signature is transformers' AttentionInterface; `dropout` is ignored (a log-prob must be a
    function of the weights). Raises UserError for what packing cannot compute correctly.
    """
    _refuse_unsupported(module, query, attention_mask, packed_segments, kwargs)
    assert packed_segments is not None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    query, key, value = _autocast(query, key, value)
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    group = packed_segments.sequence_group
    if group is not None:
        query_THD, key_TKD, value_TKD = group.to_heads(query_THD, key_TKD, value_TKD)
    if kernel == "sdpa":
        out_THD = _grouped_sdpa(query_THD, key_TKD, value_TKD, scale, packed_segments)
    elif query.dtype == torch.float32:
        raise UserError(
            f"{kernel} attention computes in 16 bits, but the model computes in float32",
            where="trainer.attention",
            remedy="set trainer.precision to bfloat16, or trainer.attention to sdpa",
        )
    elif kernel == "varlen":
        out_THD = _varlen(query_THD, key_TKD, value_TKD, scale, packed_segments)
    else:
        out_THD = _flash_attn(query_THD, key_TKD, value_TKD, scale, packed_segments)
    if group is not None:
        out_THD = group.to_tokens(out_THD)
    return out_THD.unsqueeze(0), None


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast to the autocast dtype: norms and rotation with float32 weights return float32, and only SDPA casts."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _refuse_unsupported(
    module: torch.nn.Module,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    segments: Segments | None,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    if segments is None:
        raise UserError(
            f"{name} does not pass the boundaries of packed sequences to its attention layers",
            where="model",
            remedy="use a different model; the transformers class of this model drops unknown keyword arguments",
        )
    if attention_mask is not None:
        raise UserError(
            f"{name} creates its own attention mask, which packed training does not support",
            where="model",
            remedy="use a different model, such as a Qwen3 or Llama model",
        )
    assert query.shape[0] == 1, "packed sequences must be in one row"
    assert query.shape[2] == segments.num_own, "the boundaries belong to another batch (or a cache is in use)"
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise UserError(
            f"{name} does not use causal attention",
            where="model",
            remedy="use a causal language model, such as a Qwen3 or Llama model",
        )
    window = kwargs.get("sliding_window")
    if window is not None and window < segments.longest:
        raise UserError(
            f"{name} has a sliding window of {window} tokens, but a sequence has {segments.longest} tokens",
            where="model",
            remedy="shorten the sequences, or use a different model",
        )
    for option in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(option) is not None:
            raise UserError(
                f"{name} requires {option}, which packed training does not support",
                where="model",
                remedy="use a different model, such as a Qwen3 or Llama model",
            )


def _grouped_sdpa(
    query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, scale: float, segments: Segments
) -> torch.Tensor:
    """SDPA over groups of sequences of similar length, padded at the end, where the causal mask hides the padding."""
    is_trivial = not len(segments.padding) and len(segments.groups) == 1 and segments.groups[0][0] == 1
    if is_trivial:
        return _sdpa(query_THD, key_TKD, value_TKD, scale, (1, segments.longest))
    padded = [
        gather_rows(x, segments.to_padded_P, segments.to_packed_T, absent=None) for x in (query_THD, key_TKD, value_TKD)
    ]
    sizes = [sequences * width for sequences, width in segments.groups]
    pieces = zip(*(x.split(sizes) for x in padded), strict=True)
    out_PHD = torch.cat(
        [_sdpa(q, k, v, scale, group) for (q, k, v), group in zip(pieces, segments.groups, strict=True)]
    )
    return gather_rows(out_PHD, segments.to_packed_T, segments.to_padded_P, absent=segments.padding)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, group: tuple[int, int]) -> torch.Tensor:
    """Compute one group: [sequences * width, heads, D] in and out."""
    q, k, v = (x.unflatten(0, group).transpose(1, 2) for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and q.is_cuda and q.dtype == torch.float32:
        # CUDA's memory-efficient kernel supports float32 but no grouped heads: torch would fall back to L x L scores.
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        repeats = 1
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=repeats > 1)
    return out.transpose(1, 2).flatten(0, 1)


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, segments: Segments) -> torch.Tensor:
    """Call torch's variable-length kernel. Its keywords changed from torch 2.11 to 2.15; available ones are used."""
    from torch.nn.attention.varlen import varlen_attn

    known = _parameters(varlen_attn)
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "scale" in known:
        options["scale"] = scale
    else:
        q = q * (scale * q.shape[-1] ** 0.5)
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and "enable_gqa" in known:
        options["enable_gqa"] = True
    elif repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    cu, longest = segments.cu_seqlens, segments.longest
    out = varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), cu, cu, longest, longest, **options)
    assert isinstance(out, torch.Tensor)
    return out


def _flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, segments: Segments) -> torch.Tensor:
    """Call flash-attn 2's variable-length kernel, which supports grouped heads."""
    from flash_attn import flash_attn_varlen_func

    cu, longest = segments.cu_seqlens, segments.longest
    out: torch.Tensor = flash_attn_varlen_func(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu,
        cu,
        longest,
        longest,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


@functools.lru_cache(maxsize=8)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
