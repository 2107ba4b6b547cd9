"""The interface of losses, corrections and advantages, and their inputs. Imports no torch.

registry.py lists the built-in ones, own_code.py imports a user's, and loss.py combines a loss with weights, KL and
averaging.

The configuration is checked where torch may be missing, so a descriptor and its file import torch for type checking
only. A loss is written with methods of the tensors that are passed to it.

Shapes: N sampled tokens of one micro-batch, in packed order; S sequences of the micro-batch, never split;
B samples of the batch, Q trajectories of all of them: Q = B, unless samples have several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from areal_like.settings import Settings

if TYPE_CHECKING:
    import torch

    from trainer.config import LossSettings

LOG_RATIO_CLAMP = 20.0
"""Log-ratios are clamped to this before exp. Larger ones would overflow, and are far outside any trust region."""


class NoOptions(Settings):
    """No options."""


@dataclass(frozen=True)
class Needs:
    """Inputs of a loss other than log-probs under the current and the behaviour policy.

    proximal: `any`: the value of `trainer.loss.proximal`; `behaviour`: the ratio is relative to the policy that
    sampled, which requires `proximal: behaviour`; `recompute`: log-probs of the whole step under the policy at its
    start.
    sequences: `tokens.sequences`. reference: `tokens.reference_N`. values: `tokens.values_N` and `tokens.target_N`, of
    a critic (trainer.critic).
    entropy: `tokens.entropy_N`, over the whole vocabulary, with gradient.
    versions: `tokens.version_N`, under the version that sampled each token (trainer.version_logprobs). mixture:
    `tokens.mixture_N`, under all versions of the step together.
    every_sequence: the loss has a gradient where the advantage is 0, so that no sequence may be left out.
    """

    proximal: Literal["any", "behaviour", "recompute"] = "any"
    sequences: bool = False
    reference: bool = False
    values: bool = False
    entropy: bool = False
    versions: bool = False
    mixture: bool = False
    every_sequence: bool = False


class Fault(NamedTuple):
    """An invalid setting: its key, the reason, and the remedy."""

    key: str
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class Sequences:
    """The sequence of each token, and reductions over sequences. All results carry gradients.

    ids_N: int64, from 0 to num - 1. Every sequence has at least one token.
    """

    ids_N: torch.Tensor
    num: int

    def sum(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the sum over the tokens of each sequence, [S]."""
        return values_N.new_zeros(self.num).index_add(0, self.ids_N, values_N)

    @property
    def lengths_S(self) -> torch.Tensor:
        """Number of sampled tokens of each sequence, int64 [S]."""
        return self.ids_N.new_zeros(self.num).index_add(0, self.ids_N, self.ids_N.new_ones(len(self.ids_N)))

    def mean(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the mean over the tokens of each sequence, [S]."""
        return self.sum(values_N) / self.lengths_S

    def max(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the largest value of each sequence, [S]."""
        return values_N.new_zeros(self.num).scatter_reduce(0, self.ids_N, values_N, "amax", include_self=False)

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """Return each sequence's value at each of its tokens, [N]."""
        return values_S[self.ids_N]


@dataclass(frozen=True)
class Recalled:
    """Log-probs of a micro-batch's tokens under the versions that sampled them, as the trainer computes them.

    own_N: float32, valid where is_recalled_N. Elsewhere the policy at the start of the step is used: either it is the
    version itself, or that version is no longer kept (is_missing_N). mixture_N: float32, the logarithm of
    sum over recalled versions of (share of the step's tokens) * exp(log-prob); None unless needed. start_share: share
    of the step's tokens for which the policy at the start of the step is used; they are not in mixture_N.
    """

    own_N: torch.Tensor
    is_recalled_N: torch.Tensor
    is_missing_N: torch.Tensor
    mixture_N: torch.Tensor | None = None
    start_share: float = 0.0


@dataclass(frozen=True)
class TokenInputs:
    """Inputs of one micro-batch's loss in addition to the current policy; float32 [N] on the model's device.

    coefficient_N: weight of each token in its update's loss (`token_coefficients`). proximal_N: only for `recompute`;
    None means p = sg(c), which a recomputation before the first update of a step would return; a loss always receives
    the log-probs of the configured mode. is_cut_N: bool, the answer was truncated at the token limit. values_N: of the
    critic at the start of the step; target_N: its training targets. The others are None unless needed (`Needs`).

    For corrections only: current_N, the current log-probs, and drift_N, those at the start of the step minus
    behaviour_N. If the step did not compute the latter, the current ones are used.

    step: results of `statistics` of a loss or correction for the whole step, by its name.

    version_N, mixture_N: computed from `recalled` and the log-probs at the start of the step (objectives/versions.py).
    """

    behaviour_N: torch.Tensor
    advantage_N: torch.Tensor
    staleness_N: torch.Tensor
    coefficient_N: torch.Tensor
    proximal_N: torch.Tensor | None = None
    reference_N: torch.Tensor | None = None
    values_N: torch.Tensor | None = None
    target_N: torch.Tensor | None = None
    entropy_N: torch.Tensor | None = None
    sequences: Sequences | None = None
    is_cut_N: torch.Tensor | None = None
    current_N: torch.Tensor | None = None
    drift_N: torch.Tensor | None = None
    step: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    recalled: Recalled | None = None
    version_N: torch.Tensor | None = None
    mixture_N: torch.Tensor | None = None


@dataclass(frozen=True)
class TokenLoss:
    """The result of a loss: values to be minimised, and metrics.

    policy_N: multiplied by the correction weight. unweighted_N: added after that, such as a penalty that applies even
    where the weight is 0. token_metrics: [N] each, reported as means over the tokens of the step; sequence_metrics: [S]
    each, as means over its sequences. Names are the same in every micro-batch; the caller sums over micro-batches and
    ranks.
    """

    policy_N: torch.Tensor
    unweighted_N: torch.Tensor | None = None
    token_metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sequence_metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


Part = Literal["both", "mismatch", "staleness"]
"""Part of the ratio between the policy at the start of the step and the one that sampled: the mismatch of engine and
trainer at the same version, the changes by training since that version, or both."""
LossFunction = Callable[["torch.Tensor", TokenInputs, Any], TokenLoss]
"""Called as `loss(current_N, tokens, options)`: current_N is the log-prob under the current policy, with gradient."""


SumOverRanks = Callable[[Sequence[float]], list[float]]
"""Adds numbers over all ranks; every rank must call it the same number of times."""
Statistics = Callable[[Sequence[TokenInputs], SumOverRanks, Any], Mapping[str, float]]
"""Called as `statistics(parts, sum_over_ranks, options)` once a step, before its first update, by all ranks together.
parts: this rank's micro-batches, possibly none, with drift_N. Returns numbers of the whole step, the same on each
rank."""


def no_conflicts(settings: LossSettings, options: Any) -> Iterator[Fault]:
    """Report no conflicts."""
    yield from ()


@dataclass(frozen=True)
class Objective:
    """One loss: `trainer.loss.kind`.

    keys: fields of `options` that are keys of `trainer.loss`. needs: a constant, or a function of the options.
    statistics: computes numbers of the whole step that the loss needs; it costs a forward pass over the step.
    conflicts: finds settings of `trainer.loss` that do not fit these options.
    """

    name: str
    loss: LossFunction
    options: type[Settings] = NoOptions
    keys: tuple[str, ...] = ()
    needs: Needs | Callable[[Any], Needs] = Needs()
    statistics: Statistics | None = None
    conflicts: Callable[[LossSettings, Any], Iterator[Fault]] = no_conflicts

    def needs_with(self, options: Any) -> Needs:
        """Return what the loss needs with these options."""
        return self.needs if isinstance(self.needs, Needs) else self.needs(options)


@dataclass(frozen=True)
class Correction:
    """One entry of `trainer.loss.corrections`: a mask or weight on the loss of each token.

    factor: called as `factor(tokens, options)`, without gradient; returns a mask of the tokens to keep (bool [N]) or a
    weight [N].
    is_weight: it corrects for the policy that sampled, and replaces `trainer.loss.weight`.
    part: the part of the ratio between the policy at the start of the step and the one that sampled that it uses:
    `both`, `mismatch` or `staleness` (objectives/versions.py). is_of_ratio: it uses that ratio.
    """

    name: str
    factor: Callable[[TokenInputs, Any], torch.Tensor]
    options: type[Settings] = NoOptions
    needs: Needs = Needs()
    statistics: Statistics | None = None
    is_weight: bool = False
    part: Part = "both"
    is_of_ratio: bool = True
    conflicts: Callable[[LossSettings, Any], Iterator[Fault]] = no_conflicts


# ---------------------------------------------------------------- advantages


class TurnRewards(NamedTuple):
    """Turns of one sample that have rewards: sampled tokens up to the end of each, and its reward [K]."""

    ends_K: np.ndarray
    rewards_K: np.ndarray


@dataclass(frozen=True)
class RewardedSamples:
    """The input of advantages: a whole batch, the same on every rank.

    rewards_B: float64, after scale, bias and clip, minus the KL penalties of all tokens if there are any.
    group_ids_B, lengths_B: int64; lengths in sampled tokens of all its trajectories. penalties_N: the KL penalty of
    each sampled token (`kl_in: reward`), None unless configured. Tokens are in the order of the samples and, within
    one, of its trajectories.

    With a critic: values_N: its value before each sampled token; end_values_Q: after the last token of each
    trajectory. turn_starts_N: bool, the tokens that begin a turn. is_cut_Q: bool, truncated at the token limit.

    turns_B: rewards by turn of each sample, scaled as rewards_B but without bias, clip and penalties; None for a
    sample without them. Empty: no sample has any. A turn never crosses trajectories.

    trajectory_lengths_B: sampled tokens of each trajectory of each sample. Empty: each sample is one trajectory.

    If an advantage needs them, float64: start_N, reference_N, teacher_N: log-prob of each sampled token at the start of
    the step, under the reference model and under the teacher. log_weights_B: sum over a sample's tokens of the log-prob
    at the start of the step minus the behaviour log-prob. square_norms_B: squared norm of the gradient of its log-prob.
    """

    rewards_B: np.ndarray
    group_ids_B: np.ndarray
    lengths_B: np.ndarray
    penalties_N: np.ndarray | None = None
    values_N: np.ndarray | None = None
    end_values_Q: np.ndarray | None = None
    turn_starts_N: np.ndarray | None = None
    is_cut_Q: np.ndarray | None = None
    turns_B: Sequence[TurnRewards | None] = ()
    trajectory_lengths_B: Sequence[Sequence[int]] = ()
    log_weights_B: np.ndarray | None = None
    square_norms_B: np.ndarray | None = None
    start_N: np.ndarray | None = None
    reference_N: np.ndarray | None = None
    teacher_N: np.ndarray | None = None

    def token_rewards_N(self) -> np.ndarray:
        """Compute the reward of each sampled token: a turn's at its last token, the answer's at its last token if it
        has no rewards by turn, minus the token's penalty."""
        ends_B = np.cumsum(self.lengths_B)
        starts_B = ends_B - self.lengths_B
        rewards_N = np.zeros(int(ends_B[-1]))
        rewards_N[ends_B - 1] = self.rewards_B
        if self.penalties_N is not None:  # rewards_B is reduced by all penalties; below each is subtracted at its token
            rewards_N[ends_B - 1] += np.add.reduceat(self.penalties_N, starts_B)
        for sample, turns in enumerate(self.turns_B):
            if turns is not None:
                rewards_N[ends_B[sample] - 1] = 0.0
                rewards_N[starts_B[sample] + turns.ends_K - 1] = turns.rewards_K
        return rewards_N if self.penalties_N is None else rewards_N - self.penalties_N

    def turns_of(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sampled tokens and the reward of each turn of one sample, int64 and float64 [K], minus the turn's
        penalties; a sample without rewards by turn is one turn."""
        turns = self.turns_B[sample] if self.turns_B else None
        if turns is None:
            return self.lengths_B[sample : sample + 1], np.asarray(self.rewards_B[sample : sample + 1], np.float64)
        lengths_K = np.diff(turns.ends_K, prepend=0).astype(np.int64)
        rewards_K = np.asarray(turns.rewards_K, np.float64)
        if self.penalties_N is not None:
            starts_K = int(self.lengths_B[:sample].sum()) + turns.ends_K - lengths_K
            ends = starts_K[-1] + lengths_K[-1]
            rewards_K = rewards_K - np.add.reduceat(self.penalties_N[:ends], starts_K)
        return lengths_K, rewards_K

    def by_trajectory(self) -> RewardedSamples:
        """Treat each trajectory as a separate sample that ends in the sample's reward, minus its own penalties.

        If turns have rewards, a trajectory has those of its own turns.
        """
        if all(len(lengths) == 1 for lengths in self.trajectory_lengths_B):
            return self
        sample_Q = np.repeat(np.arange(len(self.rewards_B)), [len(lengths) for lengths in self.trajectory_lengths_B])
        lengths_Q = np.concatenate([np.asarray(lengths, np.int64) for lengths in self.trajectory_lengths_B])
        rewards_Q = np.asarray(self.rewards_B, np.float64)[sample_Q]
        if self.penalties_N is not None:  # rewards_B is reduced by the penalties of all its trajectories
            penalties_Q = np.add.reduceat(self.penalties_N, np.cumsum([0, *lengths_Q[:-1]]))
            rewards_Q = rewards_Q + np.bincount(sample_Q, weights=penalties_Q)[sample_Q] - penalties_Q
        turns_Q = [
            part
            for turns, lengths in zip(self.turns_B, self.trajectory_lengths_B, strict=bool(self.turns_B))
            for part in _parts(turns, lengths)
        ]
        return replace(
            self, rewards_B=rewards_Q, group_ids_B=self.group_ids_B[sample_Q], lengths_B=lengths_Q, turns_B=turns_Q,
            trajectory_lengths_B=(),
        )  # fmt: skip

    def groups(self) -> Iterator[np.ndarray]:
        """Yield the indices of the samples of each group, which may be anywhere in the batch."""
        for group_id in np.unique(self.group_ids_B):
            yield np.flatnonzero(self.group_ids_B == group_id)


def _parts(turns: TurnRewards | None, lengths: Sequence[int]) -> Iterator[TurnRewards | None]:
    """Split the turns of a sample by trajectory."""
    start = 0
    for length in lengths:
        if turns is None:
            yield None
        else:
            is_own_K = (turns.ends_K > start) & (turns.ends_K <= start + length)
            yield TurnRewards(turns.ends_K[is_own_K] - start, turns.rewards_K[is_own_K])
        start += length


@dataclass(frozen=True)
class Advantage:
    """One way to compute advantages: `trainer.advantage.kind`.

    compute: called as `compute(samples, options)`; returns one advantage per sample [B] or per sampled token [N].
    keys: fields of `options` that are keys of `trainer.advantage`. needs_values: a critic's values.
    needs_starts: log-probs at the start of the step, which cost a forward pass over it. needs_reference: `reference_N`;
    needs_teacher: `teacher_N`; each together with `needs_starts`, and then `start_N` is given as well, else
    `log_weights_B`. needs_norms: whether these options need `square_norms_B`, which costs a backward pass for each
    sample.
    targets: called in the same way if there is a critic; returns its training targets for each sampled token [N].
    None: the sum of rewards from the token on.
    metrics: called in the same way if it has `needs_starts`; returns metrics of the step.
    is_for_any_policy: its loss is defined for samples of any policy, so that no importance weight is needed.
    is_within_group: a sample is compared with its own group only, so that a group of equal rewards has no advantage.
    single_sample: why a sample alone in its group has the advantage 0; empty if it has another.
    is_per_trajectory: it is computed along a sequence: if samples have several trajectories, `compute` and `targets`
    receive `RewardedSamples.by_trajectory`.
    """

    name: str
    compute: Callable[[RewardedSamples, Any], np.ndarray]
    options: type[Settings] = NoOptions
    keys: tuple[str, ...] = ()
    needs_values: bool = False
    needs_starts: bool = False
    needs_reference: bool = False
    needs_teacher: bool = False
    needs_norms: Callable[[Any], bool] = lambda options: False
    targets: Callable[[RewardedSamples, Any], np.ndarray] | None = None
    metrics: Callable[[RewardedSamples, Any], dict[str, float]] = lambda samples, options: {}
    is_within_group: bool = True
    is_for_any_policy: bool = False
    single_sample: str = ""
    is_per_trajectory: bool = False

    @property
    def reads_tokens(self) -> bool:
        """True if it reads log-probs of single tokens, not weights of samples."""
        return self.needs_reference or self.needs_teacher
