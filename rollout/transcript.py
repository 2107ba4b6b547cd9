"""The record of one episode: sampled and given tokens, in the order in which the model saw them.

It defines `Answer` (the result of one generation) and `Transcript` (answers and given tokens, and the trajectory that
they form). Arrays are checked in areal_like/trajectory.py.

Shape legend: P tokens of the prompt, T tokens of the whole transcript, R tokens of one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Literal

import msgspec
import numpy as np

from areal_like.token_source import TokenSource, sources_of
from areal_like.trajectory import NO_VERSION, FinishReason, Segment, Trajectory, as_experts
from areal_like.turn_checkpoint import TurnCheckpoint

EndedBy = Literal["end_of_sequence", "stop_token", "stop_string", "length", "context"]
"""Reason why a generation ended: an end-of-sequence id of the model, a stop token of the run or of the call, a text of
`sampling.stop`, the token limit, or the end of the context."""

POLICY = "policy"
"""Name of the policy as the source of a token; no model of `rollout.models` has this name."""

Encode = Callable[[str], np.ndarray]
"""Function that converts text to token ids, such as `PromptTokens.encode`."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One complete answer: all its tokens, including those of earlier leases, and why it ended.

    segment: the sampled tokens, including a stop token that ended it. Empty if the context was already full. number:
    index of its call of `tools.generate` in the sample, from 0; -1 if unknown. It identifies answers across several
    trajectories.
    ended_by: why it ended. stop_token: the id that ended it, for `end_of_sequence` and `stop_token`; None otherwise.
    is_trainable: False if it was sampled at another temperature than the run's, so that its log-probs differ from the
    trainer's, or by a model or role that is not trained; `Transcript.sampled` rejects it.
    model: name in `rollout.models` of the model that sampled it; empty: the policy, by `tools.generate`.
    routed_experts: with `rollout.engine.sglang.routed_experts`, int32 [prompt + answer - 1, layers, experts per token];
    None otherwise, for an answer that was completed by another worker, and if a server died before it reported them.
    """

    segment: Segment
    finish_reason: FinishReason
    ended_by: EndedBy = "length"
    number: int = -1
    stop_token: int | None = None
    is_trainable: bool = True
    model: str = ""
    routed_experts: np.ndarray | None = None


class Transcript:
    """Builds the trajectory of an episode of several turns. Tokens keep the ids with which they were sampled or given.

    Example:
        >>> transcript = Transcript(np.array([5, 6], np.int32))
        >>> segment = Segment(np.array([7], np.int32), np.array([-0.5], np.float32), np.array([3], np.int32))
        >>> transcript.sampled(Answer(segment=segment, finish_reason="stop"))
        >>> transcript.given([8, 9])
        >>> trajectory = transcript.close("environment")
        >>> trajectory.tokens_T.tolist(), trajectory.loss_mask_T.tolist()
        ([5, 6, 7, 8, 9], [False, False, True, False, False])
    """

    def __init__(self, prompt: np.ndarray | Sequence[int] | str, *, encode: Encode | None = None) -> None:
        """Args:
            prompt: the tokens, or with `encode` the text, that the policy sees first.
            encode: converts text to tokens, usually `tools.tokens.encode`.

        Raises:
            TypeError: text without `encode`.
        """
        self._encode = encode
        self._parts: list[np.ndarray | Segment] = []
        self._numbers: list[int] = []
        """Numbers of the sampled parts, as in `Answer.number`."""
        self._sources: list[TokenSource] = []
        self._last: Answer | None = None
        """The answer at the end of the transcript; None if it ends with given tokens."""
        self.num_sampled = 0
        """Number of tokens that the policy sampled."""
        self.num_turns = 0
        """Number of answers added."""
        self.last_version = NO_VERSION
        """Version of the newest sampled token; -1 before the first."""
        self.given(prompt)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def tokens_T(self) -> np.ndarray:
        """int32: all tokens so far, from which the next generation continues."""
        ids = [part.tokens_R if isinstance(part, Segment) else part for part in self._parts]
        return np.concatenate(ids) if ids else np.zeros(0, np.int32)

    def sampled(self, answer: Answer | Segment) -> None:
        """Add an answer of the policy, which is trained on.

        Args:
            answer: the result of `tools.generate`, or its segment. An empty one changes nothing.

        Raises:
            ValueError: it was sampled at another temperature than the run's, by a model that is not trained, or by an
                older version than the tokens before it.
        """
        if isinstance(answer, Answer) and not answer.is_trainable:
            what = f"an answer of {answer.model}" if answer.model else "this answer"
            raise ValueError(
                f"{what} cannot be used for training, because its model is not trained, or its temperature is not "
                "that of the run; add the answer with `given`"
            )
        segment = answer.segment if isinstance(answer, Answer) else answer
        if not len(segment):
            return
        if segment.first_version < self.last_version:
            raise ValueError(
                f"an answer sampled by version {segment.first_version} cannot follow tokens of version "
                f"{self.last_version} "
                "(invariant `stamped-versions`)"
            )
        self._last = answer if isinstance(answer, Answer) else Answer(segment=segment, finish_reason="stop")
        if self._last.model:
            self._sources += sources_of(self._last.model, segment.versions_R, len(self))
        self._parts.append(segment)
        self._numbers.append(self._last.number)
        self.num_sampled += len(segment)
        self.num_turns += 1
        self.last_version = segment.last_version

    def given(self, what: np.ndarray | Sequence[int] | str | Answer) -> None:
        """Add tokens that the policy sees but that are not trained on, such as a tool's output or another model's
        answer.

        Args:
            what: token ids, or with `encode` text. An answer keeps the name and version of the model that sampled it.

        Raises:
            TypeError: text without `encode`.
            UserError: characters that have no token.
        """
        if isinstance(what, Answer):
            self._sources += sources_of(what.model or POLICY, what.segment.versions_R, len(self))
            what = what.segment.tokens_R
        if isinstance(what, str):
            if self._encode is None:
                raise TypeError(
                    "a transcript without a tokenizer does not accept text; pass `encode=tools.tokens.encode`"
                )
            what = self._encode(what)
        ids = np.asarray(what, np.int32)
        if ids.ndim != 1:
            raise ValueError("given tokens must be a one-dimensional array")
        if len(ids):
            self._parts.append(ids)
            self._last = None

    def copied(self) -> Transcript:
        """A copy of the transcript."""
        made = Transcript(np.zeros(0, np.int32), encode=self._encode)
        made._parts, made._numbers, made._last = list(self._parts), list(self._numbers), self._last
        made._sources = list(self._sources)
        made.num_sampled, made.num_turns, made.last_version = self.num_sampled, self.num_turns, self.last_version
        return made

    def forked(self) -> Transcript:
        """A transcript with the conversation so far, to continue it in another way: tokens sampled so far are given
        there, and are trained on here only.

        Each closed transcript is one trajectory of the sample (`Sample.others`). Do not close a fork without sampled
        tokens, which has nothing to train on.

        Example:
            >>> transcript = Transcript(np.array([5, 6], np.int32))
            >>> segment = Segment(np.array([7], np.int32), np.array([-0.5], np.float32), np.array([3], np.int32))
            >>> transcript.sampled(Answer(segment=segment, finish_reason="stop", number=0))
            >>> fork = transcript.forked()
            >>> fork.sampled(Answer(segment=segment, finish_reason="stop", number=1))
            >>> fork.close().tokens_T.tolist(), fork.close().loss_mask_T.tolist()
            ([5, 6, 7, 7], [False, False, False, True])
        """
        made = Transcript(self.tokens_T, encode=self._encode)
        made.last_version, made._sources = self.last_version, list(self._sources)
        return made

    def checkpoint(self, num_turns: int, state: bytes) -> TurnCheckpoint:
        """The checkpoint from which, with the sampled tokens (`sampled_tokens`), this transcript can be restored."""
        places, tokens, num_sampled = [], [], 0
        for part in self._parts:
            if isinstance(part, Segment):
                num_sampled += len(part)
            else:
                places.append(np.full(len(part), num_sampled, np.int32))
                tokens.append(part)
        empty = [np.zeros(0, np.int32)]
        return TurnCheckpoint(
            given_places_G=np.concatenate(places or empty), given_tokens_G=np.concatenate(tokens or empty),
            num_turns=num_turns, state=state, sources=tuple(self._sources), **self._answers(),
        )  # fmt: skip

    @staticmethod
    def restored(sampled: Segment, checkpoint: TurnCheckpoint, *, encode: Encode | None = None) -> Transcript:
        """Restore a transcript from its sampled tokens and checkpoint.

        Raises ValueError if they do not belong together.
        """
        places, tokens = checkpoint.given_places_G, checkpoint.given_tokens_G
        ends, ids = checkpoint.answer_ends_A, checkpoint.answer_ids_A
        if len(places) and int(places[-1]) > len(sampled):
            raise ValueError(
                f"the checkpoint has a given token after {int(places[-1])} sampled tokens, but there are "
                f"only {len(sampled)}"
            )
        if ends is None or ids is None:
            # Answers without a number, or a checkpoint of an older version of areal_like. The numbers are only distinct
            # from those of later answers: there is at most one part for each earlier turn.
            ends = np.unique([place for place in (*places.tolist(), len(sampled)) if place]).astype(np.int32)
            ids = np.arange(len(ends), dtype=np.int32)
        elif int(ends[-1]) != len(sampled) or not np.isin(places, [0, *ends.tolist()]).all():
            raise ValueError(f"the answers of a checkpoint do not match its {len(sampled)} sampled tokens")
        made, done = Transcript(tokens[places == 0], encode=encode), 0
        for end, number in zip(ends.tolist(), ids.tolist(), strict=True):
            segment = sampled.tail(done).head(end - done)
            made.sampled(Answer(segment=segment, finish_reason="stop", number=number))
            made.given(tokens[places == end])
            done = end
        made.num_turns, made._sources = checkpoint.num_turns, list(checkpoint.sources)
        return made

    @property
    def sampled_tokens(self) -> Segment:
        """All sampled tokens, joined."""
        return reduce(Segment.joined, self.segments(), Segment.empty())

    def close(
        self, reason: FinishReason | None = None, *, turn_rewards: Sequence[tuple[int, float]] = ()
    ) -> Trajectory:
        """Create the trajectory to train on.

        Args:
            reason: why the episode ended. None: the last answer's reason, or `environment` after given tokens.
            turn_rewards: `num_sampled` at the end of each turn, and the turn's reward; tokens after the last one are a
                turn of reward 0. Empty: turns have no separate rewards. For `trainer.advantage.kind: turns`.

        Returns:
            The trajectory.

        Raises:
            ValueError: nothing was sampled, or a turn has no token.
        """
        if reason is None:
            reason = self._last.finish_reason if self._last is not None else "environment"
        experts = self._last.routed_experts if self._last is not None else None
        return Trajectory(
            tokens_T=self.tokens_T,
            loss_mask_T=self._column(np.bool_, False, lambda segment: np.ones(len(segment), np.bool_)),
            logprobs_T=self._column(np.float32, 0.0, lambda segment: segment.logprobs_R),
            versions_T=self._column(np.int32, NO_VERSION, lambda segment: segment.versions_R),
            finish_reason=reason,
            routed_experts=None if experts is None else as_experts(experts),
            sources=tuple(self._sources),
            **_turns(turn_rewards, self.num_sampled),
            **self._answers(),
        )

    def segments(self) -> Iterator[Segment]:
        """The sampled parts, in order."""
        return (part for part in self._parts if isinstance(part, Segment))

    def _answers(self) -> dict[str, np.ndarray]:
        """Fields of the trajectory with the answers' numbers; none if a number is unknown."""
        if not self._numbers or min(self._numbers) < 0:
            return {}
        ends = np.cumsum([len(segment) for segment in self.segments()], dtype=np.int32)
        return {"answer_ends_A": ends, "answer_ids_A": np.array(self._numbers, np.int32)}

    def _column(self, dtype: type, fill: float, of_sampled: Callable[[Segment], np.ndarray]) -> np.ndarray:
        parts = [
            of_sampled(part) if isinstance(part, Segment) else np.full(len(part), fill, dtype) for part in self._parts
        ]
        return np.concatenate(parts).astype(dtype, copy=False)


def _turns(turn_rewards: Sequence[tuple[int, float]], num_sampled: int) -> dict[str, np.ndarray]:
    """Fields of the trajectory."""
    if not turn_rewards:
        return {}
    turns = [*turn_rewards, *([(num_sampled, 0.0)] if turn_rewards[-1][0] < num_sampled else [])]
    ends, rewards = zip(*turns, strict=True)
    return {"turn_ends_K": np.array(ends, np.int32), "turn_rewards_K": np.array(rewards, np.float32)}
