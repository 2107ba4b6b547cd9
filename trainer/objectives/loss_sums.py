"""Sums for a step's metrics: added over micro-batches and ranks before anything is divided.

A loss names metrics of its own in port.TokenLoss.

Shapes: N sampled tokens of one micro-batch, S sequences of it, H tokens whose version is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainer.config import WeightClip
from trainer.objectives.port import LOG_RATIO_CLAMP, TokenInputs, TokenLoss
from trainer.ranks import Ranks

_OF_TOKENS, _OF_SEQUENCES = "token:", "sequence:"
"""Prefixes of sums that a loss reports."""


@dataclass(frozen=True)
class RatioParts:
    """The parts of each token's log-ratio (objectives/versions.py), for tokens whose version is kept, float64 [H].

    num_missing: number of tokens whose version is not kept.
    """

    mismatch_H: torch.Tensor
    staleness_H: torch.Tensor
    num_missing: torch.Tensor

    @staticmethod
    def of(tokens: TokenInputs, start_N: torch.Tensor) -> RatioParts:
        """Compute the parts of a micro-batch with version_N. start_N: log-probs at the start of the step."""
        assert tokens.recalled is not None
        assert tokens.version_N is not None
        is_held_N = ~tokens.recalled.is_missing_N
        version_H = tokens.version_N[is_held_N].double()
        return RatioParts(
            mismatch_H=version_H - tokens.behaviour_N[is_held_N].double(),
            staleness_H=start_N[is_held_N].double() - version_H,
            num_missing=_sum(tokens.recalled.is_missing_N),
        )

    def sums(self) -> dict[str, torch.Tensor]:
        """Return the sums for their metrics."""
        found = {"held": self.num_missing.new_tensor(float(len(self.mismatch_H))), "missing": self.num_missing}
        for name, log_ratio_H in (("mismatch", self.mismatch_H), ("staleness", self.staleness_H)):
            clamped_H = log_ratio_H.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
            found[f"kl_{name}"] = _sum(clamped_H.exp() - clamped_H - 1.0)
            found[f"{name}_nats"] = _sum(log_ratio_H.abs())
        return found

    def maxima(self) -> dict[str, torch.Tensor]:
        """Return the maxima; 0 if no version is kept."""
        zero = self.mismatch_H.new_zeros(1)
        return {"mismatch_nats": torch.cat([self.mismatch_H.abs(), zero]).max()}


@dataclass(frozen=True)
class LossSums:
    """Sums, maxima and minima over tokens, which are added over micro-batches before anything is divided."""

    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]
    minima: dict[str, torch.Tensor]

    @staticmethod
    def of(
        *,
        loss: torch.Tensor,
        entropy_N: torch.Tensor,
        ratio_N: torch.Tensor,
        log_ratio_N: torch.Tensor,
        log_weight_N: torch.Tensor,
        weight_N: torch.Tensor,
        kl_reference_N: torch.Tensor | None,
        clip: WeightClip,
        own: TokenLoss,
        parts: RatioParts | None = None,
    ) -> LossSums:
        """Compute the sums of one micro-batch. own: result of its loss. parts: given if versions were recalled."""
        log_weight_N = log_weight_N.clamp(-clip.log_clamp, clip.log_clamp)
        plain_N = log_weight_N.exp()
        sums = {
            "loss": loss.detach().double(),
            "tokens": torch.tensor(float(len(weight_N)), dtype=torch.float64, device=weight_N.device),
            "entropy": _sum(entropy_N),
            "ratio": _sum(ratio_N),
            "weight": _sum(weight_N),
            "weight_squared": _sum(weight_N.double().square()),
            "masked": _sum((plain_N < clip.low) | (plain_N > clip.max)) if clip.mode == "mask" else _sum(weight_N * 0),
            "truncated": _sum(plain_N > clip.max) if clip.mode == "truncate" else _sum(weight_N * 0),
            "kl_behaviour_proximal": _sum(plain_N - log_weight_N - 1.0),
            "kl_proximal_current": _sum(ratio_N - log_ratio_N - 1.0),
        }
        if kl_reference_N is not None:
            sums["kl_reference"] = _sum(kl_reference_N)
        sums |= _own_sums(own)
        maxima = {"weight": weight_N.max(), "ratio": ratio_N.detach().max()}
        if parts is not None:
            sums |= parts.sums()
            maxima |= parts.maxima()
        return LossSums(sums, maxima, {"ratio": ratio_N.detach().min()})

    def plus(self, other: LossSums) -> LossSums:
        """Return the combined sums of both."""
        return LossSums(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: torch.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
            {name: torch.minimum(value, other.minima[name]) for name, value in self.minima.items()},
        )

    def emptied(self) -> LossSums:
        """Return the neutral element of `plus`, for a rank that computed nothing."""
        return LossSums(
            {name: torch.zeros_like(value) for name, value in self.sums.items()},
            {name: torch.full_like(value, -torch.inf) for name, value in self.maxima.items()},
            {name: torch.full_like(value, torch.inf) for name, value in self.minima.items()},
        )

    def without_own(self) -> LossSums:
        """Return only the sums that every loss has, without those that this loss reports."""
        prefixes = (_OF_TOKENS, _OF_SEQUENCES)
        kept = {name: value for name, value in self.sums.items() if not name.startswith(prefixes)}
        return LossSums(kept, self.maxima, self.minima)

    def over(self, ranks: Ranks) -> LossSums:
        """Return the combined sums of all ranks, the same on each. Collective."""
        if ranks.size == 1:
            return self
        reduced = []
        for part, reduce in ((self.sums, ranks.sum), (self.maxima, ranks.max), (self.minima, ranks.min)):
            values = reduce(torch.stack([part[name].double() for name in sorted(part)]))
            reduced.append(dict(zip(sorted(part), values.unbind(), strict=True)))
        return LossSums(*reduced)

    def metrics(self, num_mini_batches: int) -> dict[str, float]:
        """Return means over all tokens of the step; `loss` is the mean over its updates.

        ess: effective sample size of the weights as a share, (sum w)^2 / (N sum w^2); 0 if every weight is 0.
        kl_*: k3 on the sampled tokens. kl_proximal_current is computed over tokens of the behaviour policy.
        """
        total = {name: float(value) for name, value in self.sums.items()}
        num = total["tokens"]
        squared = total["weight_squared"]
        means = {name: total[name] / num for name in ("entropy", "kl_behaviour_proximal", "kl_proximal_current")}
        if "kl_reference" in total:
            means["kl_reference"] = total["kl_reference"] / num
        return {
            "loss": total["loss"] / num_mini_batches,
            **means,
            "ratio_mean": total["ratio"] / num,
            "ratio_max": float(self.maxima["ratio"]),
            "ratio_min": float(self.minima["ratio"]),
            "weight_mean": total["weight"] / num,
            "weight_max": float(self.maxima["weight"]),
            "weight_masked_share": total["masked"] / num,
            "weight_truncated_share": total["truncated"] / num,
            "ess": total["weight"] ** 2 / (num * squared) if squared > 0 else 0.0,
            **self._part_means(total),
            **_own_means(total),
        }

    def _part_means(self, total: Mapping[str, float]) -> dict[str, float]:
        """Means over tokens whose version is kept; only the share of the others if there is none."""
        if "held" not in total:
            return {}
        held, missing = total["held"], total["missing"]
        found = {"version_missing_share": missing / (held + missing)}
        if held:
            found |= {f"kl_{name}": total[f"kl_{name}"] / held for name in ("mismatch", "staleness")}
            found |= {f"{name}_nats_mean": total[f"{name}_nats"] / held for name in ("mismatch", "staleness")}
            found["mismatch_nats_max"] = float(self.maxima["mismatch_nats"])
        return found


def _own_sums(own: TokenLoss) -> dict[str, torch.Tensor]:
    sums = {f"{_OF_TOKENS}{name}": _sum(values_N) for name, values_N in own.token_metrics.items()}
    for name, values_S in own.sequence_metrics.items():
        sums[f"{_OF_SEQUENCES}{name}"] = _sum(values_S)
        sums["sequences"] = values_S.new_full((), len(values_S), dtype=torch.float64)
    return sums


def _own_means(total: Mapping[str, float]) -> dict[str, float]:
    means: dict[str, float] = {}
    for prefix, count in ((_OF_TOKENS, "tokens"), (_OF_SEQUENCES, "sequences")):
        means |= {
            name.removeprefix(prefix): value / total[count] for name, value in total.items() if name.startswith(prefix)
        }
    return means


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.detach().sum(dtype=torch.float64)
