"""The page of losses names each of them, and each of its lines is a configuration that can be run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.config.loading import load_config
from trainer.objectives.registry import ADVANTAGES, CORRECTIONS, OBJECTIVES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text()
ROWS = [line for line in PAGE.splitlines() if re.search(r"`(loss|advantage): \{", line)]


def _overrides(row: str) -> list[str]:
    """`loss: {kind: gspo}` as trainer.loss.kind=gspo; all lines of a row together."""
    found = []
    for code in re.findall(r"`((?:loss|advantage|critic|teacher|version_logprobs): \{[^`]*\})`", row):
        ((section, keys),) = yaml.safe_load(code).items()
        if not keys:
            found.append(f"trainer.{section}={{}}")
        for key, value in keys.items():
            inner: dict[str, Any] = value if isinstance(value, dict) and key != "options" else {"": value}
            for name, one in inner.items():
                path = ".".join(part for part in ("trainer", section, key, name) if part)
                found.append(f"{path}={yaml.safe_dump(one, default_flow_style=True, width=1000).split(chr(10))[0]}")
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("`")[1])
def test_every_line_of_configuration_is_valid(row: str) -> None:
    overrides = _overrides(row)
    assert overrides
    load_config("quickstart", overrides)


@pytest.mark.parametrize("table", [OBJECTIVES, CORRECTIONS, ADVANTAGES], ids=["losses", "corrections", "advantages"])
def test_every_built_in_kind_has_a_row(table: dict[str, object]) -> None:
    assert not [
        name for name in table if not any(row.startswith("|") and f"`{name}`" in row.split("|")[1] for row in ROWS)
    ]


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_examples_are_valid(block: str) -> None:
    whole = yaml.safe_load(block)
    sections = whole.pop("trainer", {})
    dumped = {
        f"trainer.{section}.{key}".rstrip("."): yaml.safe_dump(value, default_flow_style=True, width=1000).split("\n")[
            0
        ]
        for section, keys in sections.items()
        for key, value in (keys.items() if isinstance(keys, dict) else [("", keys)])
    }
    dumped |= {
        f"rollout.{key}": yaml.safe_dump(value, default_flow_style=True, width=1000).split("\n")[0]
        for key, value in whole.pop("rollout", {}).items()
    }
    dumped |= {
        key: yaml.safe_dump(value, default_flow_style=True, width=1000).split("\n")[0] for key, value in whole.items()
    }
    load_config("quickstart", [f"{key}={value}" for key, value in dumped.items()])
