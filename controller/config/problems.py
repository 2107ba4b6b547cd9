"""Problems of a config, one line each: key, error, nearest valid key or value, location.

Translates pydantic's errors and finds "did you mean" suggestions. Cross-checks are in validation/.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic

from areal_like.errors import UserError
from areal_like.settings import Settings
from controller.config.earlier_versions import REMOVED
from controller.config.foreign_keys import equivalent_of, leaves_of
from controller.config.schema import (
    allows_null,
    describe,
    field_at,
    is_list,
    knobs,
    mapped_section,
    meaning_at,
    section_of,
)

_REMEDIES: Mapping[str, str] = {
    "sampling.temperature": "temperature 0 is only allowed for evaluation (eval.temperature)",
    "sampling.stop_token_ids": "use token ids of the tokenizer, from 0 to 2147483647",
    "staleness.max_staleness": "use 0 for synchronous RL, or `unbounded` for no bound",
    "rollout.threads": "auto",
    "trainer.threads": "auto",
    "warm_start.sft.threads": "auto",
}
"""Remedies for numbers out of bounds, if the bounds alone are not a sufficient explanation."""
_BOUND_WORDS = (("gt", "greater than"), ("ge", "at least"), ("lt", "less than"), ("le", "at most"))


@dataclass(frozen=True)
class Problem:
    """One problem. `keys` are the dotted paths it concerns; the message names the first."""

    keys: tuple[str, ...]
    what: str
    remedy: str = ""
    where: str = ""

    def placed(self, place: Callable[[str], str]) -> Problem:
        """Return a copy with `where` looked up from its first key."""
        return self if self.where or not self.keys else Problem(self.keys, self.what, self.remedy, place(self.keys[0]))

    def __str__(self) -> str:
        parts = [part for part in (self.where, self.keys[0] if self.keys else "") if part]
        return ": ".join([*parts, self.what]) + (f" -> {self.remedy}" if self.remedy else "")


class ConfigError(UserError):
    """All problems of one config, one per line."""

    def __init__(self, problems: Sequence[Problem], source: str) -> None:
        self.problems = tuple(problems)
        assert problems
        super().__init__("\n".join(map(str, problems)))
        self.source = source


def nearest(word: str, candidates: Iterable[str], count: int = 3, cutoff: float = 0.6) -> list[str]:
    """The candidates most similar to `word`, best first, ignoring case."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    return [by_lower[near] for near in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=cutoff)]


def suggest_keys(root: type[Settings], path: str) -> list[str]:
    """Full paths of the valid keys nearest to an invalid one: same section first, then the same word elsewhere."""
    parent, _, leaf = path.rpartition(".")
    shape = ".".join("[]" if part.isdigit() else part for part in parent.split(".")) if parent else ""
    known = {knob.path: knob for knob in knobs(root)}
    here = [knob.leaf for knob in known.values() if knob.path.rpartition(".")[0] == shape]
    mapping = field_at(root, tuple(parent.split(".")[:-1]))
    if mapping is not None and (section := mapped_section(mapping.annotation)) is not None:
        here = list(section.model_fields)
    prefix = f"{parent}." if parent else ""
    found = [f"{prefix}{near}" for near in nearest(leaf, here, count=2, cutoff=0.7)]
    elsewhere = sorted((p for p, knob in known.items() if knob.leaf == leaf), key=lambda p: -_overlap(p, path))
    found += [p.replace(".[].", ".0.") for p in elsewhere]
    if parent and elsewhere and elsewhere[0].partition(".")[0] != path.partition(".")[0]:
        found += nearest(path, known, count=1, cutoff=0.75)
    if not found:  # at the top, where most foreign keys are typed, a half of the letters is no likeness
        found = [f"{prefix}{near}" for near in nearest(leaf, here, count=2, cutoff=0.5 if parent else 0.7)]
        leaves: dict[str, list[str]] = {}
        for p, knob in known.items():
            leaves.setdefault(knob.leaf, []).append(p)
        found += [p for near in nearest(leaf, leaves, count=2, cutoff=0.75) for p in leaves[near]]
        found += nearest(path, known, count=1, cutoff=0.75)
    return list(dict.fromkeys(found))[:3]


def _overlap(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


def show(value: Any) -> str:
    """A value as the user wrote it, shortened."""
    text = {None: "null", True: "true", False: "false"}.get(value) if value is None or isinstance(value, bool) else None
    text = text or (f"`{value}`" if isinstance(value, str) else str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def translate(error: pydantic.ValidationError, root: type[Settings]) -> list[Problem]:
    """Convert pydantic's errors to problems, one per key."""
    by_path: dict[str, list[Any]] = {}
    for item in error.errors(include_url=False):
        by_path.setdefault(".".join(map(str, config_path(root, item["loc"]))), []).append(item)
    for path, items in list(by_path.items()):  # a list with a wrong entry is also reported as too short
        if items[0]["type"] == "too_short" and any(other.startswith(f"{path}.") for other in by_path):
            del by_path[path]
    problems: list[Problem] = []
    for path, items in by_path.items():
        if items[0]["type"] == "extra_forbidden":
            problems += _unknown_keys(root, path, items[0].get("input"))
        else:
            problems.append(_problem_at(root, path, items))
    return problems


def _unknown_keys(root: type[Settings], path: str, value: Any) -> list[Problem]:
    """Problems of an unknown key; for an unknown section, one for each key below it that is known elsewhere."""
    found = [remedy for leaf in leaves_of(path, value) if (remedy := _known_elsewhere(root, leaf)).what]
    if found:
        return found
    if path in REMOVED:
        return [Problem((path,), "no such key", REMOVED[path])]
    near = suggest_keys(root, path)
    return [Problem((path,), "no such key", f"did you mean {' or '.join(near)}?" if near else _keys_here(root, path))]


def _known_elsewhere(root: type[Settings], path: str) -> Problem:
    """Suggestion for a key of another system, or one of our keys in an unknown section; `what` is empty for other
    keys.
    """
    if (known := equivalent_of(path)) is not None:
        note = f" ({known.note})" if known.note else ""
        return Problem((path,), "no such key", f"did you mean {' or '.join(known.keys)}?{note}")
    section, _, leaf = path.rpartition(".")
    if section.partition(".")[0] in root.model_fields or not section:
        return Problem((path,), "")
    keys = [knob.path for knob in knobs(root) if knob.leaf == leaf]
    whole = [key for key in keys if path.endswith(f".{key}")]
    ours = [max(whole, key=len)] if whole else sorted(keys, key=lambda p: -_overlap(p, path))[:2]
    return Problem((path,), "no such key" if ours else "", f"did you mean {' or '.join(ours)}?")


def config_path(root: type[Settings], loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The keys of a pydantic location, without the names of union members that pydantic mixes in."""
    current: type[Settings] | None = root
    is_inside_free_mapping = False
    path: list[str | int] = []
    for part in loc:
        if isinstance(part, int) or is_inside_free_mapping:
            path.append(part)
        elif current is not None:
            path.append(part)
            field = current.model_fields.get(part)
            annotation = field.annotation if field else None
            current = section_of(annotation)
            is_inside_free_mapping = current is None and "mapping" in describe(annotation)
    return tuple(path)


def _problem_at(root: type[Settings], path: str, items: list[Any]) -> Problem:
    first = items[0]
    value = first.get("input")
    field = field_at(root, tuple(path.split("."))) if path else None
    kind = first["type"]
    if kind == "missing":
        meaning = meaning_at(root, tuple(path.split(".")))
        return Problem((path,), "this key is required", f"set this key: {meaning}" if meaning else "set this key")
    if any(item["type"] == "finite_number" for item in items):
        return Problem((path,), f"the value must be a finite number, not {show(value)}")
    if fault := _out_of_bounds(items):
        return Problem((path,), fault, _REMEDIES.get(path.rpartition(".")[0] if path[-1:].isdigit() else path, ""))
    if kind in ("model_type", "model_attributes_type", "dict_type", "dict_attributes_type"):
        return Problem(
            (path,), f"the value must be a section (a mapping of keys to values), not {show(value)}", _keys_below(field)
        )
    if kind == "value_error" and field is not None and section_of(field.annotation) is not None:
        return Problem((path,), str(first["msg"]).removeprefix("Value error, "))
    if field is not None and field.annotation is not None:
        near = nearest(str(value), _choices(field.annotation), count=1) if isinstance(value, str) else []
        wanted = _with_article(describe(field.annotation))
        if is_list(field.annotation) and path.rpartition(".")[2].isdigit():
            wanted = wanted.removeprefix("list of ")
        if kind == "too_short":
            return Problem((path,), "the value must have at least one entry")
        return Problem(
            (path,), f"the value must be {wanted}, not {show(value)}", f"did you mean `{near[0]}`?" if near else ""
        )
    return Problem((path,) if path else (), " ".join(str(first["msg"]).split()))


def _out_of_bounds(items: list[Any]) -> str:
    """Text for a number that violates a bound, also if the key accepts a word instead."""
    for item in items:
        for name, words in _BOUND_WORDS:
            bound = item.get("ctx", {}).get(name)
            if bound is not None:
                number = f"{bound:,.0f}" if abs(bound) >= 10_000 else f"{bound:g}"
                return f"the value must be {words} {number}, not {show(item['input'])}"
    return ""


def booleans_for_numbers(root: type[Settings], data: Any, prefix: str = "") -> list[Problem]:
    """Problems of `true` for a number: pydantic would accept it as 1."""
    problems = []
    for key, value in data.items() if isinstance(data, Mapping) else ():
        field = root.model_fields.get(key)
        section = section_of(field.annotation) if field else None
        if field is not None and isinstance(value, bool) and "number" in (kind := describe(field.annotation)):
            problems.append(Problem((f"{prefix}{key}",), f"the value must be {_with_article(kind)}, not {show(value)}"))
        elif section is not None and isinstance(value, Mapping):
            problems += booleans_for_numbers(section, value, f"{prefix}{key}.")
    return problems


def _with_article(kind: str) -> str:
    for word in ("whole number", "number", "mapping", "list", "section"):
        if kind.startswith(word):
            return f"a {kind}"
    return f"one of {kind}" if " | " in kind else kind


def _choices(annotation: Any) -> list[str]:
    return [word for word in describe(annotation).replace("`", "").split(" | ") if " " not in word]


def _keys_here(root: type[Settings], path: str) -> str:
    parent = path.rpartition(".")[0]
    section: type[Settings] | None = root
    if parent:
        field = field_at(root, tuple(parent.split(".")))
        section = section_of(field.annotation) if field else None
    return f"valid keys here: {', '.join(section.model_fields)}" if section else "remove this key"


def _keys_below(field: Any) -> str:
    section = section_of(field.annotation) if field is not None else None
    if section is None:
        return ""
    extra = ", or null" if allows_null(field.annotation) else ""
    return f"valid keys: {', '.join(section.model_fields)}{extra}"
