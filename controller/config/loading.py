"""Loads a RunConfig from a file name and `key.path=value` arguments, or reports every problem at once.

Finds the file, applies overrides and collects problems. The YAML dialect is in yaml_document.py, the checks of
combinations in validation/run.py.

An override wins over the file, also over settings of the file that exclude it: `model.path=...` on a config with
`model.init` replaces the init, `data.train.path=...` replaces a generator, `mode=sync` replaces the file's staleness
bound, `data.eval=null` its `eval.every_steps`, `rollout.engine.kind=...` the section of another engine with the same
keys. Each such replacement is noted. Two overrides, or two keys of the file,
that contradict each other are rejected.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pydantic

from areal_like.encryption.files import read_text
from areal_like.encryption.run_key import encrypted_root
from areal_like.errors import UserError
from areal_like.regular_file import check_regular
from areal_like.settings import Settings
from areal_like.staleness import MODE_STALENESS
from controller.config.engines import REGISTERED, section_keys
from controller.config.problems import ConfigError, Problem, booleans_for_numbers, nearest, translate
from controller.config.run_config import RunConfig
from controller.config.schema import allows_null, is_list, section_of
from controller.config.validation.run import cross_check, unknown_kinds
from controller.config.yaml_document import Document, parse_document, parse_value

SHIPPED = Path(__file__).resolve().parents[2] / "configs"
"""Folder of the shipped configs (next to the packages both in a checkout and in a wheel)."""

OFFLINE = Path("offline")
"""Its subfolder with the configs of runs from files."""
MAX_CONFIG_BYTES = 4 << 20
"""Maximum size of a config file, far above any real one. A larger file was named by mistake."""
_SOURCE_KINDS = ("path", "dataset", "generator")
_SOURCES = ("data.train", "data.eval", "warm_start.data")


Config = TypeVar("Config", bound=Settings)


@dataclass(frozen=True)
class Loaded(Generic[Config]):
    """A validated config, its source, and the replacements made by overrides."""

    config: Config
    document: Document
    notes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The file's path."""
        return self.document.source


LoadedConfig = Loaded[RunConfig]
"""A loaded config of a run with rollouts."""


def load_config(name: str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a configuration, apply overrides, build and validate it.

    Args:
        name: path of a YAML file, name of a shipped config, or a run's folder.
        overrides: `key.path=value`, as on the command line.

    Returns:
        The configuration, with the source of each value.

    Raises:
        ConfigError: the configuration has problems; it carries all of them.
        UserError: there is no such file, or it is not YAML.

    Example:
        >>> load_config("quickstart", ["num_steps=40"]).config.num_steps
        40
    """
    return check_document(read_document(name), overrides)


def read_document(name: str) -> Document:
    """Read the YAML of the file that `name` refers to (see `load_config`). Raises UserError."""
    path = find_config(name)
    document = parse_document(_read(path), _short(path))
    if path.resolve().is_relative_to(SHIPPED):
        _place_shipped_rows(document.data)
    return document


def _place_shipped_rows(section: dict[str, Any]) -> None:
    """Make the paths of rows in shipped configs absolute. They are relative to the checkout, and the current folder may
    be another.
    """
    for key, value in section.items():
        if isinstance(value, dict):
            _place_shipped_rows(value)
        elif isinstance(value, str) and value.startswith(f"{SHIPPED.name}/"):
            shipped = SHIPPED.parent / value
            if shipped.is_file() and not Path(value).exists():
                section[key] = str(shipped)


def check_document(document: Document, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Validate a configuration that was already read; the overrides are set in `document`. Raises UserError."""
    return checked(document, overrides, build)


def checked(
    document: Document,
    overrides: Sequence[str],
    build: Callable[[Mapping[str, Any]], tuple[Config | None, list[Problem]]],
) -> Loaded[Config]:
    """Set the overrides in `document` and build its config. Raises ConfigError with every problem, UserError."""
    notes, problems = apply_overrides(document, overrides)
    config, more = build(document.data)
    more.sort(key=lambda problem: document.line(problem.keys[0]) or 0 if problem.keys else 0)
    problems += [problem.placed(document.where) for problem in more]
    if problems or config is None:
        raise ConfigError(problems, document.source)
    return Loaded(config, document, tuple(notes))


def build(data: Mapping[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    """Build a RunConfig, or None, with all problems: of single keys and, as far as can be determined, of their
    combination.
    """
    data = without_empty_sections(RunConfig, data)
    try:
        config = RunConfig.model_validate(data)
    except pydantic.ValidationError as error:
        problems = translate(error, RunConfig) + booleans_for_numbers(RunConfig, data)
        return None, problems + _checks_despite(data, problems)
    problems = booleans_for_numbers(RunConfig, data) or _unknown_kinds(config, data) or cross_check(config)
    return (None if problems else config), problems


def _unknown_kinds(config: RunConfig, data: Mapping[str, Any]) -> list[Problem]:
    """Problems of unknown implementations, with the other problems as far as they can be determined without them."""
    unknown = unknown_kinds(config)
    return unknown + _checks_despite(data, unknown) if unknown else []


def _checks_despite(data: Mapping[str, Any], problems: Sequence[Problem]) -> list[Problem]:
    """Cross-checks of a config whose invalid keys are left at their defaults, without problems of the invalid keys."""
    wrong = {problem.keys[0] for problem in problems if problem.keys}
    rest = copy.deepcopy(dict(data))
    for path in wrong:
        _remove(rest, path.split("."))
    try:
        config = RunConfig.model_validate(without_empty_sections(RunConfig, rest))
    except pydantic.ValidationError:
        return []
    return [problem for problem in cross_check(config) if not wrong & set(problem.keys)]


def without_empty_sections(root: type[Settings], data: Mapping[str, Any]) -> dict[str, Any]:
    """Replace empty sections by their defaults: `trainer:` with nothing below it."""
    kept: dict[str, Any] = {}
    for key, value in data.items():
        field = root.model_fields.get(key)
        section = section_of(field.annotation) if field is not None else None
        if field is not None and section is not None and not is_list(field.annotation):
            if value is None and not allows_null(field.annotation):
                continue
            if isinstance(value, Mapping):
                value = without_empty_sections(section, value)
        kept[key] = value
    return kept


# ---------------------------------------------------------------- files


def find_config(name: str) -> Path:
    """Find the file for a path, a run's folder, or the name of a shipped config. Raises UserError."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if (path / "config.yaml").is_file():
            return path / "config.yaml"
        raise UserError("the folder contains no config.yaml", where=name, remedy=_shipped_text(name))
    for folder in (Path(), OFFLINE):
        for candidate in (SHIPPED / folder / path.name, SHIPPED / folder / f"{path.name}.yaml"):
            if path.parent in (folder, Path("configs") / folder) and candidate.is_file():
                return candidate
    raise UserError("there is no such config file", where=name, remedy=_shipped_text(name, path))


def _short(path: Path) -> str:
    resolved = path.resolve()
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(path)


def shipped_configs() -> list[str]:
    """Names of the configs that come with this installation."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def shipped_offline_configs() -> list[str]:
    """Names of the shipped configs that train from files."""
    return sorted(f"{OFFLINE}/{path.stem}" for path in (SHIPPED / OFFLINE).glob("*.yaml"))


def _shipped_text(name: str, path: Path | None = None) -> str:
    shipped = shipped_configs() + shipped_offline_configs()
    text = f"shipped configs: {', '.join(shipped)}" if shipped else "specify a YAML file"
    if path is None:
        return text
    siblings = [file.name for pattern in ("*.yaml", "*.yml") for file in path.parent.glob(pattern)]
    near = [str(path.parent / file) for file in nearest(path.name, siblings, count=1)] or nearest(
        path.stem, shipped, count=1
    )
    return f"did you mean {near[0]}? {text}" if near else text


def _read(path: Path) -> str:
    check_regular(path, max_bytes=MAX_CONFIG_BYTES)
    try:
        return path.read_text(encoding="utf-8-sig") if encrypted_root(path) is None else read_text(path)
    except OSError as error:
        raise UserError(f"the file cannot be read ({error.strerror})", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise UserError(
            "the file is not UTF-8 text", where=str(path), remedy="save the config as UTF-8 text in YAML format"
        ) from error


# ---------------------------------------------------------------- overrides


def apply_overrides(document: Document, overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Set each `key.path=value` in the document. Returns notes on what was replaced, and problems."""
    parsed: dict[str, Any] = {}
    problems: list[Problem] = []
    for text in overrides:
        key, sign, value = text.partition("=")
        key = key.strip().removeprefix("--")
        if not sign or not key or not all(key.split(".")):
            problems.append(Problem((), f"`{text}` is not a valid override", "write key.path=value", "command line"))
            continue
        try:
            parsed[key] = parse_value(value)
        except UserError as error:
            problems.append(Problem((key,), error.what, error.remedy, "command line"))
    notes = _replace_alternatives(document, parsed)
    for key, value in parsed.items():
        fault = _set(document.data, key.split("."), value)
        if fault:
            problems.append(Problem((key,), fault, where="command line"))
        else:
            document.mark_override(key)
    return notes, problems


def _replace_alternatives(document: Document, parsed: Mapping[str, Any]) -> list[str]:
    """Remove from the file the settings that overrides replace; return notes on what was removed."""
    notes = []
    for given, other in (("path", "init"), ("init", "path")):
        key, old = f"model.{given}", f"model.{other}"
        if (
            any(k == key or k.startswith(f"{key}.") for k in parsed)
            and old not in parsed
            and parsed.get(key, 1) is not None
        ):
            replaced = _drop(document, old, f"{key} on the command line replaces {old}")
            if replaced and given == "path" and "model.tokenizer" not in parsed:  # the made model's own tokenizer
                replaced += _drop(document, "model.tokenizer", f"{key} on the command line replaces model.tokenizer")
            notes += replaced
    for source in _SOURCES:
        given_kinds = [kind for kind in _SOURCE_KINDS if parsed.get(f"{source}.{kind}") is not None]
        section = _get(document.data, source.split("."))
        if len(given_kinds) == 1 and isinstance(section, dict) and section.get(given_kinds[0]) is None:
            gone = [key for key in section if key != "limit"]
            for key in gone:
                _remove(document.data, f"{source}.{key}".split("."))
            if gone:
                notes.append(f"{source}.{given_kinds[0]} on the command line replaces {source}.{{{', '.join(gone)}}}")
    notes += _replace_engine(document, parsed.get("rollout.engine.kind"), parsed)
    mode = parsed.get("mode")
    if isinstance(mode, str) and mode in MODE_STALENESS and "staleness.max_staleness" not in parsed:
        old = _get(document.data, ["staleness", "max_staleness"])
        bound = MODE_STALENESS[mode]
        if old is not None and old != bound:
            notes += _drop(
                document,
                "staleness.max_staleness",
                f"mode={mode} sets staleness.max_staleness to {bound} instead of {old}",
            )
    has_sets = bool(_get(document.data, ["data", "eval_sets"])) or any(
        key.startswith("data.eval_sets") for key in parsed
    )
    is_eval_off = "data.eval" in parsed and parsed["data.eval"] is None and "eval.every_steps" not in parsed
    if is_eval_off and not has_sets and _get(document.data, ["eval", "every_steps"]):
        notes += _drop(
            document, "eval.every_steps", "data.eval=null disables evaluation, so eval.every_steps is set to 0"
        )
    if mode == "one_step_off" and "rollout.interruption" not in parsed:
        notes += _drop(document, "rollout.interruption", "mode=one_step_off sets rollout.interruption to drain")
    return notes


def _replace_engine(document: Document, kind: Any, parsed: Mapping[str, Any]) -> list[str]:
    """Use the section of the file's engine for the one of `kind`, if it has all of its keys; return notes. The
    interpreter is that of the file's engine, and is left out."""
    engine = _get(document.data, ["rollout", "engine"])
    in_file = engine.get("kind") if isinstance(engine, dict) else None
    if not isinstance(in_file, str) or not isinstance(kind, str) or kind not in REGISTERED:
        return []
    before, after = REGISTERED.get(in_file), REGISTERED[kind]
    if before is after:
        return []
    place, notes = "rollout.engine", list[str]()
    if f"{place}.python" not in parsed:
        notes += _drop(document, f"{place}.python", f"{place}.kind on the command line replaces {place}.python")
    old, new = "" if before is None else before.section, after.section
    given = engine.get(old) if old and old != new else None
    if not new or not isinstance(given, dict) or any(key.startswith(f"{place}.{old}") for key in parsed):
        return notes
    if not given.keys() <= section_keys(new):
        return notes  # reported as a section without effect
    notes += _drop(document, f"{place}.{old}", f"{place}.kind={kind}: {place}.{old} is used as {place}.{new}")
    engine[new] = {**given, **(engine.get(new) or {})}
    return notes


def _drop(document: Document, key: str, note: str) -> list[str]:
    return [note] if _remove(document.data, key.split(".")) is not None else []


def _get(data: Any, path: Sequence[str]) -> Any:
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def _remove(data: Any, path: Sequence[str]) -> Any:
    """Take a key out and return its value; None when it is not there."""
    for part in path[:-1]:
        if isinstance(data, list) and _is_index(part) and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, dict):
            data = data.get(part)
        else:
            return None
    return data.pop(path[-1], None) if isinstance(data, dict) else None


def _entries(data: Sequence[Any]) -> str:
    """Text on how the entries of a list are numbered."""
    if len(data) <= 1:
        return "the list is empty" if not data else "its only entry is 0"
    return f"its entries are 0 to {len(data) - 1}"


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) < 10


def _set(data: Any, path: Sequence[str], value: Any) -> str:
    """Set a key, adding sections on the way. Returns the error, or an empty text."""
    for depth, part in enumerate(path):
        is_last = depth == len(path) - 1
        if isinstance(data, list):
            if not _is_index(part) or int(part) >= len(data):
                return f"the list has no entry `{part}`; {_entries(data)}"
            if is_last:
                data[int(part)] = value
            else:
                data = data[int(part)]
        elif isinstance(data, dict):
            if is_last:
                data[part] = value
            else:
                if data.get(part) is None:
                    data[part] = {}
                data = data[part]
        else:
            return f"`{'.'.join(path[:depth])}` is {data!r} and has no key `{part}`"
    return ""
