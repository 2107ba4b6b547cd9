"""`thinking`: what becomes of the reasoning of earlier answers, with templates that keep it and that leave it out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agent_policy import ADD, CALL, Policy, asked

from areal_like.errors import UserError
from areal_like.trajectory import Segment, check_disjoint
from rollout.agent.store import TokenStore
from rollout.agent.workflow import AgentWorkflow
from rollout.transcript import Answer

TURNS = (
    "<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and IS_SHOWN %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
)
LAST_USER = (
    "{% set ns = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.at = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LEAVES_OUT = (
    LAST_USER + "{% for m in messages %}" + TURNS.replace("IS_SHOWN", "loop.index0 > ns.at") + "{% endfor %}" + ASK
)
"""Before the last message of a user, as Qwen3's template does."""
KEEPS = "{% for m in messages %}" + TURNS.replace("IS_SHOWN", "true") + "{% endfor %}" + ASK
LINES = (CALL, "<think>So.</think>7<|im_end|>", "<think>Eh.</think>Bye<|im_end|>")


def talked(template: str, **session: Any) -> tuple[Policy, Any]:
    """A call, an answer, and one to a further message; clients do not send reasoning back."""
    policy = Policy(*LINES, template=template)
    messages: list[Any] = [{"role": "user", "content": "3 and 4?"}]
    call = {"id": "c00000000", "type": "function", "function": {"name": "add", "arguments": '{"x":3,"y":4}'}}
    called = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c00000000", "content": "7"},
    ]
    more = [{"role": "assistant", "content": "7"}, {"role": "user", "content": "thanks"}]
    bodies = [messages, [*messages, *called], [*messages, *called, *more]]
    answers, agent = asked(policy, *({"messages": body, "tools": [ADD]} for body in bodies), **session)
    assert [status for status, _ in answers] == [200] * 3
    return policy, agent


@pytest.mark.parametrize(
    ("template", "thinking", "is_left_out"),
    [(LEAVES_OUT, "keep", False), (LEAVES_OUT, "template", True), (KEEPS, "template", False), (KEEPS, "keep", False)],
)
def test_reasoning_is_left_out_where_the_template_does_and_every_token_is_trained_once(
    template: str, thinking: str, is_left_out: bool
) -> None:
    policy, agent = talked(template, thinking=thinking)
    texts = [policy.tokenizer.decode(prompt) for prompt in policy.prompts]
    assert "<think>Hm.</think>" in texts[1], "a result of a tool leaves it where it is"
    assert policy.prompts[1][: len(policy.prompts[0])] == policy.prompts[0]
    assert [word in texts[2] for word in ("Hm.", "So.")] == [not is_left_out] * 2
    assert agent.store.num_without_reasoning == int(is_left_out)
    assert agent.store.num_rendered_again == 0
    trajectories = agent.store.trajectories()
    check_disjoint(trajectories)
    sampled = [policy.sampled(one) for one in trajectories]
    assert sampled == ([LINES[2], LINES[0] + LINES[1]] if is_left_out else ["".join(LINES)])
    if is_left_out:  # as the template writes the conversation for a policy that is deployed
        written = [
            {"role": "user", "content": "3 and 4?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "add", "arguments": {"x": 3, "y": 4}}}],
            },
            {"role": "tool", "content": "7"},
            {"role": "assistant", "content": "7"},
            {"role": "user", "content": "thanks"},
        ]
        assert texts[2] == policy.tokenizer.apply_chat_template(written, tokenize=False, add_generation_prompt=True)


def test_a_conversation_that_began_again_is_continued_by_its_tokens() -> None:
    _, agent = talked(LEAVES_OUT, thinking="template")
    anchor = agent.store.turns[-1]
    assert anchor.anchor is None
    messages = [*agent.conversation(2), {"role": "tool", "tool_call_id": "x", "content": "8"}]
    prompt = agent.store.prompt(messages, [ADD])
    assert prompt.anchor is anchor
    assert prompt.transcript.tokens_T.tolist()[: len(anchor.transcript)] == anchor.transcript.tokens_T.tolist()


def test_thinking_is_one_of_two_words() -> None:
    with pytest.raises(UserError, match="`thinking` must be `keep` or `template`"):
        AgentWorkflow(command=["sh"], thinking="drop")  # type: ignore[arg-type]


def test_equal_reasoning_of_two_answers_is_left_out_once_where_the_template_leaves_out_one() -> None:
    lines = ("<think>So.</think>1<|im_end|>", "<think>So.</think>2<|im_end|>", "3<|im_end|>")
    policy = Policy(*lines, template=LEAVES_OUT)
    messages: list[Any] = [{"role": "user", "content": "?"}]
    one = [*messages, {"role": "assistant", "content": "1"}, {"role": "tool", "content": "x"}]
    two = [*one, {"role": "assistant", "content": "2"}, {"role": "user", "content": "on"}]
    asked(policy, *({"messages": body} for body in (messages, one, two)), thinking="template")
    assert [policy.tokenizer.decode(prompt).count("So.") for prompt in policy.prompts] == [0, 1, 0]
    store = TokenStore(policy.tokens, stop_marks=("<|im_end|>",), thinking="template")
    assert store.prompt(two).begins_again == ""


def test_reasoning_that_an_answer_repeats_counts_once_as_reasoning() -> None:
    policy = Policy("<think>7</think>7<|im_end|>", "8<|im_end|>", template=LEAVES_OUT)
    ask: list[Any] = [{"role": "user", "content": "?"}]
    more = [*ask, {"role": "assistant", "content": "7"}, {"role": "user", "content": "on"}]
    _, agent = asked(policy, {"messages": ask}, {"messages": more}, thinking="template")
    assert agent.store.num_without_reasoning == 1
    assert "<think>" not in policy.tokenizer.decode(policy.prompts[1])


def test_conversation_goes_on_by_its_tokens_where_the_template_cannot_show_what_it_leaves_out() -> None:
    refuses = "{% if messages | selectattr('reasoning_content', 'defined') | list %}{{ 1 / 0 }}{% endif %}" + KEEPS
    policy = Policy("<think>So.</think>7<|im_end|>", "8<|im_end|>", template=refuses)
    ask: list[Any] = [{"role": "user", "content": "?"}]
    more = [*ask, {"role": "assistant", "content": "7"}, {"role": "user", "content": "on"}]
    answers, agent = asked(policy, {"messages": ask}, {"messages": more}, thinking="template")
    assert [status for status, _ in answers] == [200, 200]
    assert agent.store.num_without_reasoning == agent.store.num_rendered_again == 0
    assert len(agent.store.trajectories()) == 1


def test_an_answer_without_reasoning_is_given_none() -> None:
    shown = "{% if messages | selectattr('reasoning_content', 'defined') | list %}!{% endif %}"
    policy = Policy(*LINES, template=shown + LEAVES_OUT)
    store = TokenStore(policy.tokens, stop_marks=("<|im_end|>",), thinking="template")
    ask: list[Any] = [{"role": "user", "content": "?"}]
    replies = [{"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2", "reasoning_content": "So."}]
    number = 0

    def answered(messages: list[Any], reply: Any) -> list[Any]:
        nonlocal number
        tokens_R = policy.tokens.encode(f"{reply['content']}<|im_end|>")
        segment = Segment(tokens_R, np.zeros(len(tokens_R), np.float32), np.zeros(len(tokens_R), np.int32))
        answer = Answer(segment=segment, finish_reason="stop", number=number)
        number += 1
        store.record(store.prompt(messages), answer, reply, stop="<|im_end|>", closing="")
        return [*messages, reply, *ask]

    chains_of = [answered(ask, reply) for reply in replies]
    for messages, is_shown in zip(chains_of, (False, True), strict=True):
        prompt = store.prompt(messages)
        assert (prompt.begins_again == "no_reasoning") == is_shown
        assert policy.tokenizer.decode(prompt.transcript.tokens_T).startswith("!") == is_shown
