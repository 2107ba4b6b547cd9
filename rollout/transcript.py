"""The record of one episode: what the policy sampled, what others gave, in the order in which the model saw it.

Owns: `Answer` (what one generation gave), `Transcript` (answers and given tokens, and the trajectory they make).
Refuses: generating, scoring, tokenizers (it is lent `encode`); checks of the arrays (areal_like/trajectory.py).

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
"""What ended a generation: an end-of-sequence id of the model, a stop token of the run or of the call, a text of
`sampling.stop`, the limit of tokens, or the end of the context."""

POLICY = "policy"
"""Names the policy where a token's source is shown; no model of `rollout.models` has this name."""

Encode = Callable[[str], np.ndarray]
"""Text to token ids, as `PromptTokens.encode`."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One complete answer: all its tokens, those of earlier leases included, and why it ended.

    segment: the sampled tokens, with the stop token where one ended it. Empty where the context was full already.
    number: of the calls of `tools.generate` in its sample, from 0; -1 where it is not known. It tells the answers of
    several trajectories apart.
    ended_by: what ended it. stop_token: the id that did, for `end_of_sequence` and `stop_token`; None otherwise.
    is_trainable: False where it was sampled at another temperature than the run's, so that its log-probs are not those
    that the trainer computes, or by a model or role that is not trained; `Transcript.sampled` refuses it.
    model: name in `rollout.models` of the model that sampled it; empty: the policy, by `tools.generate`.
    routed_experts: with `rollout.engine.sglang.routed_experts`, int32 [prompt + answer - 1, layers, experts per token];
    None otherwise, for an answer that came complete from another worker, and where a server died before it reported
    them.
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
    """Builds the trajectory of an episode of several turns. Tokens keep the ids they were sampled or given with.

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
        """
        Args:
            prompt: the tokens, or with `encode` the text, that the policy sees first.
            encode: turns text into tokens, usually `tools.tokens.encode`.

        Raises:
            TypeError: text without `encode`.
        """
        self._encode = encode
        self._parts: list[np.ndarray | Segment] = []
        self._numbers: list[int] = []
        """Of the sampled parts, as `Answer.number`."""
        self._sources: list[TokenSource] = []
        self._last: Answer | None = None
        """The answer the transcript ends in; None where it ends in given tokens."""
        self.num_sampled = 0
        """Tokens that the policy sampled."""
        self.num_turns = 0
        """Answers taken in."""
        self.last_version = NO_VERSION
        """Of the newest sampled token; -1 before the first."""
        self.given(prompt)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def tokens_T(self) -> np.ndarray:
        """int32: everything so far, which is what the next generation starts from."""
        ids = [part.tokens_R if isinstance(part, Segment) else part for part in self._parts]
        return np.concatenate(ids) if ids else np.zeros(0, np.int32)

    def sampled(self, answer: Answer | Segment) -> None:
        """Add what the policy answered: it is trained on.

        Args:
            answer: what `tools.generate` returned, or its segment. An empty one changes nothing.

        Raises:
            ValueError: it was sampled at another temperature than the run's, by a model that is not trained, or by an
                older version than the tokens before it.
        """
        if isinstance(answer, Answer) and not answer.is_trainable:
            whose = f" by {answer.model}, which is not trained, or" if answer.model else ""
            raise ValueError(
                f"an answer sampled{whose} at another temperature than the run's cannot be trained on; add it by"
                " `given`"
            )
        segment = answer.segment if isinstance(answer, Answer) else answer
        if not len(segment):
            return
        if segment.first_version < self.last_version:
            raise ValueError(
                f"sampled by version {segment.first_version} after tokens of version {self.last_version} "
                "(`stamped-versions`)"
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
        """Add what is seen and not trained on, such as a tool's output or what another model said.

        Args:
            what: token ids, or with `encode` text. An answer keeps the name and version of the model that sampled it.

        Raises:
            TypeError: text without `encode`.
            UserError: characters that the tokenizer has no token for.
        """
        if isinstance(what, Answer):
            self._sources += sources_of(what.model or POLICY, what.segment.versions_R, len(self))
            what = what.segment.tokens_R
        if isinstance(what, str):
            if self._encode is None:
                raise TypeError("text in a transcript without a tokenizer; give `encode=tools.tokens.encode`")
            what = self._encode(what)
        ids = np.asarray(what, np.int32)
        if ids.ndim != 1:
            raise ValueError("given tokens must be a one-dimensional array")
        if len(ids):
            self._parts.append(ids)
            self._last = None

    def copied(self) -> Transcript:
        """The same turns in a transcript of its own."""
        made = Transcript(np.zeros(0, np.int32), encode=self._encode)
        made._parts, made._numbers, made._last = list(self._parts), list(self._numbers), self._last
        made._sources = list(self._sources)
        made.num_sampled, made.num_turns, made.last_version = self.num_sampled, self.num_turns, self.last_version
        return made

    def forked(self) -> Transcript:
        """The conversation so far, to be continued in another way: what was sampled is seen there and trained on here.

        Each closed transcript is one trajectory of the sample (`Sample.others`). A fork in which nothing was sampled
        has nothing to train on: do not close it.

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
        """What makes this transcript again, together with its sampled tokens (`sampled_tokens`)."""
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
            num_turns=num_turns, state=state, sources=tuple(self._sources),
        )  # fmt: skip

    @staticmethod
    def restored(sampled: Segment, checkpoint: TurnCheckpoint, *, encode: Encode | None = None) -> Transcript:
        """The transcript whose sampled tokens and checkpoint these are.

        Raises ValueError where a given token stands behind all sampled ones of a longer episode.
        """
        places, tokens = checkpoint.given_places_G, checkpoint.given_tokens_G
        if len(places) and int(places[-1]) > len(sampled):
            raise ValueError(f"a given token at {int(places[-1])} of {len(sampled)} sampled ones")
        made, done = Transcript(tokens[:0], encode=encode), 0
        for place in np.unique(places).tolist():
            made.sampled(sampled.tail(done).head(place - done))
            made.given(tokens[places == place])
            done = place
        made.sampled(sampled.tail(done))
        made._numbers = list(range(len(made._numbers)))  # at most one for each turn before, so later answers differ
        made.num_turns, made._sources = checkpoint.num_turns, list(checkpoint.sources)
        return made

    @property
    def sampled_tokens(self) -> Segment:
        """All sampled tokens, joined."""
        return reduce(Segment.joined, self.segments(), Segment.empty())

    def close(
        self, reason: FinishReason | None = None, *, turn_rewards: Sequence[tuple[int, float]] = ()
    ) -> Trajectory:
        """Make the trajectory that is trained on.

        Args:
            reason: why the episode ended. None: as the last answer did, or `environment` after given tokens.
            turn_rewards: `num_sampled` at the end of each turn, and the turn's reward; tokens after the last one are a
                turn of reward 0. Empty: turns have no rewards of their own. For `trainer.advantage.kind: turns`.

        Returns:
            The trajectory, checked.

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
        """Fields of the trajectory; none where a number is not known."""
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
