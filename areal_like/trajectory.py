"""Types for one sample: its tokens, each with the log-prob and the policy version that it was sampled with.

`Segment` holds sampled tokens only, `Trajectory` prompt and answer, ready for training. Both are validated on
construction.

Shape legend: T tokens of prompt plus answer, R tokens of the answer alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from areal_like.token_source import TokenSource, check_sources

FinishReason = Literal["stop", "length", "environment"]
"""`stop`: an end-of-sequence or stop token was sampled (part of the answer). `length`: the limit of tokens or the end
of the context was reached. `environment`: the environment ended an episode of several turns."""

NO_VERSION = -1
"""Version of a token that the policy did not sample (prompt, tool output)."""


def _check_array(name: str, array: np.ndarray, dtype: type, length: int) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        raise ValueError(f"{name} must be a one-dimensional array")
    if array.dtype != dtype:
        raise ValueError(f"{name} must be {np.dtype(dtype)}, not {array.dtype}")
    if len(array) != length:
        raise ValueError(f"{name} has {len(array)} entries, expected {length}")


def _decreases(versions: np.ndarray) -> bool:
    """Whether the versions decrease anywhere. It allocates no array of differences, because it runs for every segment
    and sample."""
    return bool((versions[1:] < versions[:-1]).any())


class Segment(msgspec.Struct, frozen=True):
    """Consecutive sampled tokens of one answer: the unit of progress, of continuation and of engine output.

    tokens_R: int32 ids; logprobs_R: float32 behaviour log-probs, `log_softmax(logits / temperature)` before any cut;
    versions_R: int32 policy version that sampled each token, never decreasing.
    """

    tokens_R: np.ndarray
    logprobs_R: np.ndarray
    versions_R: np.ndarray

    def __post_init__(self) -> None:
        length = len(self.tokens_R)
        _check_array("tokens_R", self.tokens_R, np.int32, length)
        _check_array("logprobs_R", self.logprobs_R, np.float32, length)
        _check_array("versions_R", self.versions_R, np.int32, length)
        if length:
            if int(self.versions_R[0]) < 0 or _decreases(self.versions_R):
                raise ValueError(
                    "versions_R must be non-negative and non-decreasing within an answer (invariant `stamped-versions`)"
                )
            if not (self.logprobs_R.max() <= 1e-3 and self.logprobs_R.min() > -np.inf):  # also catches NaN
                raise ValueError("logprobs_R must be finite and at most 0")

    def __len__(self) -> int:
        return len(self.tokens_R)

    @property
    def first_version(self) -> int:
        """Version of the first token; -1 for an empty segment."""
        return int(self.versions_R[0]) if len(self) else NO_VERSION

    @property
    def last_version(self) -> int:
        """Version of the last token; -1 for an empty segment."""
        return int(self.versions_R[-1]) if len(self) else NO_VERSION

    @staticmethod
    def empty() -> Segment:
        """A segment without tokens."""
        return _EMPTY

    def joined(self, more: Segment) -> Segment:
        """Append the tokens that were sampled next.

        Args:
            more: the tokens that follow, possibly none.

        Returns:
            A new segment of both.

        Raises:
            ValueError: versions would decrease between the two.

        Example:
            >>> one = Segment(np.array([5], np.int32), np.array([-0.5], np.float32), np.array([2], np.int32))
            >>> len(one.joined(one)), one.joined(Segment.empty()) is one
            (2, True)
        """
        if not len(self):
            return more
        if not len(more):
            return self
        return Segment(
            np.concatenate([self.tokens_R, more.tokens_R]),
            np.concatenate([self.logprobs_R, more.logprobs_R]),
            np.concatenate([self.versions_R, more.versions_R]),
        )

    def head(self, length: int) -> Segment:
        """The first `length` tokens."""
        return Segment(self.tokens_R[:length], self.logprobs_R[:length], self.versions_R[:length])

    def tail(self, start: int) -> Segment:
        """The tokens from index `start` on."""
        return Segment(self.tokens_R[start:], self.logprobs_R[start:], self.versions_R[start:])


_EMPTY = Segment(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))

EXPERT_TYPES = (np.uint8, np.uint16)
"""Types of expert numbers; the smallest one that can hold them is used."""


def as_experts(experts: np.ndarray) -> np.ndarray:
    """Convert expert numbers to the smallest of EXPERT_TYPES.

    Args:
        experts: an array of any integer type and shape.

    Returns:
        A contiguous array of uint8 or uint16.

    Raises:
        ValueError: a number does not fit.

    Example:
        >>> as_experts(np.array([1, 300])).dtype
        dtype('uint16')
    """
    if experts.size and (int(experts.min()) < 0 or int(experts.max()) > np.iinfo(np.uint16).max):
        raise ValueError("routed_experts must contain expert indices from 0 to 65535")
    is_small = not experts.size or int(experts.max()) <= np.iinfo(np.uint8).max
    return np.ascontiguousarray(experts, np.uint8 if is_small else np.uint16)


def _check_experts(experts: np.ndarray, length: int) -> None:
    if not isinstance(experts, np.ndarray) or experts.ndim != 3 or experts.dtype not in EXPERT_TYPES:
        raise ValueError("routed_experts must be a 3-D array of dtype uint8 or uint16")
    if len(experts) != length - 1:
        raise ValueError(f"routed_experts has {len(experts)} positions, expected {length - 1}")


def _check_ends(name: str, ends: np.ndarray, num_sampled: int) -> None:
    _check_array(name, ends, np.int32, len(ends))
    if not len(ends) or int(ends[0]) <= 0 or bool((np.diff(ends) <= 0).any()) or int(ends[-1]) != num_sampled:
        raise ValueError(
            f"{name} must be positive and strictly increasing, and its last entry must be {num_sampled}, the number of "
            "sampled tokens"
        )


def check_answers(ends: np.ndarray | None, ids: np.ndarray | None, num_sampled: int) -> None:
    """Raise ValueError unless these are ends and numbers of answers, as in Trajectory."""
    if ends is None or ids is None:
        raise ValueError("answer_ends_A and answer_ids_A must be passed together")
    _check_ends("answer_ends_A", ends, num_sampled)
    _check_array("answer_ids_A", ids, np.int32, len(ends))
    if int(ids.min()) < 0:
        raise ValueError("answer_ids_A must not be negative")


def _check_turns(ends: np.ndarray | None, rewards: np.ndarray | None, num_sampled: int) -> None:
    if ends is None or rewards is None:
        raise ValueError("turn_ends_K and turn_rewards_K must be passed together")
    _check_ends("turn_ends_K", ends, num_sampled)
    _check_array("turn_rewards_K", rewards, np.float32, len(ends))
    if not bool(np.isfinite(rewards).all()):
        raise ValueError("turn_rewards_K must be finite")


class Trajectory(msgspec.Struct, frozen=True):
    """One finished sample, prompt and answer together; all arrays have length T and are validated on construction.

    tokens_T int32; loss_mask_T bool, True where the policy sampled; logprobs_T float32, 0.0 where the mask is False;
    versions_T int32, -1 where the mask is False, never decreasing where it is True (`stamped-versions`).
    turn_ends_K int32, turn_rewards_K float32: for an episode whose turns have separate rewards, the number of sampled
    tokens up to the end of each turn, ascending to all of them, and the reward of each turn; None otherwise.
    answer_ends_A, answer_ids_A int32: the number of sampled tokens up to the end of each answer, and the answer's
    number in its sample (`Answer.number`). Required if a sample has several trajectories (`check_disjoint`).
    routed_experts: for a mixture of experts, if the engine reports them: uint8 or uint16 [T - 1, layers, experts per
    token], the experts that each position except the last was routed to. They are part of the trainer's batch and of
    the ledger; `trainer.router_replay` uses them.
    sources: if a workflow calls several models, which one sampled which tokens, trained or given, in order. Tokens
    outside all sources were sampled by the policy where the mask is True, and by no model where it is False.
    teacher_logprobs_T: with `trainer.teacher.model`, float32, the teacher's log-probs of the tokens at the temperature
    of sampling, 0.0 where the mask is False. They may be infinite or NaN if the teacher's are; the trainer refuses it.
    """

    tokens_T: np.ndarray
    loss_mask_T: np.ndarray
    logprobs_T: np.ndarray
    versions_T: np.ndarray
    finish_reason: FinishReason
    routed_experts: np.ndarray | None = None
    turn_ends_K: np.ndarray | None = None
    turn_rewards_K: np.ndarray | None = None
    answer_ends_A: np.ndarray | None = None
    answer_ids_A: np.ndarray | None = None
    sources: tuple[TokenSource, ...] = ()
    teacher_logprobs_T: np.ndarray | None = None

    def __post_init__(self) -> None:
        length = len(self.tokens_T)
        if self.routed_experts is not None:
            _check_experts(self.routed_experts, length)
        _check_array("tokens_T", self.tokens_T, np.int32, length)
        _check_array("loss_mask_T", self.loss_mask_T, np.bool_, length)
        _check_array("logprobs_T", self.logprobs_T, np.float32, length)
        _check_array("versions_T", self.versions_T, np.int32, length)
        mask = self.loss_mask_T
        sampled = self.versions_T[mask]
        if not len(sampled):
            raise ValueError("a trajectory needs at least one sampled token")
        if int(sampled[0]) < 0 or _decreases(sampled):
            raise ValueError(
                "versions_T must be non-negative and non-decreasing over sampled tokens (invariant `stamped-versions`)"
            )
        if bool((self.versions_T[~mask] != NO_VERSION).any()):
            raise ValueError("versions_T must be -1 where loss_mask_T is False")
        if bool((self.logprobs_T[~mask] != 0.0).any()):
            raise ValueError("logprobs_T must be 0.0 where loss_mask_T is False")
        if not bool(np.isfinite(self.logprobs_T).all()):
            raise ValueError("logprobs_T must be finite")
        if self.turn_ends_K is not None or self.turn_rewards_K is not None:
            _check_turns(self.turn_ends_K, self.turn_rewards_K, len(sampled))
        if self.answer_ends_A is not None or self.answer_ids_A is not None:
            check_answers(self.answer_ends_A, self.answer_ids_A, len(sampled))
        if self.sources:
            check_sources(self.sources, mask, self.versions_T)
        if self.teacher_logprobs_T is not None:
            _check_array("teacher_logprobs_T", self.teacher_logprobs_T, np.float32, length)
            if bool((self.teacher_logprobs_T[~mask] != 0.0).any()):
                raise ValueError("teacher_logprobs_T must be 0.0 where loss_mask_T is False")

    def __len__(self) -> int:
        return len(self.tokens_T)

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(self.loss_mask_T.sum())

    @property
    def num_turns(self) -> int:
        """Number of answers that are trained on; if they are not known, the number of runs of sampled tokens."""
        if self.answer_ids_A is not None:
            return len(self.answer_ids_A)
        return int(np.count_nonzero(np.diff(self.loss_mask_T.view(np.int8), prepend=0) > 0))

    @property
    def first_version(self) -> int:
        """Version that sampled the first token of the answer."""
        return int(self.versions_T[self.loss_mask_T][0])

    @property
    def last_version(self) -> int:
        """Version that sampled the last token of the answer."""
        return int(self.versions_T[self.loss_mask_T][-1])

    @staticmethod
    def from_prompt(
        prompt_tokens: np.ndarray,
        answer: Segment,
        finish_reason: FinishReason,
        routed_experts: np.ndarray | None = None,
    ) -> Trajectory:
        """Build the trajectory of a single-turn sample: a prompt followed by one answer.

        Args:
            prompt_tokens: [P] int32; they are not trained on.
            answer: the sampled tokens with their log-probs and versions.
            finish_reason: why the answer ended.
            routed_experts: the answer's experts, of any integer type, where they are known.

        Returns:
            The trajectory.

        Raises:
            ValueError: the answer is empty, or the experts do not fit it.

        Example:
            >>> answer = Segment(np.array([7], np.int32), np.array([-0.5], np.float32), np.array([3], np.int32))
            >>> trajectory = Trajectory.from_prompt(np.array([1, 2], np.int32), answer, "stop")
            >>> trajectory.loss_mask_T.tolist(), trajectory.first_version
            ([False, False, True], 3)
        """
        num_prompt = len(prompt_tokens)
        return Trajectory(
            tokens_T=np.concatenate([np.asarray(prompt_tokens, np.int32), answer.tokens_R]),
            loss_mask_T=np.concatenate([np.zeros(num_prompt, np.bool_), np.ones(len(answer), np.bool_)]),
            logprobs_T=np.concatenate([np.zeros(num_prompt, np.float32), answer.logprobs_R]),
            versions_T=np.concatenate([np.full(num_prompt, NO_VERSION, np.int32), answer.versions_R]),
            finish_reason=finish_reason,
            routed_experts=None if routed_experts is None else as_experts(routed_experts),
        )


def check_disjoint(trajectories: Sequence[Trajectory]) -> None:
    """Check, by the numbers of their answers, that the trajectories of one sample train each sampled token once.

    Args:
        trajectories: all trajectories of the sample. A trajectory contains tokens that another one trains as given
            tokens.

    Raises:
        ValueError: an answer is trained on twice, or it is not known which answers one of several trajectories has.

    Example:
        >>> one = Segment(np.array([7], np.int32), np.array([-0.5], np.float32), np.array([3], np.int32))
        >>> check_disjoint([Trajectory.from_prompt(np.array([1], np.int32), one, "stop")])
    """
    if len(trajectories) > 1 and any(one.answer_ids_A is None for one in trajectories):
        raise ValueError(
            "one of the trajectories does not record which answers it contains; build each trajectory with a "
            "Transcript, and add answers exactly as tools.generate returned them"
        )
    if twice := repeated_answers(trajectories):
        raise ValueError(
            f"answer {twice[0]} of the sample would be trained on twice; continue in a copy created by "
            "`transcript.forked()`, or add the answer to one transcript with `sampled` and to the others with `given`"
        )


def repeated_answers(trajectories: Sequence[Trajectory]) -> list[int]:
    """Numbers of the answers that the trajectories of one sample contain more than once, sorted."""
    known = [one.answer_ids_A for one in trajectories if one.answer_ids_A is not None]
    if not known:
        return []
    ids, counts = np.unique(np.concatenate(known), return_counts=True)
    return [int(one) for one in ids[counts > 1]]
