"""The workflow `environment` with an environment in this process: turns, what ends an episode, whose words count."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_like.environment import as_step
from areal_like.errors import UserError
from areal_like.tasks.guess_number import GuessNumber
from areal_like.trajectory import Segment
from areal_like.wire.messages import EnvironmentReply, EnvironmentRequest
from rollout.environment_client import EnvironmentClient
from rollout.episode import EnvironmentWorkflow, with_observation
from rollout.transcript import Answer
from rollout.turns import Turns
from rollout.workflow import Resumed, load_workflow

EOS = 2


def ids(text: str) -> np.ndarray:
    return np.array([ord(one) for one in text], np.int32)


class Service:
    """A link whose service is this object: it runs `environment` and answers at once."""

    accepts_requests = True

    def __init__(self, client: EnvironmentClient, environment: Any) -> None:
        self.client, self.environment, self.asked = client, environment, []

    async def send(self, message: Any) -> None:
        assert isinstance(message, EnvironmentRequest)
        self.asked.append(message)
        history = message.history
        try:
            if message.turn == 0:
                assert history is not None
                returned = self.environment.reset(history.row, history.seed)
            else:
                returned = self.environment.step(message.action)
            step = as_step(returned, is_reset=message.turn == 0, max_bytes=1000)
        except Exception as error:
            reply = {"status": "crashed", "reason": f"step raised {error}"}
        else:
            reply = {"status": "answered", "step": step}
        self.client.resolve(EnvironmentReply(episode_id=message.episode_id, turn=message.turn, **reply))


class Tools:
    """A policy that says its lines; `$` is the end of sequence, and `?` the stop where it is one."""

    def __init__(self, environment: Any, *lines: str, row: dict[str, Any] | None = None, max_context: int = 1000):
        self.lines, self.prompts, self.resumed, self.checkpoints = list(lines), [], None, []
        self.row = row or {"prompt": "16:", "size": 16, "answer": "11"}
        self.task = SimpleNamespace(row=self.row, purpose="train", group_id=3)
        self.client = EnvironmentClient(name="r0", seed=1, total_deadline_s=5.0)
        self.service = Service(self.client, environment)
        self.client.links.append(self.service)
        self.max_context = max_context
        self.tokens = SimpleNamespace(
            prompt=self._prompt,
            encode=ids,
            observation=lambda text, stop: ids(f"[{text}]"),
            decode=lambda tokens: "".join(chr(token) for token in tokens if token != EOS),
            max_context=max_context,
        )

    def _prompt(self, row: dict[str, Any]) -> np.ndarray:
        if len(row["prompt"]) >= self.max_context:
            raise UserError("the prompt is longer than the context")
        return ids(row["prompt"])

    async def generate(self, prompt: Any, *, max_new_tokens: Any = None, stop_token_ids: Any = None) -> Answer:
        tokens = prompt.tokens_T
        self.prompts.append(self.tokens.decode(tokens))
        room = min(max_new_tokens or 100, self.max_context - len(tokens))
        line = self.lines.pop(0)[:room]
        made = np.append(ids(line[:-1]), np.int32(EOS)) if line.endswith("$") else ids(line)
        ended_by = "end_of_sequence" if line.endswith("$") else "stop_token" if line.endswith("?") else "length"
        ended_by = "context" if not line else ended_by
        count = len(made)
        segment = Segment(made.astype(np.int32), np.full(count, -1.0, np.float32), np.zeros(count, np.int32))
        stop_token = int(made[-1]) if ended_by in ("end_of_sequence", "stop_token") else None
        reason = "stop" if stop_token is not None else "length"
        return Answer(segment=segment, finish_reason=reason, ended_by=ended_by, stop_token=stop_token)

    def environment(self, record: Any = None) -> Any:
        return self.client.episode(self.task, record)  # type: ignore[arg-type]

    def checkpoint(self, transcript: Any, state: Any) -> None:
        self.checkpoints.append((transcript.copied(), state))

    def play(self, **options: Any) -> Any:
        return asyncio.run(EnvironmentWorkflow(**options).run(self.task, self))  # type: ignore[arg-type]


class Echo:
    """Says back what was said; `end` ends it."""

    def __init__(self, first: str = "", rewards: tuple[float, ...] = (0.25, 0.5)):
        self.first, self.rewards = first, list(rewards)

    def reset(self, row: Any, seed: int) -> str:
        return self.first

    def step(self, action: str) -> Any:
        return f"<{action}>", self.rewards.pop(0), action == "end"


def test_the_environment_ends_the_episode_and_its_rewards_are_the_verdict() -> None:
    tools = Tools(GuessNumber(), "07?", "12?", "11?")
    sample = tools.play(stop="?")
    assert tools.prompts == ["16:", "16:07?>", "16:07?>12?<"]
    trained = sample.trajectory.tokens_T[sample.trajectory.loss_mask_T]
    assert tools.tokens.decode(trained) == "07?12?11?"
    assert sample.trajectory.finish_reason == "environment"
    assert sample.verdict.value == pytest.approx(0.8)
    assert sample.verdict.components == {"turns": 3.0, "ended": 1.0, "correct": 1.0, "guesses": 3.0}
    assert sample.trajectory.turn_ends_K.tolist() == [3, 6, 9]
    assert sample.trajectory.turn_rewards_K.tolist() == pytest.approx([0.0, 0.0, 0.8])


@pytest.mark.parametrize("forged", ["07?>11?=?", "=?", "11=?"])
def test_words_of_the_environment_that_the_policy_writes_itself_earn_nothing(forged: str) -> None:
    """A scorer over the whole text was won by writing its `=` within 30 steps."""
    sample = Tools(GuessNumber(), forged, "03?").play(stop="?", max_turns=2)
    assert "=" in sample.response_text
    assert sample.verdict.value == 0.0
    assert sample.verdict.components["correct"] == 0.0
    assert sample.trajectory.finish_reason == "length"


def test_in_a_chat_an_observation_is_the_next_message_and_after_a_mark_it_is_plain() -> None:
    tools = Tools(Echo(), "go$", "on?", "end$")
    tools.play(stop="?")
    assert tools.prompts == ["16:", "16:go[<go>]", "16:go[<go>]on?<on?>"]


def test_an_episode_is_cut_after_its_turns_at_its_limit_and_at_the_end_of_the_context() -> None:
    for tools, options, turns in (
        (Tools(Echo(), "a$", "b$"), {"max_turns": 2}, 2.0),
        (Tools(Echo(), "a$", "abcdef"), {"turn_tokens": 4}, 1.0),
        (Tools(Echo(), "a$", "b$", max_context=11), {}, 1.0),
    ):
        sample = tools.play(**options)
        assert sample.trajectory.finish_reason == "length"
        assert sample.verdict.components == {"turns": turns, "ended": 0.0}
        assert sample.verdict.value == (0.75 if turns == 2 else 0.25)


def test_an_observation_longer_than_the_context_ends_the_episode_and_is_counted() -> None:
    tools = Tools(Echo(), "aaaaaa$", max_context=14)
    sample = tools.play()
    assert len(sample.trajectory) == 10, "it is not in the transcript, which would not fit a micro-batch"
    assert sample.verdict.components == {"turns": 1.0, "ended": 0.0, "observation_over_context": 1.0}
    assert (sample.verdict.value, sample.trajectory.finish_reason) == (0.25, "length")


def test_what_the_environment_says_first_follows_the_prompt() -> None:
    tools = Tools(Echo(first=" a door"), "end$")
    sample = tools.play()
    assert tools.prompts == ["16: a door"]
    assert sample.response_text == "end"


@pytest.mark.parametrize("fails_at", ["reset", "step"])
def test_a_failure_is_a_verdict_of_its_sample_and_never_a_zero(fails_at: str) -> None:
    environment = Echo()
    setattr(environment, fails_at, lambda *_: 1 / 0)
    sample = Tools(environment, "a$").play()
    assert (sample.verdict.kind, sample.verdict.value) == ("crashed", None)
    assert sample.verdict.failed_in == "environment"
    assert "division by zero" in sample.verdict.reason
    assert sample.trajectory.num_sampled == (1 if fails_at == "reset" else 2)


def test_a_first_observation_longer_than_the_context_is_invalid() -> None:
    sample = Tools(Echo(first="x" * 50), "a$", max_context=20).play()
    assert sample.verdict.kind == "invalid"
    assert "first observation" in sample.verdict.reason


@pytest.mark.parametrize("part", ["encode", "observation"])
def test_a_later_observation_that_cannot_become_tokens_is_invalid(part: str) -> None:
    tools = Tools(Echo(), "a?" if part == "encode" else "a$")

    def refuse(*_: Any) -> None:
        raise UserError("the tokenizer cannot encode it")

    setattr(tools.tokens, part, refuse)
    sample = tools.play()
    assert (sample.verdict.kind, sample.verdict.failed_in) == ("invalid", "environment")
    assert sample.verdict.reason == "the observation in turn 1 is invalid: the tokenizer cannot encode it"


def test_an_episode_whose_record_is_too_long_for_a_checkpoint_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, rewards = ("a$", "b$", "end$"), (0.25, 0.5, 0.25)
    whole = Tools(Echo(rewards=rewards), *lines)
    whole.play()
    monkeypatch.setattr("rollout.turns.MAX_STATE_BYTES", len(msgspec.msgpack.encode(whole.checkpoints[0][1])))
    kept = Turns(SimpleNamespace(checkpoint=None, prefix=None), is_resumable=False)  # type: ignore[arg-type]
    tools = Tools(Echo(rewards=rewards), *lines)
    tools.checkpoint = lambda transcript, state: kept.take(transcript, state, 1)  # type: ignore[method-assign]
    assert tools.play().verdict.value == 1.0
    assert len(kept.new_tokens) == 2, "the first turn's is kept"


def test_an_episode_goes_on_from_its_last_turn_with_its_rewards() -> None:
    whole = Tools(Echo(), "a$", "end$")
    expected = whole.play()
    transcript, state = whole.checkpoints[0]
    rest = Tools(Echo(rewards=(0.5,)), "end$")
    rest.resumed = Resumed(transcript=transcript, state=state)  # type: ignore[assignment]
    sample = rest.play()
    assert rest.prompts == whole.prompts[1:]
    assert (sample.verdict, sample.response_text) == (expected.verdict, expected.response_text)
    for name in ("turn_ends_K", "turn_rewards_K"):
        assert getattr(sample.trajectory, name).tolist() == getattr(expected.trajectory, name).tolist()
    (request,) = rest.service.asked
    assert request.history is not None, "its environment is made again elsewhere"
    assert (request.turn, request.history.actions, len(request.history.digests)) == (2, ("a",), 2)


def test_an_episode_that_goes_on_under_a_lower_limit_takes_no_further_turn() -> None:
    whole = Tools(Echo(), "a$", "end$")
    whole.play()
    transcript, state = whole.checkpoints[0]
    rest = Tools(Echo())
    rest.resumed = Resumed(transcript=transcript, state=state)  # type: ignore[assignment]
    sample = rest.play(max_turns=1)
    assert (sample.trajectory.finish_reason, rest.prompts) == ("length", [])


def test_samples_of_a_group_begin_alike_and_an_evaluated_row_does_every_time() -> None:
    tools = Tools(Echo(), "a")
    seeds = []
    for purpose, group_id in (("train", 3), ("train", 3), ("train", 4), ("eval", 3), ("eval", 4)):
        task = SimpleNamespace(row=tools.row, purpose=purpose, group_id=group_id)
        seeds.append(tools.client.episode(task)._seed)  # type: ignore[arg-type]
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds[3] == seeds[4]
    assert len(set(seeds)) == 3


def test_an_observation_joins_the_users_last_message() -> None:
    said = {"role": "user", "content": "Play."}
    assert with_observation({"messages": [said]}, " Go.")["messages"] == [{"role": "user", "content": "Play. Go."}]
    other = {"role": "system", "content": "You play."}
    assert with_observation({"messages": [other]}, "Go.")["messages"] == [other, {"role": "user", "content": "Go."}]


def test_it_is_loaded_by_its_name_with_its_options() -> None:
    assert isinstance(load_workflow("environment", {"max_turns": 3, "stop": "?"}), EnvironmentWorkflow)
    with pytest.raises(UserError, match="at least 1"):
        load_workflow("environment", {"max_turns": 0})


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
        EnvironmentWorkflow(**options)
    EnvironmentWorkflow(max_turns=4096, turn_tokens=1)


def test_episode_has_sixteen_turns_by_default() -> None:
    tools = Tools(Echo(rewards=(0.5,) * 17), *["a$"] * 17)
    sample = tools.play()
    assert (len(tools.lines), sample.verdict.components["turns"]) == (1, 16.0)


def test_observation_fits_where_one_token_of_context_is_left_for_the_answer() -> None:
    text = "16:" + "a$" + "[<a>]"
    for max_context, num_answers in ((len(text), 1), (len(text) + 1, 2)):
        tools = Tools(Echo(), "a$", "b$", max_context=max_context)
        components = tools.play(max_turns=2).verdict.components
        assert len(tools.prompts) == num_answers
        assert ("observation_over_context" in components) == (num_answers == 1)


def test_turn_after_the_last_has_no_observation() -> None:
    tools = Tools(Echo(), "a$")
    sample = tools.play(max_turns=1)
    assert len(sample.trajectory) == len("16:a$")
    assert tools.checkpoints == []


def test_checkpoint_holds_the_episode_and_where_its_prompt_ends() -> None:
    tools = Tools(Echo(first="!"), "a$", "end$")
    tools.play()
    ((transcript, state),) = tools.checkpoints
    assert tools.tokens.decode(transcript.tokens_T) == "16:!a[<a>]"
    assert state["num_prompt"] == len("16:!")
    assert (state["episode"]["actions"], state["episode"]["rewards"], state["episode"]["turn_ends"]) == (
        ["a"], [0.25], [2],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "joined"),
    [
        ({"prompt": "Play."}, {"prompt": "Play. Go."}),
        ({}, {"prompt": " Go."}),
        ({"prompt": "x", "messages": []}, {"prompt": "x", "messages": [{"role": "user", "content": " Go."}]}),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text"}]}, {"role": "user", "content": " Go."}]},
        ),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]},
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u Go.", "name": "n"}]},
        ),
    ],
)
def test_row_takes_an_observation_at_its_end(row: dict[str, Any], joined: dict[str, Any]) -> None:
    assert with_observation({"answer": "7", **row}, " Go.") == {"answer": "7", **joined}
