"""The built-in stages by name, and the list of stages that a user wrote, checked.

A list is a YAML file with the key `stages`: names, or `{kind, options}`. A kind with a colon is the import path of a
stage or function of the user.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from areal_like.errors import UserError
from areal_like.import_path import import_object, is_import_path
from areal_like.regular_file import check_regular
from controller.config.problems import nearest
from controller.config.yaml_document import Document, parse_document
from controller.preflight.dataset.port import RowStage, SetStage, Stage
from controller.preflight.dataset.stages.user_function import UserFunction

STAGES: Mapping[str, str] = {
    "schema": "Schema",
    "exact_duplicates": "ExactDuplicates",
    "near_duplicates": "NearDuplicates",
    "length": "Length",
    "language": "Language",
    "unparseable_answer": "UnparseableAnswer",
    "solution_disagrees": "SolutionDisagrees",
    "contamination": "Contamination",
    "secrets": "Secrets",
    "personal_data": "PersonalData",
    "toxic": "Toxic",
    "pass_rate": "PassRate",
}
"""Class of each built-in stage, in the module of the stage's name in stages/."""
DEFAULT = (
    "schema", "length", "unparseable_answer", "solution_disagrees", "secrets", "personal_data", "exact_duplicates",
    "near_duplicates",
)  # fmt: skip
"""Stages without a list of the user: those that need no file and no wish of the user. Stages that remember rows are
last: a good row must not be a duplicate of a row that is removed for another fault."""
REMEMBERING = ("exact_duplicates", "near_duplicates")
"""Built-in stages that compare a row with earlier ones."""


@dataclass(frozen=True)
class StageSpec:
    """A stage of a list. where: of its entry, for messages."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True)
class Plan:
    """A list of stages and the mapping of columns."""

    stages: tuple[StageSpec, ...]
    columns: Mapping[str, str | None] = field(default_factory=dict)


def with_evaluation(stages: Sequence[StageSpec], files: Sequence[str]) -> tuple[StageSpec, ...]:
    """The list with stage `contamination` for these files, before the stages that remember rows. Raises UserError if it
    has one already."""
    if any(one.kind == "contamination" for one in stages):
        remedy = "add the files to the option `files` of the stage `contamination`"
        raise UserError("the list of stages already contains `contamination`", where="--eval", remedy=remedy)
    place = next((at for at, one in enumerate(stages) if one.kind in REMEMBERING), len(stages))
    added = StageSpec("contamination", {"files": tuple(files)}, "--eval")
    return (*stages[:place], added, *stages[place:])


def default_plan() -> Plan:
    """The plan without a list of the user."""
    return Plan(tuple(StageSpec(kind) for kind in DEFAULT))


def read_plan(path: Path) -> Plan:
    """The plan in a YAML file. Raises UserError with file and line."""
    check_regular(path)
    try:
        document = parse_document(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UserError(
            f"the file cannot be read ({error.strerror})", where=str(path), remedy="check the path and its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError("the file is not UTF-8 text", where=str(path), remedy="convert the file to UTF-8") from error
    for key in document.data:
        if key not in ("stages", "columns"):
            near = nearest(key, ("stages", "columns"), count=1)
            remedy = f"did you mean {near[0]}?" if near else "use only the keys stages and columns"
            raise UserError(f"there is no key `{key}`", where=document.where(key), remedy=remedy)
    return Plan(_stages(document), _columns(document))


def _stages(document: Document) -> tuple[StageSpec, ...]:
    entries = document.data.get("stages")
    if not isinstance(entries, list) or not entries:
        remedy = "write, for example, stages: [schema, exact_duplicates]"
        raise UserError("`stages` must be a list of at least one stage", where=document.where("stages"), remedy=remedy)
    specs = []
    for index, entry in enumerate(entries):
        where = document.where(f"stages.{index}")
        if isinstance(entry, str):
            specs.append(StageSpec(entry, {}, where))
            continue
        is_entry = (
            isinstance(entry, dict) and isinstance(entry.get("kind"), str) and not set(entry) - {"kind", "options"}
        )
        if not is_entry or not isinstance(entry.get("options") or {}, dict):
            remedy = "write the name of a stage, or, for example, {kind: near_duplicates, options: {threshold: 0.8}}"
            raise UserError("the entry is not a valid stage", where=where, remedy=remedy)
        specs.append(StageSpec(entry["kind"], entry.get("options") or {}, where))
    return tuple(specs)


def _columns(document: Document) -> Mapping[str, str | None]:
    columns = document.data.get("columns") or {}
    if not isinstance(columns, dict) or not all(isinstance(name, str | None) for name in columns.values()):
        where = document.where("columns")
        raise UserError(
            "`columns` must map roles to column names",
            where=where,
            remedy="write, for example, columns: {prompt: task, answer: label}",
        )
    return columns


def make_stages(specs: Sequence[StageSpec]) -> list[Stage[Any]]:
    """The stages of a plan, with checked options. Raises UserError."""
    return [_make(spec) for spec in specs]


def _make(spec: StageSpec) -> Stage[Any]:
    if spec.kind in STAGES:
        module = importlib.import_module(f"controller.preflight.dataset.stages.{spec.kind}")
        return _with_options(getattr(module, STAGES[spec.kind]), spec)
    if not is_import_path(spec.kind):
        near = nearest(spec.kind, STAGES, count=1)
        remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(STAGES)}, or module:NAME"
        raise UserError(f"there is no stage `{spec.kind}`", where=spec.where, remedy=remedy)
    found = import_object(spec.kind, spec.where or spec.kind)
    if isinstance(found, type) and issubclass(found, RowStage | SetStage):
        return _with_options(found, spec)
    if not callable(found) or isinstance(found, type):
        remedy = "specify a function of a row, or a subclass of RowStage or SetStage"
        raise UserError(f"{spec.kind} is not a stage", where=spec.where, remedy=remedy)
    return UserFunction(spec.kind, found, spec.options)


def _with_options(kind: type[Stage[Any]], spec: StageSpec) -> Stage[Any]:
    try:
        return kind(kind.Options.model_validate(dict(spec.options)))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        what, remedy = f"{spec.kind}: " + (f"{name}: " if name else "") + first["msg"].removeprefix("Value error, "), ""
        if first["type"] == "extra_forbidden":
            known = kind.Options.model_fields
            near = nearest(name, known, count=1)
            what = f"{spec.kind} has no option `{name}`"
            remedy = f"did you mean {near[0]}?" if near else f"its options are: {', '.join(known) or 'none'}"
        raise UserError(what, where=spec.where, remedy=remedy) from error
