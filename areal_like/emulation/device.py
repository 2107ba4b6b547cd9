"""Creates the roofline, the answer lengths, the number of slots and the clock of an emulation from its settings."""

from __future__ import annotations

from areal_like.emulation.lengths import Lengths, thinking
from areal_like.emulation.machines import gpu_named, model_named
from areal_like.emulation.roofline import Efficiencies, Roofline
from areal_like.emulation.settings import EmulationSettings

WHERE = "emulation"


def roofline_of(
    settings: EmulationSettings, *, is_recomputing_activations: bool = False, slots: int = 1024
) -> Roofline:
    """The costs of the emulated devices. Recomputing log-probs is a separate pass in an emulated run, so its cost is
    not included.

    Raises UserError for an unknown GPU or model.
    """
    return Roofline(
        gpu=gpu_named(settings.gpu, f"{WHERE}.gpu"),
        model=model_named(settings.model, f"{WHERE}.model"),
        tp=settings.tp,
        trainer_gpus=settings.trainer_gpus,
        reached=Efficiencies(
            decode_floor_s=settings.decode_floor_s,
            bandwidth=settings.bandwidth,
            train_mfu=settings.train_mfu,
            prefill_mfu=settings.prefill_mfu,
            step_overhead_s=0.0,
        ),
        is_recomputing_logprobs=False,
        is_recomputing_activations=is_recomputing_activations,
        slots=slots,
    )


def lengths_of(settings: EmulationSettings, max_new_tokens: int) -> Lengths:
    """Lengths of the answers in emulated tokens. max_new_tokens: limit in real tokens."""
    return thinking(max_new_tokens * settings.token_scale, settings.mean_tokens)


def slots_of(settings: EmulationSettings, costs: Roofline, lengths: Lengths) -> int:
    """Answers an emulated engine decodes at once: as many as its memory holds at their final mean length."""
    return costs.max_sequences(settings.prompt_tokens + lengths.mean_length(groups=500))


class EmulatedClock:
    """Emulated seconds since `origin_s` of the machine's monotonic clock."""

    def __init__(self, origin_s: float, speedup: float) -> None:
        self.origin_s, self.speedup = origin_s, speedup

    def emulated_s(self, monotonic_s: float) -> float:
        """Emulated time of a reading of the monotonic clock."""
        return (monotonic_s - self.origin_s) * self.speedup

    def monotonic_s(self, emulated_s: float) -> float:
        """Reading of the monotonic clock at an emulated time."""
        return self.origin_s + emulated_s / self.speedup


class Lateness:
    """Measures how late emulated events were, in real seconds. A machine that is too slow makes an emulation
    inexact.
    """

    def __init__(self) -> None:
        self._sum_s = self._max_s = 0.0
        self._num_wakes = 0

    def add(self, late_s: float) -> None:
        """Record that an event was `late_s` seconds late."""
        late_s = max(0.0, late_s)
        self._sum_s += late_s
        self._max_s = max(self._max_s, late_s)
        self._num_wakes += 1

    def counters(self) -> dict[str, float]:
        """Counters for a heartbeat; none of them decreases."""
        return {
            "emulation_late_s": self._sum_s,
            "emulation_late_max_s": self._max_s,
            "emulation_wakes": float(self._num_wakes),
        }
