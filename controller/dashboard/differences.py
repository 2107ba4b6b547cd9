"""Settings that differ between selected runs of the list. Only the settings of these runs are read.

Differences are computed in report/compare.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from controller.dashboard.run_list import find_run
from controller.report.compare import Side, config_rows
from controller.report.data import RunData, read_settings
from controller.report.overview import text

MAX_RUNS = 12


def differences(runs_dir: Path, names: Sequence[str]) -> dict[str, Any]:
    """Rows of the keys that differ, a cell per run. Raises UserError for fewer than two runs, too many, or an unknown
    one.
    """
    chosen = list(dict.fromkeys(names))
    if not 2 <= len(chosen) <= MAX_RUNS:
        raise UserError(
            f"the number of selected runs is {len(chosen)}",
            where="differences",
            remedy=f"select 2 to {MAX_RUNS} runs in the list",
        )
    problems: list[str] = []
    sides = []
    for place, name in enumerate(chosen):
        folder, found = find_run(runs_dir, name), list[str]()
        settings = read_settings(folder, found)
        problems += [f"{text(name, 120)}: {text(problem)}" for problem in found]
        sides.append(Side(text(name, 120), RunData(folder, {}, settings, None, None), place))
    rows = config_rows(sides)
    return {
        "runs": [{"name": name, "label": side.label} for name, side in zip(chosen, sides, strict=True)],
        "rows": [{"key": row.label, "cells": list(row.cells)} for row in rows],
        "problems": problems,
    }
