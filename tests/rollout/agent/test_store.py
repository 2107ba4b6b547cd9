"""The tree of answers: any order of requests keeps every sampled token once, and prefixes as they were sampled."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from chat_tokenizer import byte_tokenizer

from areal_like.trajectory import Segment, check_disjoint
from rollout.agent.store import Message, TokenStore, message_key
from rollout.tokens import PromptTokens
from rollout.transcript import Answer

HEAD = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
TEMPLATES = {
    "plain": HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS
    + "<|im_end|>\n{% endfor %}" + ASK,
    # Trims answers, as DeepSeek's and Mistral's do.
    "trims": HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}" + CALLS
    + "<|im_end|>\n{% endfor %}" + ASK,
    # Writes an empty reasoning into every answer but the last one, as Qwen3's later templates do.
    "thinks": HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}<think></think>{% endif %}{{ m.content }}" + CALLS
    + "<|im_end|>\n{% endfor %}" + ASK + "{% if add_generation_prompt %}<think>{% endif %}",
    # Puts results of tools into messages of the user, several into one, as Qwen's do.
    "merges": HEAD + "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n[{{ m.content }}]"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|im_end|>\n{% endif %}{% endfor %}" + ASK,
}  # fmt: skip
STOP = "<|im_end|>"


def store_of(template: str) -> tuple[TokenStore, PromptTokens]:
    tokenizer = byte_tokenizer(template)
    stop = tokenizer.eos_token_id
    tokens = PromptTokens(tokenizer, template=None, add_bos="auto", max_context=1 << 20, stop_ids=(stop,))
    return TokenStore(tokens, stop_marks=(STOP,)), tokens


class Agent:
    """Asks in random ways, and remembers what was sampled."""

    def __init__(self, template: str, seed: int) -> None:
        self.store, self.tokens = store_of(template)
        self.rng, self.conversations, self.sampled = random.Random(seed), [], []
        self.stop = int(self.tokens.stop_ids[0])

    def words(self) -> str:
        return "".join(self.rng.choices(["a", "b ", " c", "\n", "ü", "<", "{", "7"], k=self.rng.randint(0, 6)))

    def begin(self) -> list[Message]:
        system = [{"role": "system", "content": self.words()}] if self.rng.random() < 0.3 else []
        return [*system, {"role": "user", "content": f"{len(self.conversations)} {self.words()}"}]

    def ask(self) -> None:
        """One request: a conversation goes on, from any of its answers, or a new one begins."""
        kept = self.rng.choice(self.conversations) if self.conversations and self.rng.random() < 0.9 else None
        messages = self.begin() if kept is None else self.followed(self.cut(kept))
        prompt = self.store.prompt(messages)
        before = prompt.transcript.tokens_T.tolist()
        if kept is not None:
            assert prompt.anchor is not None, "no false fork: the answer is found again"
            anchored = prompt.anchor.transcript.tokens_T.tolist()
            assert before[: len(anchored)] == anchored, "the anchor's tokens, exactly"
        made = self.rng.choices(range(len(self.tokens._tokenizer) - 8), k=self.rng.randint(1, 5))
        has_ended = self.rng.random() < 0.8
        made = [token for token in made if token != self.stop] or [0]
        tokens_R = np.array([*made, self.stop] if has_ended else made, np.int32)
        segment = Segment(tokens_R, np.full(len(tokens_R), -1.0, np.float32), np.zeros(len(tokens_R), np.int32))
        number = len(self.store.turns)
        answer = Answer(segment=segment, finish_reason="stop" if has_ended else "length", number=number)
        reply: Message = {"role": "assistant", "content": f"{number}{self.words()}", "reasoning_content": "hm"}
        if self.rng.random() < 0.3:
            function = {"name": "add", "arguments": '{"y": 1,  "x": 2}'}
            reply["tool_calls"] = [{"id": f"c{number:08d}", "type": "function", "function": function}]
        self.store.record(prompt, answer, reply, stop=STOP if has_ended else "", closing="")
        self.sampled.append(len(tokens_R))
        self.conversations.append([*messages, self.by_client(reply)])

    def cut(self, messages: list[Message]) -> list[Message]:
        """Up to one of its answers, usually the last."""
        places = [place for place, one in enumerate(messages, 1) if one["role"] == "assistant"]
        return messages[: places[-1] if self.rng.random() < 0.8 else self.rng.choice(places)]

    def followed(self, messages: list[Message]) -> list[Message]:
        calls = messages[-1].get("tool_calls")
        if calls:
            return [*messages, {"role": "tool", "tool_call_id": calls[0]["id"], "content": self.words()}]
        return [*messages, {"role": "user", "content": self.words() or "-"}]

    def by_client(self, reply: Message) -> Message:
        """As it comes back: without reasoning, stripped, JSON written again."""
        back = {
            "role": "assistant",
            "content": reply["content"].strip() if self.rng.random() < 0.5 else reply["content"],
        }
        if calls := reply.get("tool_calls"):
            function = {"name": "add", "arguments": '{"x":2,"y":1}'}
            back["tool_calls"] = [{**calls[0], "function": function}]
        return back


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("seed", range(4))
def test_every_sampled_token_is_trained_on_once_and_every_prefix_is_exact(name: str, seed: int) -> None:
    agent = Agent(TEMPLATES[name], seed)
    for _ in range(60):
        agent.ask()
    trajectories = agent.store.trajectories()
    check_disjoint(trajectories)
    assert sum(one.num_sampled for one in trajectories) == sum(agent.sampled)
    assert agent.store.num_rendered_again == 0
    assert len(trajectories) > 5


def test_the_newest_of_equal_answers_is_continued_unless_a_call_names_another() -> None:
    store, _ = store_of(TEMPLATES["plain"])
    question = [{"role": "user", "content": "?"}]

    def answered(token: int, call_id: str) -> Message:
        segment = Segment(np.array([token], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))
        function = {"name": "f", "arguments": "{}"}
        reply = {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "function": function}]}
        answer = Answer(segment=segment, finish_reason="length", number=token)
        store.record(store.prompt(question), answer, reply, stop="", closing="")
        return reply

    first, second = answered(5, "one"), answered(6, "two")
    after = [{"role": "user", "content": "on"}]
    for reply, index in ((first, 0), (second, 1), ({**first, "tool_calls": [{**first["tool_calls"][0], "id": ""}]}, 1)):
        anchor = store.prompt([*question, reply, *after]).anchor
        assert anchor is not None
        assert anchor.index == index


def test_other_tools_begin_another_conversation() -> None:
    store, _ = store_of(TEMPLATES["plain"])
    question = [{"role": "user", "content": "?"}]
    segment = Segment(np.array([5], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))
    reply = {"role": "assistant", "content": "x"}
    answer = Answer(segment=segment, finish_reason="length", number=0)
    store.record(store.prompt(question), answer, reply, stop="", closing="")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert store.prompt([*question, reply, {"role": "user", "content": "on"}], tools).anchor is None
    assert store.num_rendered_again == 0


def test_an_answer_that_the_template_ends_with_no_known_mark_is_continued_from_its_text() -> None:
    store, _ = store_of("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    question = [{"role": "user", "content": "?"}]
    segment = Segment(np.array([5], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))
    reply = {"role": "assistant", "content": "x"}
    store.record(
        store.prompt(question), Answer(segment=segment, finish_reason="length", number=0), reply, stop="", closing=""
    )
    prompt = store.prompt([*question, reply, {"role": "user", "content": "on"}])
    assert prompt.anchor is None
    assert store.num_rendered_again == 0, "nothing was sampled from there"
    assert len(store.trajectories()) == 1
    store.record(prompt, Answer(segment=segment, finish_reason="length", number=1), reply, stop="", closing="")
    assert store.num_rendered_again == 1
    assert len(store.trajectories()) == 2


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ({"content": "7", "reasoning_content": "r"}, True),
        ({"content": " 7\n"}, True),
        ({"content": "8"}, False),
        ({"content": "7", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, False),
    ],
)
def test_what_a_client_changes_does_not_make_another_message(other: dict[str, Any], is_same: bool) -> None:
    mine = message_key({"role": "assistant", "content": "7"})
    assert (message_key({"role": "assistant", **other}) == mine) == is_same
