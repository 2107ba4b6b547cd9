"""The workflow `environment`: a policy and an environment take turns (areal_like/environment.py).

The environment is called through environment_client.py. The verdict is the sum of the environment's rewards; no text is
scored, because a policy could imitate the environment's text.

An episode ends when the environment reports its end (`environment`), and with `length` after `max_turns`, at the end of
the context, in a turn truncated at its token limit, or when an observation does not fit the context. Rewards so far
count then. A failure is a verdict of another kind (`timed_out`, `crashed`, `invalid`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_like.environment import MAX_TURNS
from areal_like.errors import UserError
from areal_like.trajectory import FinishReason
from areal_like.verdict import Verdict
from areal_like.wire.messages import SampleTask
from rollout.environment_client import EnvironmentEpisode
from rollout.transcript import Answer, Transcript
from rollout.workflow import OPTIONS_KEY, Sample, SampleTools, StateTooLarge


class EnvironmentWorkflow:
    """Alternates between the policy's turns and `reward.environment`."""

    is_resumable = False

    def __init__(self, *, max_turns: int = 16, turn_tokens: int | None = None, stop: str = "") -> None:
        """Args:
            max_turns: largest number of actions of one episode. turn_tokens: largest number of tokens of one turn;
                None: `sampling.max_new_tokens`.
            stop: the last token of this text ends a turn as well as the model's end of sequence, for a model that was
                trained with such a marker. The environment's text then follows unchanged, without the chat template.

        Raises:
            UserError: a bound below 1, or more turns than an episode may have.
        """
        if max_turns < 1 or (turn_tokens is not None and turn_tokens < 1):
            raise UserError("max_turns and turn_tokens must be at least 1", where=OPTIONS_KEY)
        if max_turns > MAX_TURNS:
            raise UserError(f"max_turns must be at most {MAX_TURNS}, not {max_turns}", where=OPTIONS_KEY)
        self._max_turns, self._turn_tokens, self._stop = max_turns, turn_tokens, stop

    async def run(self, task: SampleTask, tools: SampleTools) -> Sample:
        before = tools.resumed
        async with tools.environment(before.state["episode"] if before else None) as episode:
            if before is not None:
                transcript, num_prompt = before.transcript, before.state["num_prompt"]
            else:
                prompt_P = await _begin(task.row, tools, episode)
                transcript, num_prompt = Transcript(prompt_P, encode=tools.tokens.encode), len(prompt_P)
            reason: FinishReason = "environment"
            if episode.failure is None:
                reason = await self._play(tools, transcript, episode, num_prompt)
            if not transcript.num_sampled:  # a sample needs a token; its verdict decides how it is used
                transcript.sampled(await tools.generate(transcript, max_new_tokens=1))
            verdict = _verdict(episode, reason)
        text = tools.tokens.decode(transcript.tokens_T[num_prompt:])
        turn_rewards = list(zip(episode.turn_ends, episode.rewards, strict=True)) if verdict.is_scored else []
        trajectory = transcript.close(reason, turn_rewards=turn_rewards)
        return Sample(trajectory=trajectory, verdict=verdict, response_text=text)

    async def _play(
        self, tools: SampleTools, transcript: Transcript, episode: EnvironmentEpisode, num_prompt: int
    ) -> FinishReason:
        """Run turns until the episode ends; returns the finish reason."""
        stop = tools.tokens.encode(self._stop)[-1:] if self._stop else None
        while episode.num_turns < self._max_turns:
            answer = await tools.generate(transcript, max_new_tokens=self._turn_tokens, stop_token_ids=stop)
            transcript.sampled(answer)
            if answer.ended_by in ("length", "context"):
                return "length"
            step = await episode.step(tools.tokens.decode(answer.segment.tokens_R))
            if step is None:
                return "environment"
            episode.turn_ends.append(transcript.num_sampled)
            if step.is_done:
                return "environment"
            if episode.num_turns == self._max_turns:
                break
            try:
                given = _words(tools, answer, step.observation)
            except UserError as error:  # a verdict of this sample: the other samples of its group continue
                episode.fail("invalid", f"the observation in turn {episode.num_turns} is invalid: {error.what}")
                return "environment"
            if len(transcript) + len(given) >= tools.tokens.max_context:
                episode.over_context = True
                break
            transcript.given(given)
            with contextlib.suppress(
                StateTooLarge
            ):  # a long episode continues; it can be resumed from the last checkpoint that fitted
                tools.checkpoint(transcript, {"episode": episode.record, "num_prompt": num_prompt})
        return "length"


async def _begin(row: Mapping[str, Any], tools: SampleTools, episode: EnvironmentEpisode) -> np.ndarray:
    """The prompt [P]: the row's, followed by the environment's first text; only the row's if that fails."""
    prompt_P = tools.tokens.prompt(row)  # a fault of the row is not the environment's
    first = await episode.reset()
    if first is None or not first.observation:
        return prompt_P
    try:
        return tools.tokens.prompt(with_observation(row, first.observation))
    except UserError as error:
        episode.fail("invalid", f"the first observation is invalid: {error.what}")
        return prompt_P


def with_observation(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The row with a text appended to its prompt, or to the last message if that is the user's.

    Example:
        >>> with_observation({"prompt": "Play."}, " You see a door.")["prompt"]
        'Play. You see a door.'
    """
    messages = row.get("messages")
    if messages is None:
        return {**row, "prompt": f"{row.get('prompt', '')}{text}"}
    last = messages[-1] if messages else {}
    if last.get("role") == "user" and isinstance(last.get("content"), str):
        return {**row, "messages": [*messages[:-1], {**last, "content": f"{last['content']}{text}"}]}
    return {**row, "messages": [*messages, {"role": "user", "content": text}]}


def _words(tools: SampleTools, answer: Answer, observation: str) -> np.ndarray:
    """Tokens of an observation: the next message of a chat if the turn ended with the end of a message, else the
    text.
    """
    if answer.ended_by == "end_of_sequence" and answer.stop_token is not None:
        return tools.tokens.observation(observation, answer.stop_token)
    return tools.tokens.encode(observation)


def _verdict(episode: EnvironmentEpisode, reason: FinishReason) -> Verdict:
    parts = {"turns": float(episode.num_turns), "ended": float(reason == "environment")}
    if episode.over_context:
        parts["observation_over_context"] = 1.0
    return episode.verdict(parts)
