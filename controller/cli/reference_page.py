"""docs/reference.md: every key of a config, generated from the schema and its docstrings. `areal-like reference` prints
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areal_like.settings import Settings
from controller.config.offline_config import OfflineConfig
from controller.config.run_config import RunConfig
from controller.config.schema import Knob, knobs

_INTRO = """\
# Reference: every key of a config

Generated from the schema by `areal-like reference > docs/reference.md`; do not edit.

A config is YAML. On the command line `key.path=value` overrides one key; entries of lists are numbered from 0
(`reward.scorers.0.weight=0.5`). A number may be written `1e-4`. `null` means "none". Unknown keys are rejected.
`areal-like validate CONFIG` prints a config with every key filled in and the numbers that follow from it.

Commands that take a CONFIG, which may be followed by overrides: `areal-like train`, `validate`, `probe`, `sft`, `dpo`,
`reward-model`, `eval`. Those that take a RUN: `resume`, `status`, `logs`, `stop`, `drain`, `add`, `checkpoint`,
`export`, `samples`, `report`, `compare`. Those that take neither: `init`, `ps`, `import`, `decrypt`, `doctor`,
`reference`.
`areal-like COMMAND --help` explains each. `sft`, `dpo`, `reward-model` and `validate` take a config that trains from
files: its keys are at the end.
"""


_OFFLINE_INTRO = """\
## Keys of a config that trains from files

Keys of the configs of `areal-like sft`, `dpo` and `reward-model`, in which `data.train` is a file ([Training from
files](offline.md)).
"""


def reference_page() -> str:
    """Render the page, ending in a newline."""
    parts = [_INTRO]
    for path, section in _sections(RunConfig):
        title = f"`{path}`" if path else "Top level"
        parts.append(_section_text(title, section, _keys_of(RunConfig, path)))
    derived = [
        (name, item.fget)
        for name, item in vars(RunConfig).items()
        if isinstance(item, property) and not name.startswith("_")
    ]
    lines = [f"| `{name}` | {' '.join((fget.__doc__ or '').split())} |" for name, fget in derived if fget]
    parts.append("## Derived numbers\n\n| Name | Formula |\n|---|---|\n" + "\n".join(lines) + "\n")
    return "\n".join([*parts, _OFFLINE_INTRO, *_offline_parts()])


def _offline_parts() -> Iterator[str]:
    """The sections of a run from files. Of sections shared with other runs only the title is given."""
    same = dict(_sections(RunConfig))
    shared: dict[type[Settings], str] = {}
    for path, section in same.items():
        shared.setdefault(section, path)
    for path, section in _sections(OfflineConfig):
        title = f"Training from files: `{path}`" if path else "Training from files"
        if section in shared:
            yield f"## {title}\n\nThe same keys as in `{path if same.get(path) is section else shared[section]}`.\n"
        else:
            yield _section_text(title, section, _keys_of(OfflineConfig, path))


def _section_text(title: str, section: type[Settings], keys: list[Knob]) -> str:
    doc = " ".join((section.__doc__ or "").split())
    return f"## {title}\n\n{doc}\n\n{_table(keys)}"


def _keys_of(root: type[Settings], path: str) -> list[Knob]:
    return [knob for knob in knobs(root) if _parent(knob) == path]


def _sections(root: type[Settings]) -> list[tuple[str, type[Settings]]]:
    below = [(f"{knob.path}.[]" if _is_list_section(knob) else knob.path, knob.section) for knob in knobs(root)]
    return [("", root), *((path, section) for path, section in below if section is not None)]


def _is_list_section(knob: Knob) -> bool:
    return knob.section is not None and knob.kind.startswith("list")


def _parent(knob: Knob) -> str:
    return knob.path.rpartition(".")[0]


def _table(rows: list[Knob]) -> str:
    lines = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    for knob in rows:
        kind = knob.kind.replace(" | ", ", ") + (f"; {knob.bounds}" if knob.bounds else "")
        lines.append(f"| `{knob.leaf}` | {_cell(kind)} | {_cell(_default(knob))} | {_cell(knob.meaning)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(knob: Knob) -> str:
    if knob.is_required:
        return "required"
    if isinstance(knob.default, Settings):
        changed = {
            name: value
            for name, value in knob.default.model_dump(mode="json").items()
            if name in knob.default.model_fields_set
        }
        return f"`{_flow(changed)}`" if changed else "see below"
    if isinstance(knob.default, tuple) and any(isinstance(item, Settings) for item in knob.default):
        return f"`[{', '.join(_flow(item.model_dump(mode='json', exclude_unset=True)) for item in knob.default)}]`"
    return f"`{_flow(list(knob.default) if isinstance(knob.default, tuple) else knob.default)}`"


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
