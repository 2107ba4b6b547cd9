"""The running sum with a calculator: a task of several turns. The rows are generated, not files.

    prompt  "3+8+5="      model "(3+8)"  tool "1;"  model "(1+5)"  tool "6;"  model "#6", end of sequence

Prompts, answers and their split are those of running_sum.py; turns are in rollout/tool_sum.py.

The model may also write a step without the tool, `3+8:1;`. Demonstrations do that for a fixed share `bias` of the digit
pairs most of the time, and for the others with probability `noise`, always with a random digit. So the warm start
teaches the format, and not to use the tool for some pairs; RL has to learn that the tool is always right.

The same task is an environment, `ToolSum` (configs/environment_tool_sum.yaml): its verdicts come from the environment,
and the prompts, demonstrations and rules are those of the workflow.

There is a variant as a chat, for programs that use a model through an API (configs/agent_tool_sum.yaml): the prompt is
a user message, a call has the format of Hermes and Qwen, and the tool's output is a separate message. Every marker is
one token of the tokenizer `chat:tool_sum`, so answers are hardly longer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pydantic
from pydantic import Field

from areal_like import limits
from areal_like.environment import Step
from areal_like.errors import UserError
from areal_like.settings import Settings
from areal_like.tasks import running_sum
from areal_like.tasks.running_sum import RunningSumOptions, Split

CHARACTERS = "0123456789+=:;#()?"
"""All characters of prompts, answers and the tool's output."""
CALL_END = ")"
"""Ends a call of the tool."""
REFUSAL = "?;"
"""Output of the tool for text that is not a valid call."""
CHAT_CHARACTERS = "0123456789+=:;#?"
"""All characters of messages in the chat variant, in addition to CHAT_CALL."""
CHAT_END = "<|im_end|>"
"""Ends a message."""
CHAT_STARTS = {role: f"<|im_start|>{role}\n" for role in ("user", "assistant", "tool")}
"""Begins a message, by role."""
CHAT_CALL = ('<tool_call>\n{"name": "add", "arguments": {"x": ', ', "y": ', "}}\n</tool_call>")
"""Text around the two digits of a call."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    """{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}"""
    "{{ (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Chat template of the tokenizer `chat:tool_sum`. It does not declare tools, because the model knows the only one."""

_TABLE_SEED = 99


class ToolSumOptions(Settings):
    """Options of the generator."""

    pgeo: float = Field(0.25, gt=0, le=1)
    """Probability that a prompt ends after each term from the second on."""
    max_terms: int = Field(12, ge=2, le=limits.TOKENS)
    """Largest number of terms of a prompt."""
    bias: float = Field(0.4, ge=0, le=1)
    """Demonstrations: share of the 100 digit pairs that are mostly added without the tool, incorrectly."""
    bias_tool: float = Field(0.42, ge=0, le=1)
    """Demonstrations: probability that such a pair is nevertheless added by the tool."""
    noise: float = Field(0.1, ge=0, le=1)
    """Demonstrations: probability that any other pair is added without the tool."""
    chat: bool = False
    """Demonstrations: the answer is in the chat format of the tokenizer `chat:tool_sum`."""

    @staticmethod
    def parse(options: Mapping[str, Any] | None) -> ToolSumOptions:
        """Check options as they come from YAML. Raises UserError."""
        try:
            return ToolSumOptions.model_validate(dict(options or {}))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            known = ", ".join(ToolSumOptions.model_fields)
            raise UserError(first["msg"], where=f"tool_sum options.{key}", remedy=f"options are {known}") from error

    @property
    def prompts(self) -> RunningSumOptions:
        """Options of the prompts."""
        return RunningSumOptions(pgeo=self.pgeo, max_terms=self.max_terms)


class ToolSum:
    """The environment: answers calls of the calculator, and judges the answer that ends an episode."""

    def __init__(self) -> None:
        self._row: Mapping[str, Any] = {}
        self._said: list[str] = []
        self._num_calls = 0

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Take the row. Nothing is drawn, and no text follows the prompt."""
        self._row = row

    def step(self, action: str) -> Step:
        """Answer a turn: one that ends in a call gets the calculator's output; any other one ends the episode, and its
        reward is 1 if it is correct."""
        self._said.append(action)
        is_call = action.endswith(CALL_END)
        self._num_calls += is_call
        correct = 0.0 if is_call else float(is_correct(self._row, action))
        observation = tool_output(action) if is_call else ""
        parts = components(correct, self._said, self._num_calls)
        return Step(observation=observation, reward=correct, is_done=not is_call, components=parts)


def rows(
    seed: int, split: Split, *, limit: int | None = None, options: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of `prompt`, `answer` and `terms`, as in `running_sum.rows`. Raises UserError."""
    return running_sum.rows(seed, split, limit=limit, options=ToolSumOptions.parse(options).prompts)


def demonstrations(
    seed: int, options: Mapping[str, Any] | None = None, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of `prompt` and `spans` from the `sft` part, endless without a limit; the tool's output is not trained."""
    checked = ToolSumOptions.parse(options)
    rng = random.Random(f"tool_sum/demonstrations/{seed}")
    for row in running_sum.rows(seed, "sft", limit=limit, options=checked.prompts):
        spans = _work(row["terms"], checked, rng)
        yield {"prompt": row["prompt"], "spans": _as_chat(spans) if checked.chat else spans}


@lru_cache(maxsize=8)
def distrusted_pairs(bias: float) -> frozenset[tuple[int, int]]:
    """The digit pairs that demonstrations mostly add without the tool; the same in every run."""
    rng = random.Random(_TABLE_SEED)
    return frozenset((left, right) for left in range(10) for right in range(10) if rng.random() < bias)


def _work(terms: list[int], options: ToolSumOptions, rng: random.Random) -> list[list[Any]]:
    total, spans, said = terms[0], [], ""
    for term in terms[1:]:
        is_distrusted = (total, term) in distrusted_pairs(options.bias)
        if rng.random() < (options.bias_tool if is_distrusted else 1 - options.noise):
            call = f"({total}+{term}{CALL_END}"
            result = tool_output(call)
            spans += [[said + call, True], [result, False]]
            said, total = "", int(result.removesuffix(";"))
        else:
            wrong = rng.randrange(10)
            said += f"{total}+{term}:{wrong};"
            total = wrong
    return [*spans, [f"{said}#{total}", True]]


def _as_chat(spans: list[list[Any]]) -> list[list[Any]]:
    """Render spans in the chat format. The chat template itself is not used, because it would take most of the time of
    a warm start."""
    begin, between, end = CHAT_CALL
    made: list[list[Any]] = []
    for text, is_trained in spans:
        if is_trained:
            said = re.sub(r"\((\d)\+(\d)\)", lambda call: f"{begin}{call[1]}{between}{call[2]}{end}", text)
            made.append([said + CHAT_END, True])
        else:
            result = text.removesuffix(";")
            made.append([CHAT_STARTS["tool"] + result + CHAT_END + CHAT_STARTS["assistant"], False])
    made[-1][0] = made[-1][0].removesuffix(CHAT_END)  # added later, as for all rows
    return made


def tool_output(said: str) -> str:
    """Output of the calculator for text that ends in a call: `...(3+8)` gives `1;`, the sum modulo 10.

    Example:
        >>> tool_output("2+2:5;(5+8)"), tool_output("(5+)")
        ('3;', '?;')
    """
    left, plus, right = said.rpartition("(")[2].removesuffix(CALL_END).partition("+")
    is_call = plus and all(len(digit) == 1 and digit in "0123456789" for digit in (left, right))
    return f"{(int(left) + int(right)) % 10};" if is_call else REFUSAL


def is_correct(row: Mapping[str, Any], last_answer: str) -> bool:
    """True if the text after the last `#` of the model's last answer is the row's answer."""
    _, mark, answer = last_answer.rpartition("#")
    return bool(mark) and answer == str(row["answer"])


def components(correct: float, said: Sequence[str], num_calls: int) -> dict[str, float]:
    """Components of an episode's verdict.

    Args:
        correct: 1 if its answer is correct, else 0.
        said: the texts of its turns.
        num_calls: number of its calls of the calculator.

    Returns:
        `correct`, `calls`, and `tool_share`: the share of the steps that were done by the calculator; 0 without steps.
    """
    num_in_head = sum(text.count(":") for text in said)
    share = num_calls / max(num_calls + num_in_head, 1)
    return {"correct": correct, "calls": float(num_calls), "tool_share": share}
