"""The objective: decoupled PPO per token (arXiv 2505.24298, section 5.2, eq. 5), with its weight and proximal modes.

Owns: `token_coefficients` (who is averaged with whom), `policy_loss` and the sums its metrics are made of.
Refuses: where log-probs come from (logprobs.py), advantages, the optimizer, and averaging anything over a micro-batch,
a mini-batch or a rank: every denominator is a property of the whole step and is known before its first micro-batch.

For a token with behaviour log-prob b (recorded), proximal p, current c and advantage A:

    u = exp(c - p)        trust region
    w = exp(p - b)        off-policy correction, a constant for the gradient; p - b is clamped first
    loss = - w * min(u * A, clip(u, 1 - eps_low, 1 + eps_high) * A)

With dual_clip = k (arXiv 1912.09729, eq. 5) the minimum is raised to k * A where A < 0: the clip alone is open there,
and one token whose ratio ran away would outweigh all others.

Proximal modes. `recompute`: p handed in (the policy at the start of the step). `behaviour`: p = b, so w = 1, ordinary
PPO. `interpolate` (A-3PO, arXiv 2512.06547; AReaL calls it `loglinear`): p = b + a * (sg(c) - b) per token, with
a = (v_proximal - v_behaviour) / (v_current - v_behaviour) and sg the stop-gradient. In step n the proximal policy is
version n - 1 and the current one is on its way to version n, so a token of staleness s = (n - 1) - v_behaviour has
a = s / (s + 1) = 1 - 1/d with the paper's d = s + 1: a fresh token keeps its recorded log-prob as anchor, a stale one
is anchored near the current policy.

Shapes: N sampled tokens of one micro-batch, B sequences of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trainer.config import LossSettings, WeightClip
from trainer.objectives.user_loss import load_loss, token_loss
from trainer.ranks import Ranks

LOG_RATIO_CLAMP = 20.0
"""c - p is clamped to this before exp: beyond it u would overflow, and only far outside the trust region."""


@dataclass(frozen=True)
class TokenInputs:
    """What one micro-batch's loss needs alongside the current policy; all float32 [N] on the model's device.

    coefficient_N: weight of each token in its update's loss (`token_coefficients`). proximal_N: for `recompute`
    alone; None means p = sg(c), which is what a recomputation would give before the first update of a step.
    reference_N: log-prob under the reference model, when kl_coef > 0.
    """

    behaviour_N: torch.Tensor
    advantage_N: torch.Tensor
    staleness_N: torch.Tensor
    coefficient_N: torch.Tensor
    proximal_N: torch.Tensor | None = None
    reference_N: torch.Tensor | None = None


def token_coefficients(
    sampled_lengths_B: Sequence[int], group_ids_B: Sequence[int], settings: LossSettings, *, num_updates: int = 1
) -> np.ndarray:
    """Weight of every token of each of a step's B sequences, float64 [B].

    The loss of an update is the sum of weight * token loss over the tokens of its mini-batch. With L_i sampled tokens
    in sequence i, G groups, T_g sampled tokens in group g, T in the step, and U updates, a token of sequence i weighs

        token_mean     U / T                           every token alike
        sequence_mean  U / (B * L_i)                   every sequence alike
        group_mean     U / (G * T_g)                   every group alike, and the tokens in it
        constant       U / (B * constant_divisor)      every token alike; T plays no part (Dr. GRPO, arXiv 2503.20783)

    B, G, T and T_g are counts over the whole step, never over a mini-batch, a micro-batch or a rank. Mini-batches are
    cut to equal tokens, so one of long answers has fewer sequences: its own counts would weigh each of them more.
    The factor U (`num_updates`) makes up for the sequences that the update's mini-batch lacks: the mean of the
    step's U losses is the loss the step has with one update, and the expected size of an update does not depend on U.
    """
    lengths_B = np.asarray(sampled_lengths_B, np.float64)
    assert len(lengths_B)
    assert (lengths_B > 0).all()
    assert len(group_ids_B) == len(lengths_B)
    assert num_updates > 0
    num = len(lengths_B)
    if settings.aggregation == "token_mean":
        return np.full(num, num_updates / lengths_B.sum())
    if settings.aggregation == "sequence_mean":
        return num_updates / (num * lengths_B)
    if settings.aggregation == "constant":
        return np.full(num, num_updates / (num * settings.constant_divisor))
    groups, group_B = np.unique(np.asarray(group_ids_B), return_inverse=True)
    tokens_G = np.bincount(group_B, weights=lengths_B)
    coefficient_B: np.ndarray = num_updates / (len(groups) * tokens_G[group_B])
    return coefficient_B


def interpolated_proximal(
    current_N: torch.Tensor, behaviour_N: torch.Tensor, staleness_N: torch.Tensor
) -> torch.Tensor:
    """A-3PO's stand-in for the proximal log-prob, detached: b + s / (s + 1) * (c - b)."""
    share_N = staleness_N.clamp(min=0)
    share_N = share_N / (share_N + 1)
    return behaviour_N + share_N * (current_N.detach() - behaviour_N)


def proximal_logprobs(current_N: torch.Tensor, inputs: TokenInputs, settings: LossSettings) -> torch.Tensor:
    """p of the configured mode, detached [N]."""
    if settings.proximal == "behaviour":
        return inputs.behaviour_N
    if settings.proximal == "interpolate":
        return interpolated_proximal(current_N, inputs.behaviour_N, inputs.staleness_N)
    return current_N.detach() if inputs.proximal_N is None else inputs.proximal_N


def correction_weights(log_weight_N: torch.Tensor, clip: WeightClip) -> torch.Tensor:
    """w [N] of p - b: `exact`, `truncate` (min with max), `mask` (0 outside [low, max]), `off` (1)."""
    if clip.mode == "off":
        return torch.ones_like(log_weight_N)
    weight_N = log_weight_N.clamp(-clip.log_clamp, clip.log_clamp).exp()
    if clip.mode == "truncate":
        return weight_N.clamp(max=clip.max)
    if clip.mode == "mask":
        return torch.where((weight_N >= clip.low) & (weight_N <= clip.max), weight_N, 0.0)
    return weight_N


def policy_loss(
    current_N: torch.Tensor, entropy_N: torch.Tensor, inputs: TokenInputs, settings: LossSettings
) -> tuple[torch.Tensor, LossSums]:
    """This micro-batch's part of its update's loss (a scalar to call backward on), and sums for the metrics.

    The KL term is k3, exp(r - c) - (r - c) - 1, over the sampled tokens, not reweighted to the current policy
    (GRPO, arXiv 2402.03300, does the same). Masked tokens weigh 0 and stay in the denominator.
    """
    assert settings.weight.mode != "off" or settings.proximal == "behaviour", "decoupled in name only: no weight"
    proximal_N = proximal_logprobs(current_N, inputs, settings)
    log_weight_N = proximal_N - inputs.behaviour_N
    weight_N = correction_weights(log_weight_N, settings.weight)
    if settings.proximal == "behaviour":
        weight_N = torch.ones_like(weight_N)  # whatever the clip's ends: this is ordinary PPO
    log_ratio_N = (current_N - proximal_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio_N = log_ratio_N.exp()
    free_N = ratio_N * inputs.advantage_N
    clipped_N = ratio_N.clamp(1.0 - settings.eps_low, 1.0 + settings.eps_high) * inputs.advantage_N
    surrogate_N = torch.minimum(free_N, clipped_N)
    is_cut_N = None
    is_clipped_N = clipped_N < free_N
    if settings.kind != "decoupled_ppo":
        tokens = replace(inputs, proximal_N=proximal_N)
        own_N = token_loss(load_loss(settings.kind), settings.kind, current_N, tokens, settings.options)
        surrogate_N, is_clipped_N = -own_N, torch.zeros_like(is_clipped_N)
    elif settings.dual_clip is not None:
        is_cut_N = (inputs.advantage_N < 0) & (ratio_N > settings.dual_clip)
        surrogate_N = torch.where(is_cut_N, settings.dual_clip * inputs.advantage_N, surrogate_N)
    token_loss_N = -weight_N * surrogate_N
    kl_reference_N = None
    if settings.kl_coef > 0:
        assert inputs.reference_N is not None, "kl_coef needs the reference model's log-probs"
        kl_reference_N = k3(current_N, inputs.reference_N)
        token_loss_N = token_loss_N + settings.kl_coef * kl_reference_N
    if settings.entropy_coef > 0:
        token_loss_N = token_loss_N - settings.entropy_coef * entropy_N
    loss = (inputs.coefficient_N * token_loss_N).sum()
    with torch.no_grad():
        sums = LossSums.of(
            loss=loss,
            entropy_N=entropy_N,
            is_clipped_N=is_clipped_N,
            is_cut_N=is_cut_N,
            ratio_N=ratio_N,
            log_ratio_N=log_ratio_N,
            log_weight_N=log_weight_N,
            weight_N=weight_N,
            kl_reference_N=kl_reference_N,
            clip=settings.weight,
        )
    return loss, sums


def k3(sampled_from_N: torch.Tensor, other_N: torch.Tensor) -> torch.Tensor:
    """Estimator of KL(sampled_from || other) per token, never negative (J. Schulman, "Approximating KL Divergence")."""
    log_ratio_N = (other_N - sampled_from_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return log_ratio_N.exp() - log_ratio_N - 1.0


# ---------------------------------------------------------------- metrics


@dataclass(frozen=True)
class LossSums:
    """Sums, maxima and minima over tokens, which micro-batches add up before anything is divided."""

    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]
    minima: dict[str, torch.Tensor]

    @staticmethod
    def of(
        *,
        loss: torch.Tensor,
        entropy_N: torch.Tensor,
        is_clipped_N: torch.Tensor,
        is_cut_N: torch.Tensor | None,
        ratio_N: torch.Tensor,
        log_ratio_N: torch.Tensor,
        log_weight_N: torch.Tensor,
        weight_N: torch.Tensor,
        kl_reference_N: torch.Tensor | None,
        clip: WeightClip,
    ) -> LossSums:
        """Of one micro-batch."""
        log_weight_N = log_weight_N.clamp(-clip.log_clamp, clip.log_clamp)
        plain_N = log_weight_N.exp()
        sums = {
            "loss": loss.detach().double(),
            "tokens": torch.tensor(float(len(weight_N)), dtype=torch.float64, device=weight_N.device),
            "entropy": _sum(entropy_N),
            "clipped": _sum(is_clipped_N),
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
        if is_cut_N is not None:
            sums["dual_clipped"] = _sum(is_cut_N)
        return LossSums(
            sums, {"weight": weight_N.max(), "ratio": ratio_N.detach().max()}, {"ratio": ratio_N.detach().min()}
        )

    def plus(self, other: LossSums) -> LossSums:
        """Both together."""
        return LossSums(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: torch.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
            {name: torch.minimum(value, other.minima[name]) for name, value in self.minima.items()},
        )

    def emptied(self) -> LossSums:
        """What adding changes nothing: of a rank that computed nothing of its own."""
        return LossSums(
            {name: torch.zeros_like(value) for name, value in self.sums.items()},
            {name: torch.full_like(value, -torch.inf) for name, value in self.maxima.items()},
            {name: torch.full_like(value, torch.inf) for name, value in self.minima.items()},
        )

    def over(self, ranks: Ranks) -> LossSums:
        """Those of all ranks together, the same on each. Collective."""
        if ranks.size == 1:
            return self
        reduced = []
        for part, reduce in ((self.sums, ranks.sum), (self.maxima, ranks.max), (self.minima, ranks.min)):
            values = reduce(torch.stack([part[name].double() for name in sorted(part)]))
            reduced.append(dict(zip(sorted(part), values.unbind(), strict=True)))
        return LossSums(*reduced)

    def metrics(self, num_mini_batches: int) -> dict[str, float]:
        """Means over all tokens of the step; `loss` is the mean over its updates.

        ess: effective sample size of the weights as a share, (sum w)^2 / (N sum w^2); 0 when every weight is 0.
        kl_*: k3 on the sampled tokens. kl_proximal_current is taken over tokens of the behaviour policy.
        """
        total = {name: float(value) for name, value in self.sums.items()}
        num = total["tokens"]
        squared = total["weight_squared"]
        means = {name: total[name] / num for name in ("entropy", "kl_behaviour_proximal", "kl_proximal_current")}
        if "kl_reference" in total:
            means["kl_reference"] = total["kl_reference"] / num
        if "dual_clipped" in total:
            means["dual_clip_share"] = total["dual_clipped"] / num
        return {
            "loss": total["loss"] / num_mini_batches,
            **means,
            "clip_fraction": total["clipped"] / num,
            "ratio_mean": total["ratio"] / num,
            "ratio_max": float(self.maxima["ratio"]),
            "ratio_min": float(self.minima["ratio"]),
            "weight_mean": total["weight"] / num,
            "weight_max": float(self.maxima["weight"]),
            "weight_masked_share": total["masked"] / num,
            "weight_truncated_share": total["truncated"] / num,
            "ess": total["weight"] ** 2 / (num * squared) if squared > 0 else 0.0,
        }


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.detach().sum(dtype=torch.float64)
