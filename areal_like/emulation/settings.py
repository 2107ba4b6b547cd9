"""Settings of emulated devices."""

from __future__ import annotations

from pydantic import Field

from areal_like import limits
from areal_like.emulation.roofline import Efficiencies
from areal_like.settings import Settings


class EmulationSettings(Settings):
    """Emulated devices: they wait for the time that a roofline model of a GPU gives for the batch and the lengths.
    Everything else is real. Nothing is learned, and every figure is an estimate
    (docs/decisions/0030-emulated-devices.md)."""

    gpu: str = "h800"
    """Kind of GPU: h800, h100, h200, h20, a100, l40s, b200."""
    model: str = "1.5b"
    """Size of the policy: 1.5b, 7b, 14b, 32b, qwen3-8b, ..., or a folder with config.json. (The top-level `model` is
    the small one whose weights are really transferred.)"""
    tp: int = Field(1, gt=0, le=limits.THREADS)
    """Number of GPUs of one rollout worker."""
    trainer_gpus: int = Field(1, gt=0, le=limits.DEVICES)
    """Number of GPUs of the trainer."""
    speedup: float = Field(10.0, gt=0, le=limits.SECONDS)
    """Emulated seconds per real second."""
    token_scale: int = Field(64, gt=0, le=limits.TOKENS)
    """Emulated tokens per real token (as in messages, the ledger and all other settings)."""
    prompt_tokens: int = Field(200, gt=0, le=limits.TOKENS)
    """Emulated tokens of every prompt."""
    mean_tokens: float | None = Field(None, gt=0, le=limits.TOKENS)
    """Mean to which the answer lengths, those of a thinking model, are scaled; null: as measured (7,345)."""
    decode_floor_s: float = Field(Efficiencies.decode_floor_s, ge=0, le=limits.SECONDS)
    """Shortest decode step, in emulated seconds."""
    bandwidth: float = Field(Efficiencies.bandwidth, gt=0, le=1)
    """Share of the memory bandwidth reached in decoding."""
    train_mfu: float = Field(Efficiencies.train_mfu, gt=0, le=1)
    """Share of the FLOP/s reached in training."""
    prefill_mfu: float = Field(Efficiencies.prefill_mfu, gt=0, le=1)
    """Share of the FLOP/s reached in prefill."""

    @property
    def words(self) -> str:
        """Describe the emulated devices in one line, for a summary."""
        return (
            f"{self.gpu} for {self.model}, {self.speedup:g} times as fast, {self.token_scale} emulated tokens per token"
        )
