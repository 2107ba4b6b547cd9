"""The bounds and failures of the workflow `tools`, and what an episode begins with."""

from __future__ import annotations

from typing import Any

import pytest
from chat_tokenizer import byte_tokenizer

from areal_like.environment import Step
from areal_like.errors import UserError
from areal_like.trajectory import Segment
from areal_like.turn_checkpoint import TurnCheckpoint
from areal_like.wire.messages import EnvironmentReply
from rollout.tool_episode import NO_CALLS, ToolWorkflow
from rollout.transcript import Answer, Transcript
from rollout.workflow import Resumed, StateTooLarge
from tests.rollout.test_tool_episode import TEMPLATE, TOOLS, Tools, call


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(TEMPLATE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_turns": 0}, "max_turns and turn_tokens must be at least 1"),
        ({"turn_tokens": 0}, "max_turns and turn_tokens must be at least 1"),
        ({"max_turns": 4097}, "max_turns must be at most 4096, not 4097"),
    ],
)
def test_bounds_of_an_episode_are_checked_when_it_is_made(options: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"^rollout.workflow_options: {words}"):
        ToolWorkflow(**options)


def test_smallest_and_largest_bounds_are_taken(tokenizer: Any) -> None:
    ToolWorkflow(max_turns=4096)
    sample = Tools(tokenizer, "<|im_end|>").play(max_turns=1, turn_tokens=1)
    assert sample.trajectory.finish_reason == "stop"


def test_episode_has_eight_turns_with_calls_by_default(tokenizer: Any) -> None:
    line = call("add", x=1, y=1) + "<|im_end|>"
    tools = Tools(tokenizer, *[line] * 9)
    sample = tools.play()
    assert (sample.trajectory.finish_reason, tools.lines) == ("length", [])
    assert (sample.verdict.components["turns"], sample.verdict.components["tool_calls"]) == (8.0, 8.0)


def test_response_of_a_sample_is_all_that_follows_the_prompt(tokenizer: Any) -> None:
    tools = Tools(tokenizer, call("add", x=3, y=4) + "<|im_end|>", "7<|im_end|>")
    sample = tools.play()
    assert sample.response_text == call("add", x=3, y=4) + "\nuser\n[7]\nassistant\n7"


def test_results_fit_where_one_token_of_context_is_left_for_the_answer(tokenizer: Any) -> None:
    line = call("add", x=3, y=4) + "<|im_end|>"
    whole = Tools(tokenizer, line, "7<|im_end|>")
    whole.play()
    num_before_answer = len(whole.prompts[1])
    for max_context, reason in ((num_before_answer, "length"), (num_before_answer + 1, "stop")):
        tools = Tools(tokenizer, line, "7<|im_end|>", max_context=max_context)
        sample = tools.play()
        assert sample.trajectory.finish_reason == reason
        assert sample.verdict.components.get("observation_over_context", 0.0) == float(reason == "length")
        assert sample.verdict.components["turns"] == 1.0


def test_checkpoint_is_made_after_each_turn_and_one_that_is_too_large_is_left_out(tokenizer: Any) -> None:
    line = call("add", x=3, y=4) + "<|im_end|>"
    tools = Tools(tokenizer, line, line, "7<|im_end|>")
    keep = tools.checkpoint

    def checkpoint(transcript: Transcript, state: Any) -> None:
        keep(transcript, state)
        if len(tools.checkpoints) == 1:
            raise StateTooLarge("too large")

    tools.checkpoint = checkpoint  # type: ignore[method-assign]
    sample = tools.play()
    assert sample.verdict.value == 1.0
    assert [len(transcript) for transcript, _ in tools.checkpoints] == [len(prompt) for prompt in tools.prompts[1:]]
    assert [state["num_prompt"] for _, state in tools.checkpoints] == [len(tools.prompts[0])] * 2
    assert [one["function"]["name"] for one in tools.checkpoints[1][1]["declared"]] == [tool.__name__ for tool in TOOLS]


def test_text_of_an_episode_that_goes_on_begins_at_its_prompt(tokenizer: Any) -> None:
    lines = [call("add", x=1, y=2) + "<|im_end|>", "7<|im_end|>"]
    whole = Tools(tokenizer, *lines)
    expected = whole.play()
    again = Tools(tokenizer, *lines[1:])
    transcript, state = whole.checkpoints[0]
    kept: TurnCheckpoint = transcript.checkpoint(1, b"")
    again.resumed = Resumed(transcript=Transcript.restored(transcript.sampled_tokens, kept), state=state)
    sample = again.play()
    assert sample.response_text == expected.response_text
    assert sample.verdict.components["turns"] == 1.0


class Scripted:
    """An environment that answers with its steps."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)

    async def reset(self, row: Any, seed: int) -> Step:
        return self.steps.pop(0)

    async def step(self, action: Any) -> Step:
        return self.steps.pop(0)


ADD_TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
ADD_CALL = call("add", x=3, y=4) + "<|im_end|>"


def scripted(tokenizer: Any, lines: list[str], *steps: Step) -> Tools:
    tools = Tools(tokenizer, *lines)
    tools.hosted = Scripted(*steps)  # type: ignore[assignment]
    return tools


def test_environment_that_declares_no_tools_is_refused_with_a_remedy(tokenizer: Any) -> None:
    with pytest.raises(UserError) as refused:
        scripted(tokenizer, [], Step()).play()
    assert str(refused.value) == (
        "reward.environment.kind: the environment declares no tools -> use the environment `tools`, or return "
        "Step(tools=...) from `reset`"
    )


def test_first_observation_is_part_of_the_prompt_and_later_ones_are_the_user_s(tokenizer: Any) -> None:
    tools = scripted(
        tokenizer, [ADD_CALL, "7<|im_end|>"], Step(tools=(ADD_TOOL,), observation="Look."),
        Step(results=("7",), observation="Go on."),
    )  # fmt: skip
    tools.play()
    assert "3 and 4?" in (prompt := tokenizer.decode(tools.prompts[0]))
    assert "Look." in prompt
    given = tokenizer.decode(tools.prompts[1][len(tools.prompts[0]) :])
    assert given == (
        f"{ADD_CALL}\n<|im_start|>user\n[7]<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_environment_that_is_done_ends_the_episode(tokenizer: Any) -> None:
    tools = scripted(tokenizer, [ADD_CALL], Step(tools=(ADD_TOOL,)), Step(results=("7",), is_done=True))
    sample = tools.play()
    assert sample.trajectory.finish_reason == "environment"
    assert tools.trained(sample) == ADD_CALL
    assert tools.scored == [("", "environment")]
    assert sample.verdict.components["answered"] == 0.0
    assert sample.verdict.components["turns"] == 1.0


def test_more_results_than_calls_are_a_failure_of_the_environment(tokenizer: Any) -> None:
    tools = scripted(tokenizer, [ADD_CALL], Step(tools=(ADD_TOOL,)), Step(results=("7", "8")))
    sample = tools.play()
    assert (sample.verdict.kind, sample.verdict.value, tools.scored) == ("invalid", None, [])
    assert "the results of turn 1 are invalid: the environment returned 2 results for 1 calls" in sample.verdict.reason
    assert sample.trajectory.finish_reason == "environment"


def test_environment_that_fails_gives_its_sample_one_token_and_no_reward(tokenizer: Any) -> None:
    tools = Tools(tokenizer, "7<|im_end|>")

    async def send(message: Any) -> None:
        failed = EnvironmentReply(
            episode_id=message.episode_id, turn=message.turn, status="crashed", reason="it went down"
        )
        tools.client.resolve(failed)

    tools.send = send  # type: ignore[method-assign]
    sample = tools.play()
    assert sample.verdict.kind == "crashed"
    assert "it went down" in sample.verdict.reason
    assert (sample.trajectory.num_sampled, sample.trajectory.finish_reason, tools.scored) == (1, "environment", [])
    assert sample.response_text == "7"


def test_fewer_results_than_calls_answer_the_first_calls(tokenizer: Any) -> None:
    line = call("add", x=1, y=1) + ADD_CALL
    tools = scripted(tokenizer, [line, "7<|im_end|>"], Step(tools=(ADD_TOOL,)), Step(results=("2",)))
    sample = tools.play()
    assert sample.verdict.value == 1.0
    given = tokenizer.decode(tools.prompts[1][len(tools.prompts[0]) :])
    assert given == f"{line}\n<|im_start|>user\n[2]<|im_end|>\n<|im_start|>assistant\n"


def test_counts_of_the_environment_and_the_scorer_are_components(tokenizer: Any) -> None:
    tools = scripted(
        tokenizer, [ADD_CALL, "7<|im_end|>"], Step(tools=(ADD_TOOL,)), Step(results=("7",), components={"seen": 2.0})
    )
    assert tools.play().verdict.components == {
        **NO_CALLS, "turns": 1.0, "answered": 1.0, "seen": 2.0, "correct": 1.0,
    }  # fmt: skip


def test_answer_for_which_the_context_has_no_room_ends_the_episode_as_length(tokenizer: Any) -> None:
    tools = Tools(tokenizer, ADD_CALL)
    generate = tools.generate

    async def full(*given: Any, **options: Any) -> Answer:
        if tools.lines:
            return await generate(*given, **options)
        return Answer(segment=Segment.empty(), finish_reason="length", ended_by="context")

    tools.generate = full  # type: ignore[method-assign]
    sample = tools.play()
    assert sample.trajectory.finish_reason == "length"
    assert sample.verdict.components["answered"] == 0.0
