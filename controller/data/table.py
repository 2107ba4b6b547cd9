r"""Tables of rows with `prompt` (or `messages`) and `answer`, and the order in which rows are drawn (`DrawOrder`).

Interprets columns and extracts the final answer of published solutions (GSM8K's `####`, MATH's `\boxed`). Files are
read in sources.py; draws are made by the coordinator.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from jinja2 import Template

from areal_like.errors import UserError
from areal_like.prompts import CHAT_COLUMN
from areal_like.red_team import RED_TEAM, RED_TEAM_COLUMN
from areal_like.tasks.boxed import last_boxed
from areal_like.templates import compiled
from areal_like.tool_turns import REASONING, has_calls
from controller.config.data_settings import eval_key
from controller.config.problems import nearest
from controller.config.run_config import DataSource, RunConfig
from controller.data.row_templates import fill
from controller.data.sources import RawRow, RawRows, read_source

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")
ANSWER_COLUMNS = ("answer", "final_answer", "solution", "ground_truth")
RESPONSE_COLUMNS = ("spans", "response", "completion", "solution", "answer", "output")
"""Column names that need no mapping, in order of preference."""
TOOLS_COLUMN = "tools"
"""Column of demonstrations with the tools that the prompt declares."""
_MAX_INTEGER = 2**63


class Table:
    """Rows ready to be drawn, by index. `skipped`: rows left out, with location and reason of each."""

    def __init__(self, raw: RawRows, reader: RowReader) -> None:
        self._raw, self._reader = raw, reader
        self._kept = array("Q")
        self.skipped: list[str] = []
        digest = blake2b(digest_size=16)
        for index in range(len(raw)):
            row = reader.read(raw[index], raw.where(index))
            if isinstance(row, str):
                self.skipped.append(f"{raw.where(index)}: {row}")
            else:
                self._kept.append(index)
                digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        self.fingerprint = digest.hexdigest()
        """Hash of the rows and their order; a resumed run must find the same rows."""
        if not self._kept:
            raise UserError(f"no row is usable; the problem with the first row: {self.skipped[0]}", where=reader.key)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> dict[str, Any]:
        raw_index = self._kept[index]
        row = self._reader.read(self._raw[raw_index], self._raw.where(raw_index))
        assert not isinstance(row, str), "a row that was usable when the table was made"
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        """Location of a row, such as train.jsonl:12."""
        return self._raw.where(self._kept[index])

    def source(self, index: int) -> str:
        """Key of the set of training prompts that a row belongs to: `data.train`, `data.mix.0`, ..."""
        return "data.train"


class JoinedTable(Table):
    """Rows of several sets, one set after the other."""

    def __init__(self, parts: Sequence[Table]) -> None:
        self.parts = tuple(parts)
        self._starts = list(itertools.accumulate((len(part) for part in parts), initial=0))
        self.skipped = [reason for part in parts for reason in part.skipped]
        self.fingerprint = blake2b(" ".join(part.fingerprint for part in parts).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, place = self._find(index)
        return part[place]

    def where(self, index: int) -> str:
        """See Table."""
        part, place = self._find(index)
        return part.where(place)

    def source(self, index: int) -> str:
        """See Table."""
        number = bisect_right(self._starts, index) - 1
        return f"data.mix.{number - 1}" if number else "data.train"

    def _find(self, index: int) -> tuple[Table, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._starts, index) - 1
        return self.parts[number], index - self._starts[number]


def load_train(config: RunConfig) -> Table:
    """Load the rows of all sets that prompts are drawn from. Raises UserError."""
    sources: list[tuple[str, DataSource]] = [("data.train", config.data.train)]
    sources += [(f"data.mix.{number}", source) for number, source in enumerate(config.data.mix)]
    tables = [_load(source, key, "train", config.data_seed) for key, source in sources]
    return tables[0] if len(tables) == 1 else JoinedTable(tables)


def load_eval(config: RunConfig) -> Table | None:
    """Load the held-out rows of all sets, if configured. Raises UserError."""
    tables = []
    for name, source in config.data.eval_sources.items():
        split = "test" if source.dataset is not None else "eval"
        is_red_team = name == RED_TEAM and config.data.red_team is not None
        if is_red_team and "answer" not in source.columns:
            source = source.model_copy(update={"columns": {**source.columns, "answer": None}})
        table = _load(source, eval_key(name, config.data), split, config.data_seed, is_red_team=is_red_team)
        tables.append(table)
    return tables[0] if len(tables) == 1 else JoinedTable(tables) if tables else None


def load_demonstrations(config: RunConfig) -> Table | None:
    """Load rows with `prompt` (or `messages`) and `response` for the warm start, if configured. Raises UserError."""
    if config.warm_start is None:
        return None
    source = config.warm_start.data
    if source.generator is not None and source.limit is None:
        sft = config.warm_start.sft
        source = source.model_copy(update={"limit": sft.steps * sft.batch_size})
    return _load(source, "warm_start.data", "train", config.data_seed)


def _load(source: DataSource, key: str, split: str, seed: int, *, is_red_team: bool = False) -> Table:
    raw = read_source(source, key=key, split=split, seed=seed)
    reader = RowReader.plan(raw, source.columns, key, source.template)
    is_arrow = source.dataset is not None or str(source.path).endswith(".parquet")
    return Table(raw, replace(reader, chat=source.chat, is_arrow=is_arrow, is_red_team=is_red_team))


# ---------------------------------------------------------------- draws


@dataclass(frozen=True)
class DrawOrder:
    """Maps draws to rows: a pure function of the data seed, so that a resumed run continues the same order."""

    num_rows: int
    seed: int
    shuffle: bool = True
    epochs: int | None = None

    def __post_init__(self) -> None:
        assert self.num_rows > 0
        assert self.epochs is None or self.epochs > 0

    @staticmethod
    def of(config: RunConfig, table: Table) -> DrawOrder:
        """The order of a run."""
        return DrawOrder(len(table), config.data_seed, config.data.shuffle, config.data.epochs)

    @property
    def max_draws(self) -> int | None:
        """epochs * num_rows; None: endless"""
        return None if self.epochs is None else self.epochs * self.num_rows

    def epoch(self, draw: int) -> int:
        """Epoch of a draw, from 0."""
        return draw // self.num_rows

    def row_index(self, draw: int) -> int:
        """The row of a draw. Raises IndexError past `max_draws`."""
        if draw < 0 or (self.max_draws is not None and draw >= self.max_draws):
            valid = "0 or higher" if self.max_draws is None else f"from 0 to {self.max_draws - 1}"
            raise IndexError(f"draw {draw} is out of range: draws must be {valid}")
        epoch, position = divmod(draw, self.num_rows)
        return _order_of_epoch(self.num_rows, self.seed, epoch)[position] if self.shuffle else position


@lru_cache(maxsize=4)
def _order_of_epoch(num_rows: int, seed: int, epoch: int) -> array[int]:
    order = array("Q", range(num_rows))
    random.Random(f"draw order/{seed}/{epoch}").shuffle(order)
    return order


# ---------------------------------------------------------------- columns


@dataclass(frozen=True)
class RowReader:
    """Converts raw rows to rows of a run, using the columns determined on the first row."""

    key: str
    prompt: str
    """Column of the prompt."""
    target: str | None
    """Column of the answer (or of the response, for demonstrations); None: there is none."""
    is_demonstration: bool
    template: Template | None = None
    """Template that makes the prompt, instead of a column."""
    chat: Mapping[str, Any] = field(default_factory=dict)
    """From `data_settings.DataSource.chat`; empty: rows do not configure the chat template."""
    is_arrow: bool = False
    """The source is typed: a field that only some messages, arguments or schemas have is None in the others."""
    is_red_team: bool = False
    """The rows are those of data.red_team."""

    @staticmethod
    def plan(raw: RawRows, columns: Mapping[str, str | None], key: str, template: str | None = None) -> RowReader:
        """Determine the columns. Raises UserError that lists the existing columns."""
        first, where = raw[0], raw.where(0)
        is_demonstration = key == "warm_start.data"
        target_key = "response" if is_demonstration else "answer"
        made = compiled(template) if template is not None else None
        prompt = "prompt" if made is not None else columns.get("prompt") or columns.get("messages")
        prompt = prompt or _choose(first, PROMPT_COLUMNS, "prompt", key, where)
        if made is None:
            _column(first, prompt, "prompt", key, where)
        target: str | None
        if target_key in columns:
            target = columns[target_key]
        elif is_demonstration and made is None and _ends_with_assistant(_nested(first, prompt)):
            target = None
        else:
            target = _choose(first, RESPONSE_COLUMNS if is_demonstration else ANSWER_COLUMNS, target_key, key, where)
        return RowReader(key, prompt, target, is_demonstration, made)

    def read(self, raw: RawRow, where: str) -> dict[str, Any] | str:
        """Convert one row, or return the reason why it is left out. Raises UserError for an invalid row."""
        for reserved in (CHAT_COLUMN, RED_TEAM_COLUMN):
            if reserved in raw:
                raise UserError(f"the name `{reserved}` is reserved", where=where, remedy="rename the column")
        row: dict[str, Any] = {CHAT_COLUMN: dict(self.chat)} if self.chat else {}
        row |= {RED_TEAM_COLUMN: True} if self.is_red_team else {}
        if self.template is not None:
            prompt: Any = fill(self.template, raw, where)
        else:
            prompt = _column(raw, self.prompt, "prompt", self.key, where)
        kept = {name: value for name, value in raw.items() if name not in (self.prompt, self.target)}
        role = "response" if self.is_demonstration else "answer"
        target: Any = _column(raw, self.target, role, self.key, where) if self.target else None
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError(f"`{self.prompt}` is empty", where=where, remedy="remove the row")
            row["prompt"] = prompt
        else:
            if self.is_demonstration and self.is_arrow:
                prompt = _without_nulls(prompt)
            messages = _messages(prompt, self.prompt, where)
            if "system_prompt" in self.chat and any(one["role"] == "system" for one in messages):
                raise UserError(
                    f"`{self.prompt}` already has a system message",
                    where=where,
                    remedy=f"remove this message, or remove {self.key}.system_prompt",
                )
            if self.is_demonstration and (tools := raw.get(TOOLS_COLUMN)):
                row[TOOLS_COLUMN] = _without_nulls(tools) if self.is_arrow else tools
            if self.is_demonstration and self.target is None:
                answers = [message for message in messages if message["role"] == "assistant"]
                is_written = any(has_calls(one) or one.get(REASONING) for one in answers)
                if len(answers) > 1 or is_written:
                    return _plain({**row, "messages": messages}, where)  # each of its turns is trained
                target = messages.pop().get("content")
            elif messages[-1]["role"] == "assistant":
                raise UserError(
                    f"`{self.prompt}` ends with an assistant message",
                    where=where,
                    remedy="end the conversation with a user message",
                )
            row["messages"] = messages
            kept.pop("prompt", None)
        if self.is_demonstration:
            if self.target == "spans":
                return _plain({**row, "spans": target}, where) if target else "no `spans`"
            if not isinstance(target, str) or not target.strip():
                return f"no response in `{self.target or self.prompt}`"
            return _plain({**row, "response": target}, where)
        kept.pop("messages", None)
        if self.target is not None:
            answer = final_answer(target)
            if answer is None:
                return f"no answer in `{self.target}`"
            row["answer"] = answer
            if answer != target and isinstance(target, str):
                kept.setdefault("solution", target)
        # A column selected by `columns` replaces a column of that name in the file.
        return _plain({**row, **{name: value for name, value in kept.items() if name not in row}}, where)


_MISSING = object()


def _nested(raw: RawRow, column: str) -> Any:
    """The value of a column, or of a nested column by its dotted path."""
    if column in raw:
        return raw[column]
    value: Any = raw
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _column(raw: RawRow, column: str, role: str, key: str, where: str) -> Any:
    value = _nested(raw, column)
    if value is _MISSING:
        near = nearest(column, raw, count=2)
        hint = f"similar columns: {', '.join(near)}" if near else f"existing columns: {', '.join(raw)}"
        raise UserError(
            f"there is no column `{column}`",
            where=where,
            remedy=f"{hint}; specify the correct column with {key}.columns.{role}=...",
        )
    return value


def _choose(first: RawRow, known: tuple[str, ...], role: str, key: str, where: str) -> str:
    for name in known:
        if first.get(name) is not None:
            return name
    near = list(dict.fromkeys(name for word in known for name in nearest(word, first, count=1, cutoff=0.5)))
    remedy = (
        f"map the column with {key}.columns.{role}={near[0] if near else 'YOUR_COLUMN'}; existing columns: "
        f"{', '.join(first)}"
    )
    remedy += "; columns.answer=null means that there are no answers" if role == "answer" else ""
    raise UserError(f"there is no column for the {role} (looked for {', '.join(known)})", where=where, remedy=remedy)


def _ends_with_assistant(value: Any) -> bool:
    is_list = isinstance(value, list) and value and isinstance(value[-1], Mapping)
    return bool(is_list) and value[-1].get("role") == "assistant"


def _messages(value: Any, column: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        kind = "null" if value is None else type(value).__name__
        raise UserError(f"`{column}` must be text or a list of messages, not {kind}", where=where)
    if not value:
        raise UserError(f"`{column}` is empty", where=where, remedy="remove the row")
    for message in value:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or not ("content" in message or has_calls(message)):
            what = f"each message in `{column}` must have a `role`, and a `content` or `tool_calls`"
            raise UserError(what, where=where)
    return [{"content": "", **message} if has_calls(message) else dict(message) for message in value]


def _without_nulls(value: Any) -> Any:
    """The value without fields that are None, at any depth."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def final_answer(value: Any) -> Any:
    r"""The answer to verify: the text after `####`, the last `\boxed{...}`, or the value itself; None if empty."""
    if isinstance(value, bool | int | float):
        return str(value)
    if not isinstance(value, str):
        return value if value else None
    if "####" in value:
        text = value.rpartition("####")[2].strip().replace(",", "")
    elif "\\boxed" in value or "\\fbox" in value:
        text = last_boxed(value) or ""
    else:
        text = value.strip()
    return text or None


def _plain(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The columns that can be sent as plain data; bytes and other objects (images) are left out."""
    plain = {}
    for name, value in row.items():
        made = _plain_value(value, name, where)
        if made is not _MISSING:
            plain[str(name)] = made
    return plain


def _plain_value(value: Any, name: str, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"`{name}` contains an unpaired surrogate, which is not valid Unicode",
                where=where,
                remedy="remove or replace this character",
            ) from error
        return value
    if isinstance(value, int):
        if not -_MAX_INTEGER <= value < 2 * _MAX_INTEGER:
            raise UserError(
                f"`{name}` contains an integer of more than 64 bits", where=where, remedy="write the number as text"
            )
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return _plain(value, where)
    if isinstance(value, list | tuple):
        made = [_plain_value(item, name, where) for item in value]
        return _MISSING if any(item is _MISSING for item in made) else made
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return _plain_value(value.tolist(), name, where)
    return _MISSING
