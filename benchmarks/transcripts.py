"""Is each token of an agent's conversations trained on once, and never tokenised again, with real chat templates?

    python -m benchmarks.transcripts                          100,000 conversations, PROCESSES at once
    python -m benchmarks.transcripts --quick                  20 with each template; writes nothing
    python -m benchmarks.transcripts --conversations 2000     fewer; the result goes next to the runs
    python -m benchmarks.transcripts --wheel FILE             templates of a wheel that is already here

The templates are files of the wheel of TRL (Apache 2.0), whose version is pinned in benchmarks/peers/trl.lock; pip
downloads it. Those for training are left out but for `qwen3_training`, which changes earlier answers. `mistral_like` is
written here, because the wheel has none that trims answers and ends them with `</s>`.

A random policy and a random client talk through the parts that answer a program (rollout/agent): requests and answers
of OpenAI's chat completions, OpenAI's responses or Anthropic's messages, the session, the store of answers, and the
chat formats. The policy samples tokens of a byte-level BPE, markers among them, ends with each stop token of the model,
or is cut, and calls a tool if its format is known. The client continues, repeats its question (each time with another
answer), changes an earlier question, begins again, sends a request a second time as a retry, and rewrites what it was
given: it drops reasoning and ids, strips texts, sends null for empty ones, and writes the arguments of calls with other
spaces and order (agent_clients.py). A quarter of the conversations has `thinking: template`.

Checked for each request: a conversation that goes on from an answer continues that answer (`false_forks`), with exactly
its tokens (`changed`), followed by the text of the new messages and of no earlier ones (`wrong_text`). With `thinking:
template` one with reasoning may begin again instead, with the text of all messages (counted as `without_reasoning`). A
retry gets the answer of its request, and nothing is sampled for it (`sampled_again`). For each conversation: the tokens
that are trained on, over all its trajectories, are those that were sampled, each once (`lost`). `same again`: share of
continued prompts that would have the same tokens if the whole conversation were tokenised again, of a sample of the
requests. Exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from areal_like.errors import UserError
from areal_like.trajectory import Segment, check_disjoint
from benchmarks.agent_clients import ANSWER, CLIENTS, GIVEN, Row
from benchmarks.folders import REPOSITORY
from benchmarks.publishing import RUNS, add_replace, result_path
from benchmarks.runs import command_of, write
from rollout.agent.dialect import AgentRequest
from rollout.agent.session import AgentSession, RequestName
from rollout.agent.store import Thinking
from rollout.answers import chat_of
from rollout.tokens import PromptTokens
from rollout.transcript import Answer, Transcript

QUESTION = "transcripts"
LOCK = REPOSITORY / "benchmarks" / "peers" / "trl.lock"
FOLDER = "trl/chat_templates/"
CONVERSATIONS, QUICK, PROCESSES = 100_000, 20, 2
STUDIED_TRAINING = ("qwen3_training",)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}</s>"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endif %}{% endfor %}"
)
STOPS = {
    "cohere2": ("<|END_OF_TURN_TOKEN|>",),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>", "<|endoftext|>"),
}
"""Stop tokens of models whose templates do not show them as the first marker after an answer, from the models'
generation_config.json."""
CALLS = {
    "hermes": '<tool_call>\n{{"name": "add", "arguments": {{"x": {0}, "y": 1}}}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=add>\n<parameter=x>\n{0}\n</parameter>\n<parameter=y>\n1\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama3_json": '{{"name": "add", "parameters": {{"x": {0}, "y": 1}}}}',
    "mistral": '[TOOL_CALLS][{{"name": "add", "arguments": {{"x": {0}, "y": 1}}}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{{"x": {0}, "y": 1}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{{"x": {0}, "y": 1}}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}
"""A call as the policy writes it, by format."""
NUMBER = {"type": "integer"}
TOOL = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {"x": NUMBER, "y": NUMBER}}}
MARK = re.compile(
    r"<[|｜][^<>\s'\"{}]{1,40}[|｜]>|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|s)>"
    r"|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]{3,20}\]"
)
"""What is one token in a model's vocabulary."""
VOCABULARY = 2000
TEMPLATE_SHARE, RETRY_SHARE = 0.25, 0.15
"""Shares of conversations with `thinking: template`, and of requests that are sent again."""
AGAIN_EVERY = 20
"""One in so many continued prompts is tokenised again for `same again`."""
FAULTS = ("false_forks", "changed", "wrong_text", "lost", "sampled_again")


# ---------------------------------------------------------------- templates


def wheel(folder: Path) -> Path:
    """Download the pinned wheel. Raises SystemExit."""
    version = re.search(r"^trl==(\S+)", LOCK.read_text(), re.MULTILINE)
    assert version is not None
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"trl=={version[1]}", "-d", str(folder)]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"pip cannot download trl=={version[1]}; give a wheel that you have: --wheel FILE")
    return next(folder.glob("trl-*.whl"))


def templates_of(path: Path) -> dict[str, str]:
    """Chat templates by name. Raises SystemExit if the file has none."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.startswith(FOLDER) and name.endswith(".jinja")]
            found = {Path(name).stem: archive.read(name).decode() for name in sorted(names)}
    except (OSError, zipfile.BadZipFile) as error:
        raise SystemExit(f"{path} is not a wheel: {error}") from error
    if not found:
        raise SystemExit(f"{path} has no {FOLDER}*.jinja; give the wheel of trl that benchmarks/peers/{LOCK.name} pins")
    kept = {name: text for name, text in found.items() if name in STUDIED_TRAINING or not name.endswith("_training")}
    return {**kept, "mistral_like": MISTRAL}


@cache
def vocabulary() -> str:
    """A byte-level BPE of VOCABULARY tokens, trained on this project's documentation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([(REPOSITORY / "docs" / "operations.md").read_text()], trainer)
    return str(made.to_str())


@dataclass
class Family:
    """A chat template with a tokenizer.

    stops: ids that end the policy's turns. inner: markers that the policy samples within a turn. asks: the end of a
    prompt whose last message is the user's. has_system, can_call: the template takes a system message, and the result
    of a call in a known format.
    """

    name: str
    tokens: PromptTokens
    stops: list[int]
    inner: list[int]
    asks: str
    has_system: bool = False
    can_call: bool = False

    @staticmethod
    def of(name: str, template: str) -> Family:
        """Raises UserError if the template does not accept a conversation of texts."""
        from tokenizers import AddedToken, Tokenizer
        from transformers import PreTrainedTokenizerFast

        marks = sorted({*MARK.findall(template), *STOPS.get(name, ())})
        made = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(vocabulary()), bos_token="<|bos|>", eos_token="<|eos|>"
        )
        made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True)
        made.chat_template = template
        plain = PromptTokens(made, template=None, add_bos="auto", max_context=1 << 30)
        user, said = {"role": "user", "content": "U0"}, {"role": "assistant", "content": "A0"}
        texts = [plain.chat_text([{**user, "content": text}], ()) for text in ("U0", "X1")]
        if "U0" not in texts[0]:
            raise UserError("the template writes no text of messages whose content is a text, only of lists of parts")
        asks = texts[0].rpartition("U0")[2]
        if texts[1].rpartition("X1")[2] != asks:
            raise UserError("the template writes the user's text in parts")
        after = plain.chat_text([user, said, user], ()).rpartition("A0")[2]
        shown = MARK.findall(after.partition("U0")[0])
        ends = [stop for stop in STOPS.get(name, shown[:1] or ["<|eos|>"])]
        ids = [int(made.convert_tokens_to_ids(end)) for end in ends]
        tokens = PromptTokens(made, template=None, add_bos="auto", max_context=1 << 30, stop_ids=tuple(ids))
        inner = [int(made.convert_tokens_to_ids(mark)) for mark in ("<think>", "</think>") if mark in marks]
        found = Family(name, tokens, ids, inner, asks)
        found.has_system = found._accepts([{"role": "system", "content": "S0"}, user])
        chat, no_tools = chat_of(tokens, name=None, where=name)
        arguments = '{"x": 1}' if chat.has_text_arguments else {"x": 1}
        call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": arguments}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "call00000", "content": "R0"}
        found.can_call = not no_tools and found._accepts([user, called, result])
        return found

    def _accepts(self, messages: list[Row]) -> bool:
        try:
            self.tokens.chat_text(messages, ())
        except UserError:
            return False
        return True


# ---------------------------------------------------------------- one conversation


@dataclass
class Policy:
    """Samples at random; the part of `SampleTools` that a session uses."""

    family: Family
    dice: random.Random
    call: str = ""
    """How it writes a call; empty: it has no tools."""
    num_sampled: int = 0
    number: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> PromptTokens:
        return self.family.tokens

    async def generate(self, prompt: Transcript, *, max_new_tokens: int | None = None) -> Answer:
        dice = self.dice
        ids = [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 12))]
        if self.family.inner and dice.random() < 0.3:
            ids.insert(dice.randint(0, len(ids)), dice.choice(self.family.inner))
        if self.call and dice.random() < 0.35:
            prose = [] if self.call.startswith("{") else [*ids, *self.family.inner[1:]]  # `</think>`
            ids = [*prose, *self.tokens.encode(self.call.format(dice.randrange(10))).tolist()]
        is_cut = dice.random() < 0.1
        stop = None if is_cut else dice.choice(self.family.stops)
        made = np.array(ids if stop is None else [*ids, stop], np.int32)
        count = len(made)
        segment = Segment(made, np.full(count, -1.0, np.float32), np.zeros(count, np.int32))
        answer = Answer(
            segment=segment, finish_reason="length" if is_cut else "stop", number=self.number,
            ended_by="length" if is_cut else "end_of_sequence", stop_token=stop,
        )  # fmt: skip
        self.counts["truncated"] += is_cut
        self.num_sampled += count
        self.number += 1
        return answer


class Client:
    """One conversation with its branches."""

    def __init__(self, family: Family, seed: int) -> None:
        self._family, self._dice = family, random.Random(f"{family.name}/{seed}")
        chat, no_tools = chat_of(family.tokens, name=None, where=family.name)
        call = CALLS[chat.name] if family.can_call else ""
        self._policy = Policy(family, self._dice, call)
        self._api = self._dice.choice(CLIENTS)(self._dice)
        thinking: Thinking = "template" if self._dice.random() < TEMPLATE_SHARE else "keep"
        self._session = AgentSession(self._policy, chat, no_tools=no_tools, thinking=thinking)
        self._tools = [TOOL] if family.can_call else []
        self._num_texts, self._num_requests = 0, 0
        self._open: list[list[Row]] = []
        """Messages of the requests that the client may make (see agent_clients.py)."""
        self.counts: Counter[str] = Counter()

    async def talk(self) -> Counter[str]:
        """The whole conversation; returns the counts."""
        self._open.append(self._begun())
        for _ in range(self._dice.randint(3, 8)):
            is_next = self._dice.random() < 0.7
            await self._ask(self._open[-1] if is_next else self._dice.choice(self._open))
        self._check_trained()
        await self._session.close()
        self.counts.update(self._policy.counts)
        self.counts["calls"] = self._session.counts["agent_tool_calls"]
        self.counts["conversations"] = self.counts[self._api.name] = 1
        return self.counts

    def _text(self) -> str:
        """A text that occurs once."""
        self._num_texts += 1
        return f"Q{self._num_texts}{self._dice.choice(['?', ' ok ', 'x y', ' <b>', ' ü', ' {{'])}E"

    def _begun(self) -> list[Row]:
        system = (
            [{"role": "system", "content": "Be brief."}]
            if self._family.has_system and self._dice.random() < 0.3
            else []
        )
        return [*system, {"role": "user", "content": self._text()}]

    async def _ask(self, messages: list[Row]) -> None:
        self._num_requests += 1
        store, dialect = self._session.store, self._api.dialect
        body = {"model": "policy", "return_token_ids": True, **self._api.body(messages, self._tools)}
        request = dialect.read(json.loads(json.dumps(body)), self._session.conversation)
        number = str(self._num_requests)
        name = RequestName(key=number if self._dice.random() < 0.5 else "", digest=number.encode())
        num_before = store.num_without_reasoning
        async with self._session.answering(request, name) as reply:
            answer = dialect.answer(request, reply)
        if self._dice.random() < RETRY_SHARE:
            await self._retry(request, name, reply.index)
        self._check(
            messages, reply.index, answer["prompt_token_ids"], begins_again=store.num_without_reasoning > num_before
        )
        self._go_on([*messages, {**self._api.message(answer), ANSWER: reply.index}])

    async def _retry(self, request: AgentRequest, name: RequestName, index: int) -> None:
        num_sampled = self._policy.num_sampled
        async with self._session.answering(request, replace(name, is_retry=not name.key)) as again:
            is_same = again.index == index and self._policy.num_sampled == num_sampled
        self.counts["retries"] += 1
        self.counts["sampled_again"] += not is_same

    def _go_on(self, messages: list[Row]) -> None:
        """What the client may do after this answer, in addition to what it could before: a request that is made twice
        has lost its answer, or wants another one."""
        calls = messages[-1].get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": self._text()} for call in calls]
        self._open.append([*messages, *(results or [{"role": "user", "content": self._text()}])])
        if self._dice.random() < 0.1:
            self._open.append(self._begun())
            self.counts["begun"] += 1
        places = [at for at, one in enumerate(messages) if one["role"] == "user" and ANSWER in messages[at - 1]]
        if places and self._dice.random() < 0.2:
            before = messages[: self._dice.choice(places)]
            self._open.append([*before, {"role": "user", "content": self._text()}])
            self.counts["branches"] += 1

    def _check(self, messages: list[Row], index: int, prompt_ids: Sequence[int], *, begins_again: bool) -> None:
        """Compare a prompt with the answer that it should continue. `begins_again`: it was rendered from text, without
        earlier reasoning."""
        self.counts["requests"] += 1
        last = max((at for at, one in enumerate(messages) if ANSWER in one), default=None)
        if last is None:
            return
        if begins_again:
            self._check_again(messages, prompt_ids)
            return
        self.counts["continued"] += 1
        turns, known = self._session.store.turns, messages[last][ANSWER]
        anchor = turns[index].anchor
        if anchor is None or (anchor.index != known and anchor.chain != turns[known].chain):
            self.counts["false_forks"] += 1
            return
        before_T = anchor.transcript.tokens_T
        if list(prompt_ids[: len(before_T)]) != before_T.tolist():
            self.counts["changed"] += 1
            return
        given = np.array(prompt_ids[len(before_T) :], np.int32)
        tail = self._family.tokens.decode(given, with_special_tokens=True)
        old = [one["content"] for one in messages[:last] if one["role"] != "assistant"]
        self.counts["wrong_text"] += not self._is_right(tail, messages[last + 1 :], old)
        if self.counts["continued"] % AGAIN_EVERY == 1:
            self._tokenise_again(messages, prompt_ids)

    def _check_again(self, messages: list[Row], prompt_ids: Sequence[int]) -> None:
        """Check a prompt that was rendered from text: an earlier answer has reasoning, and no message of the user or
        of a tool is left out."""
        self.counts["without_reasoning"] += 1
        turns = self._session.store.turns
        chains = {turns[one[ANSWER]].chain for one in messages if ANSWER in one}
        self.counts["false_forks"] += not any(turn.reasoning for turn in turns if turn.chain in chains)
        text = self._family.tokens.decode(np.array(prompt_ids, np.int32), with_special_tokens=True)
        new = [one for one in messages if one["role"] in ("user", "tool")]
        self.counts["wrong_text"] += not self._is_right(text, new, [])

    def _is_right(self, text: str, new: Sequence[Row], old: Sequence[str]) -> bool:
        """Whether a text has the new messages, of which it ends with the last, and none of the old ones."""
        # Some templates write results of tools as JSON.
        is_whole = all(json.dumps(one["content"].strip(), ensure_ascii=False)[1:-1] in text for one in new)
        ends = new[-1]["role"] != "user" or text.endswith(self._family.asks)
        return is_whole and ends and not any(one.strip() in text for one in old)

    def _tokenise_again(self, messages: list[Row], prompt_ids: Sequence[int]) -> None:
        self.counts["rendered"] += 1
        offered = [{"type": "function", "function": tool} for tool in self._tools]
        kept = [{key: value for key, value in one.items() if key not in (ANSWER, GIVEN)} for one in messages]
        try:
            again = self._family.tokens.prompt({"messages": kept}, offered)
        except UserError:  # the template does not take the messages of a client as they are
            self.counts["rejected_again"] += 1
        else:
            self.counts["same_again"] += again.tolist() == list(prompt_ids)

    def _check_trained(self) -> None:
        """Compare the trained tokens with the sampled ones."""
        trajectories = self._session.store.trajectories()
        try:
            check_disjoint(trajectories)
        except ValueError:
            self.counts["lost"] += 1
            return
        self.counts["lost"] += sum(one.num_sampled for one in trajectories) != self._policy.num_sampled
        self.counts["trajectories"] += len(trajectories)
        self.counts["tokens"] += self._policy.num_sampled


# ---------------------------------------------------------------- all of them


def fuzz(name: str, template: str, first: int, number: int) -> Row:
    """Counts of conversations `first` to `first + number` with one template, or why it was refused."""

    async def talk() -> Counter[str]:
        counts: Counter[str] = Counter()
        for seed in range(first, first + number):
            counts += await Client(family, seed).talk()
        return counts

    if fault := fault_of(name, template):
        return {"template": name, "refused": fault}
    family = Family.of(name, template)
    began_s = time.process_time()
    counts = asyncio.run(talk())
    chat, no_tools = chat_of(family.tokens, name=None, where=name)
    stops = family.tokens.decode(np.array(family.stops, np.int32), with_special_tokens=True)
    row = {"template": name, "format": "" if no_tools else chat.name, "stops": stops, "can_call": family.can_call}
    return {**row, "cpu_s": time.process_time() - began_s, **{key: counts[key] for key in COUNTS}}


def fault_of(name: str, template: str) -> str:
    """Why a template is not used; empty: it is."""
    try:
        Family.of(name, template)
    except UserError as error:
        return error.what
    return ""


COUNTS = (
    "conversations", "requests", "continued", "branches", "begun", "calls", "truncated", "trajectories", "tokens",
    "chat", "responses", "messages", "retries", "without_reasoning", *FAULTS, "rendered", "same_again",
    "rejected_again",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transcripts", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="over all templates")
    parser.add_argument("--templates", help="names, separated by commas; all")
    parser.add_argument("--wheel", type=Path, help="a wheel of TRL; pip downloads it otherwise")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK} conversations with each template; writes nothing"
    )
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    add_replace(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        templates = templates_of(options.wheel or wheel(Path(folder)))
    if options.templates:
        wanted = options.templates.split(",")
        if unknown := [name for name in wanted if name not in templates]:
            parser.error(f"no template {', '.join(unknown)}; known: {', '.join(templates)}")
        templates = {name: templates[name] for name in wanted}
    num_used = sum(fault_of(name, text) == "" for name, text in templates.items())
    each = QUICK if options.quick else max(-(-options.conversations // max(num_used, 1)), 1)
    began_s = time.monotonic()
    rows = []
    with ProcessPoolExecutor(options.processes) as pool:
        for row in pool.map(fuzz, templates, templates.values(), [0] * len(templates), [each] * len(templates)):
            rows.append(row)
            print(words(row), flush=True)
    total = total_of(rows)
    print(words({"template": "all", **total}))
    if not options.quick:
        fields = {"rows": rows, "total": total, "wall_s": round(time.monotonic() - began_s, 1)}
        print(f"written to {write(QUESTION, command_of(QUESTION), fields, result_path(QUESTION, options))}")
    raise SystemExit(1 if any(total[name] for name in FAULTS) else 0)


def total_of(rows: Sequence[Mapping[str, Any]]) -> Row:
    """Sums over all templates that were not refused."""
    used = [row for row in rows if "refused" not in row]
    return {key: sum(row[key] for row in used) for key in (*COUNTS, "cpu_s")}


def words(row: Mapping[str, Any]) -> str:
    """One line of the table."""
    if "refused" in row:
        return f"{row['template']:28} refused: {row['refused']}"
    faults = "  ".join(f"{name} {row[name]}" for name in FAULTS)
    again = row["same_again"] / max(row["rendered"], 1)
    return (
        f"{row['template']:28} {row.get('format') or '-':12} {row['conversations']:6} conversations  "
        f"{row['continued']:7} continued  {row['calls']:6} calls  {faults}  same again {again:.2f}  "
        f"{row['cpu_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
