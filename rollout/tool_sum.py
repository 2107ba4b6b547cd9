"""The workflow `tool_sum`: running sums with a calculator (areal_like/tasks/tool_sum.py). An example of a
workflow with several turns. The same task is also an environment: `ToolSum` there.
"""

from __future__ import annotations

from areal_like.errors import UserError
from areal_like.tasks.tool_sum import CALL_END, components, is_correct, tool_output
from areal_like.wire.messages import SampleTask
from rollout.transcript import Transcript
from rollout.workflow import Sample, SampleTools


class ToolSum:
    """Generates up to a call, adds the tool's output, and continues until the model ends its answer."""

    is_resumable = False

    def __init__(self, *, max_turns: int = 24, episode_tokens: int = 120) -> None:
        """Args:
            max_turns: largest number of tool calls of an episode.
            episode_tokens: longest episode: sampled and given tokens together, without the prompt.

        Raises:
            UserError: a bound below 1.
        """
        if min(max_turns, episode_tokens) < 1:
            raise UserError("max_turns and episode_tokens must be at least 1", where="rollout.workflow_options")
        self._max_turns, self._episode_tokens = max_turns, episode_tokens

    async def run(self, task: SampleTask, tools: SampleTools) -> Sample:
        prompt_P, before = tools.tokens.prompt(task.row), tools.resumed
        transcript = before.transcript if before else Transcript(prompt_P, encode=tools.tokens.encode)
        said: list[str] = before.state if before else []
        num_prompt, call_end = len(prompt_P), tools.tokens.encode(CALL_END)
        has_ended = False
        while len(said) <= self._max_turns and (room := self._episode_tokens + num_prompt - len(transcript)) > 0:
            answer = await tools.generate(transcript, max_new_tokens=room, stop_token_ids=call_end)
            transcript.sampled(answer)
            said.append(tools.tokens.decode(answer.segment.tokens_R))
            has_ended = answer.ended_by == "end_of_sequence"
            if answer.ended_by != "stop_token":
                break
            transcript.given(tool_output(said[-1]))
            tools.checkpoint(transcript, said)  # if the worker is lost or drains, only the current turn is lost
        # Only the model's last answer counts, because the whole text could imitate the tool's output.
        correct = float(has_ended and is_correct(task.row, said[-1]))
        parts = components(correct, said, len(said) - 1)
        text = tools.tokens.decode(transcript.tokens_T[num_prompt:])
        trajectory = transcript.close("stop" if has_ended else "length")
        return Sample(trajectory=trajectory, verdict=tools.verdict(correct, components=parts), response_text=text)
