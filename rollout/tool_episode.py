"""The workflow `tools`: a policy answers in a chat, calls tools, sees their results, and continues until it calls none.

Calls are parsed in rollout/chat, tools run in the environment of the reward service, and answers are judged by the
scorers.

The last answer ends the episode with `stop`. The episode ends with `length` at an answer's token limit, at calls after
`max_turns`, and at results that do not fit the context. **Scorers see only the content of the last answer**: results of
tools and earlier turns are not scored, since a policy could write there what a scorer searches for.

A turn keeps its sampled token ids. Between two turns are the tokens that the chat template writes between a message
with calls and the next answer; they are given, not trained on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from areal_like.environment import MAX_TURNS, Step
from areal_like.errors import UserError
from areal_like.tool_call import ToolCall, call_id
from areal_like.trajectory import FinishReason, Trajectory
from areal_like.verdict import FAILED_CALLS, Verdict
from areal_like.wire.messages import SampleTask
from rollout.answers import read_answer
from rollout.chat.calls import schemas_by_name
from rollout.chat.formats import ChatFormat, ParsedAnswer, find_format
from rollout.environment_client import EnvironmentEpisode
from rollout.episode import with_observation
from rollout.transcript import Transcript
from rollout.workflow import OPTIONS_KEY, Sample, SampleTools, StateTooLarge

FORMAT_KEY = f"{OPTIONS_KEY}.format"
NO_CALLS = dict.fromkeys(("tool_calls", "tool_truncated", "tool_s", *FAILED_CALLS), 0.0)
"""Components of an episode without calls, so that means over samples have one denominator."""


@dataclass(kw_only=True, slots=True)
class _Turns:
    """State of a running episode."""

    transcript: Transcript
    num_prompt: int
    declared: list[dict[str, Any]]
    """The tools, as the environment declared them."""
    last: ParsedAnswer = field(default_factory=lambda: ParsedAnswer("", ""))
    """The newest answer."""

    @property
    def state(self) -> dict[str, Any]:
        """The state that a checkpoint contains in addition to the transcript."""
        return {"num_prompt": self.num_prompt, "declared": self.declared}


class ToolWorkflow:
    """Alternates between the policy's answers and the tools of `reward.environment`."""

    is_resumable = False

    def __init__(self, *, max_turns: int = 8, turn_tokens: int | None = None, format: str | None = None) -> None:
        """Args:
            max_turns: turns of one episode whose calls are run.
            turn_tokens: largest number of tokens of one answer; None: `sampling.max_new_tokens`.
            format: how the model writes calls, a name of `rollout.chat.formats.FORMATS`; None: as the tokenizer's chat
                template shows it.

        Raises:
            UserError: a bound below 1, more turns than an episode may have, or no such format.
        """
        if max_turns < 1 or (turn_tokens is not None and turn_tokens < 1):
            raise UserError("max_turns and turn_tokens must be at least 1", where=OPTIONS_KEY)
        if max_turns > MAX_TURNS:
            raise UserError(f"max_turns must be at most {MAX_TURNS}, not {max_turns}", where=OPTIONS_KEY)
        if format is not None:
            find_format(None, name=format, where=FORMAT_KEY)
        self._max_turns, self._turn_tokens, self._format = max_turns, turn_tokens, format

    async def run(self, task: SampleTask, tools: SampleTools) -> Sample:
        chat = find_format(tools.tokens.chat_template, name=self._format, where=FORMAT_KEY)
        before = tools.resumed
        async with tools.environment(before.state["episode"] if before else None) as episode:
            if before is not None:
                turns = _Turns(transcript=before.transcript, **{k: before.state[k] for k in ("num_prompt", "declared")})
            else:
                turns = await _begin(task.row, tools, episode)
            reason: FinishReason = "environment"
            if episode.failure is None:
                reason = await self._play(tools, chat, turns, episode)
            transcript = turns.transcript
            if not transcript.num_sampled:  # a sample needs a token; its verdict decides how it is used
                transcript.sampled(await tools.generate(transcript, max_new_tokens=1))
            trajectory = transcript.close(reason)
            verdict = await _verdict(tools, turns, episode, trajectory)
        text = tools.tokens.decode(transcript.tokens_T[turns.num_prompt :])
        return Sample(trajectory=trajectory, verdict=verdict, response_text=text)

    async def _play(
        self, tools: SampleTools, chat: ChatFormat, turns: _Turns, episode: EnvironmentEpisode
    ) -> FinishReason:
        """Run turns until the episode ends; returns the finish reason."""
        schemas, transcript = schemas_by_name(turns.declared), turns.transcript
        while True:
            before_T = transcript.tokens_T
            answer = await tools.generate(transcript, max_new_tokens=self._turn_tokens)
            transcript.sampled(answer)
            turns.last = read_answer(tools.tokens, chat, before_T, answer, schemas)
            if answer.ended_by in ("length", "context"):
                return "length"
            if not turns.last.calls:
                return "stop"
            if episode.num_turns == self._max_turns:
                return "length"
            step = await episode.step(turns.last.calls)
            if step is None or step.is_done:
                return "environment"
            assert answer.stop_token is not None
            try:
                given = _given(tools, chat, turns.last.calls, step, answer.stop_token)
            except UserError as error:  # a verdict of this sample: the other samples of its group continue
                episode.fail("invalid", f"the results of turn {episode.num_turns} are invalid: {error.what}")
                return "environment"
            if len(transcript) + len(given) >= tools.tokens.max_context:
                episode.over_context = True
                return "length"
            transcript.given(given)
            with contextlib.suppress(
                StateTooLarge
            ):  # a long episode continues; it can be resumed from the last checkpoint that fitted
                tools.checkpoint(transcript, {"episode": episode.record, **turns.state})


async def _begin(row: Mapping[str, Any], tools: SampleTools, episode: EnvironmentEpisode) -> _Turns:
    """The prompt with the tools that the environment declares; without them if that fails."""
    first = await episode.reset()
    declared: list[dict[str, Any]] = list(first.tools) if first is not None else []
    if first is not None and not declared:
        raise UserError(
            "the environment declares no tools",
            where="reward.environment.kind",
            remedy="use the environment `tools`, or return Step(tools=...) from `reset`",
        )
    if first is not None and first.observation:
        row = with_observation(row, first.observation)
    prompt_P = tools.tokens.prompt(row, declared)
    return _Turns(
        transcript=Transcript(prompt_P, encode=tools.tokens.encode), num_prompt=len(prompt_P), declared=declared
    )


def _given(tools: SampleTools, chat: ChatFormat, calls: Sequence[ToolCall], step: Step, stop_token: int) -> np.ndarray:
    """Tokens of the results, up to the start of the next answer. Raises UserError if they cannot be encoded."""
    if len(step.results) > len(calls):
        raise UserError(f"the environment returned {len(step.results)} results for {len(calls)} calls")
    results = [
        {"role": "tool", "tool_call_id": call_id(index), "name": call.name or "unknown", "content": result}
        for index, (call, result) in enumerate(zip(calls, step.results, strict=False))
    ]
    if step.observation:
        results.append({"role": "user", "content": step.observation})
    called = chat.past_calls([call.name for call in calls[: len(step.results)]])
    return tools.tokens.tool_results(called, results, stop_token, chat.stop_marks)


async def _verdict(tools: SampleTools, turns: _Turns, episode: EnvironmentEpisode, trajectory: Trajectory) -> Verdict:
    """The scorers' verdict on the last answer's content, with the episode's counts; or the environment's failure,
    unchanged."""
    parts = {"turns": float(episode.num_turns), "answered": float(trajectory.finish_reason == "stop")}
    if episode.over_context:
        parts["observation_over_context"] = 1.0
    if episode.failure is not None:
        return episode.failure
    verdict = await tools.score(turns.last.content, trajectory)
    return msgspec.structs.replace(
        verdict, components={**NO_CALLS, **parts, **episode.components, **verdict.components}
    )
