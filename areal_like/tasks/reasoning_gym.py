"""Procedural tasks of the package reasoning-gym: generates rows by seed, and regenerates the task entry of a row.

Answers are judged in services/reward/scorers/reasoning_gym.py.

A row contains its task, configuration, seed and index, not the entry's metadata, which need not be plain data; the
entry is regenerated where it is needed. A question belongs to one part (`train`, `eval`) by a hash of its text alone,
whatever the seed, so no held-out question is trained on. The package is imported inside functions, because it is an
optional dependency (extra `reasoning-gym`).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

import msgspec
import pydantic
from pydantic import Field, field_validator

from areal_like.errors import UserError
from areal_like.settings import Settings

Split = Literal["train", "eval"]
EVAL_SHARE = 0.2
MAX_TRIES = 60
"""The search ends after this many consecutive questions of the other part: the task has too few different ones."""
NO_ANSWER = "(any that the task accepts)"
"""Value of `answer` if a task has no single correct answer."""
_MAX_SIZE = 1 << 30
_WHERE = "reasoning_gym"


class ReasoningGymOptions(Settings):
    """Options of the generator."""

    tasks: dict[str, dict[str, Any] | None] = Field(min_length=1)
    """Tasks by their names in the package, each with its configuration (`chain_sum: {max_terms: 3}`) or null."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight with which a task is drawn, relative to the others; default 1."""

    @field_validator("tasks")
    @classmethod
    def _size_and_seed_are_ours(cls, tasks: dict[str, dict[str, Any] | None]) -> dict[str, dict[str, Any] | None]:
        for name, config in tasks.items():
            if taken := sorted({"seed", "size"} & set(config or {})):
                instead = {"seed": "data.seed", "size": "limit"}[taken[0]]
                raise ValueError(f"{name}.{taken[0]} cannot be set here; set {instead} instead")
        return tasks

    @pydantic.model_validator(mode="after")
    def _weights_belong_to_tasks(self) -> ReasoningGymOptions:
        for name, weight in self.weights.items():
            if name not in self.tasks:
                raise ValueError(f"weights.{name}: `tasks` has no task of this name")
            if not 0 < weight < math.inf:
                raise ValueError(f"weights.{name} must be a positive number, not {weight}")
        return self

    @staticmethod
    def parse(options: Mapping[str, Any]) -> ReasoningGymOptions:
        """Check options as they come from YAML. Raises UserError."""
        try:
            return ReasoningGymOptions.model_validate(dict(options))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            what = str(first["msg"]).removeprefix("Value error, ")
            remedy = "options: {tasks: {chain_sum: {max_terms: 3}, spell_backward: null}}"
            raise UserError(what, where=f"{_WHERE} options.{key}".rstrip("."), remedy=remedy) from error


class TaskOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a row. config: the task's configuration as JSON; digest: hash of the question, to check the regenerated
    entry."""

    task: str
    config: str
    seed: int
    index: int
    digest: str


def rows(seed: int, split: Split, *, limit: int, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`limit` rows with `prompt`, `answer` and `reasoning_gym`; the same for the same arguments.

    Raises UserError if the package or the task does not exist, the task rejects the configuration, or the task does not
    depend on the seed alone.
    """
    parsed = ReasoningGymOptions.parse(options)
    draw = random.Random(f"reasoning_gym/{seed}/{split}")
    names = list(parsed.tasks)
    weights = [parsed.weights.get(name, 1.0) for name in names]
    places = {name: _places(name, parsed.tasks[name] or {}, seed, split) for name in names}
    for _ in range(limit):
        yield next(places[draw.choices(names, weights)[0]])


def entry_at(place: TaskOrigin) -> tuple[Any, dict[str, Any]]:
    """The data set and the entry (`question`, `answer`, `metadata`) that a row came from. Raises UserError."""
    tasks = dataset(place.task, place.config, place.seed)
    entry = tasks[place.index]
    if digest_of(entry["question"]) != place.digest:
        what = "the task generates a question that differs from that of the row"
        raise UserError(
            what,
            where=f"{_WHERE} task {place.task}",
            remedy="install the version of reasoning-gym that the row was created with",
        )
    return tasks, entry


def digest_of(question: str) -> str:
    """64 bits of a hash, in hex."""
    return hashlib.blake2b(question.encode(errors="replace"), digest_size=8).hexdigest()


@lru_cache(maxsize=64)
def dataset(task: str, config: str, seed: int) -> Any:
    """A reasoning_gym data set; its entry i is a function of seed, i and configuration. Raises UserError."""
    where = f"{_WHERE} task {task}"
    try:
        import reasoning_gym
    except ImportError as error:
        remedy = "pip install 'areal-like[reasoning-gym]'"
        raise UserError("the package reasoning-gym is not installed", where=where, remedy=remedy) from error
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        import difflib

        near = difflib.get_close_matches(task, DATASETS, n=2)
        remedy = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"choose one of its {len(DATASETS)} tasks, such as chain_sum"
        )
        raise UserError(f"reasoning-gym has no task `{task}`", where=where, remedy=remedy)
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=_MAX_SIZE, **msgspec.json.decode(config))
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        known = ", ".join(name for name in DATASETS[task][1].__dataclass_fields__ if name not in ("seed", "size"))
        reason = str(error) or type(error).__name__
        raise UserError(
            f"the task rejects its configuration ({reason})",
            where=where,
            remedy=f"use the options of the task: {known}",
        ) from error


def part_of(question: str) -> Split:
    """The part a question belongs to: a function of its text alone."""
    digest = hashlib.blake2b(question.encode(errors="replace"), digest_size=8, person=b"reasoning_gym").digest()
    return "eval" if int.from_bytes(digest, "big") / 2**64 < EVAL_SHARE else "train"


def _places(task: str, settings: Mapping[str, Any], seed: int, split: Split) -> Iterator[dict[str, Any]]:
    config = msgspec.json.encode(settings, order="deterministic").decode()
    facts = f"{seed}/{task}/{config}".encode()
    # entry i of a data set is drawn from its seed + i, far below the largest seed of NumPy's generators
    own_seed = int.from_bytes(hashlib.blake2b(facts, digest_size=4).digest(), "big") >> 2
    tasks = dataset(task, config, own_seed)
    _check_reproducible(task, config, own_seed)
    num_tries = 0
    for index in range(_MAX_SIZE):
        try:
            entry = tasks[index]
        except Exception as error:  # fault boundary: a task's generator may raise anything
            what = f"the task cannot generate entry {index} ({type(error).__name__}: {error})"
            raise UserError(
                what, where=f"{_WHERE} task {task}", remedy="choose a different configuration of the task"
            ) from error
        if part_of(entry["question"]) != split:
            num_tries += 1
            if num_tries > MAX_TRIES:
                what = f"the task has too few different questions for a separate set of `{split}` rows"
                raise UserError(
                    what,
                    where=f"{_WHERE} task {task}",
                    remedy="choose a configuration of the task that generates more distinct questions",
                )
            continue
        num_tries = 0
        place = TaskOrigin(task=task, config=config, seed=own_seed, index=index, digest=digest_of(entry["question"]))
        answer = entry["answer"]
        yield {
            "prompt": entry["question"],
            "answer": NO_ANSWER if answer is None or answer == "" else str(answer),
            "task": task,
            "reasoning_gym": msgspec.to_builtins(place),
        }


def _check_reproducible(task: str, config: str, seed: int) -> None:
    """Check that the entry of a row depends on seed and index only, so that another process can regenerate it."""
    again = dataset.__wrapped__(task, config, seed)
    first = [dataset(task, config, seed)[index]["question"] for index in (0, 1)]
    if [again[index]["question"] for index in (1, 0)] != first[::-1]:
        raise UserError(
            "the task is not reproducible: its questions do not depend on the seed alone",
            where=f"{_WHERE} task {task}",
            remedy="remove this task",
        )
