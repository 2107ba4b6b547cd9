"""Rows as the recipes for programs read them, before the scorer that judges them: references pass, others do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from code_harness import CodeBench

from controller.config.loading import load_config
from controller.data.table import Table, load_eval, load_train

pytestmark = pytest.mark.processes


def table(name: str, part: str, path: Path) -> Table:
    config = load_config(name, [f"data.{part}.path={path}", f"data.{part}.limit=6"]).config
    found = load_train(config) if part == "train" else load_eval(config)
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "part"), [("code_8b_8gpu", "train"), ("code_tiny", "train"), ("code_tiny", "eval")])
def test_mbpp_through_the_recipe(bench: CodeBench, published: Callable[[str], Path], name: str, part: str) -> None:
    for row in table(name, part, published("code/mbpp_nontest.jsonl")):
        assert row["test_list"][0] in row["prompt"]  # it tells the function's name
        outcome = bench.answer(row, f"Here it is:\n```python\n{row['code']}\n```\n")
        assert outcome.value == 1.0, outcome.reason
        assert bench.answer(row, "def f(): return 3").value == 0.0


def test_humaneval_through_the_recipe(bench: CodeBench, published: Callable[[str], Path]) -> None:
    for row in table("code_8b_8gpu", "eval", published("code/humaneval.jsonl")):
        whole = f"```python\n{row['prompt']}{row['canonical_solution']}\n```"
        assert bench.answer(row, whole).value == 1.0, row["task_id"]
        assert bench.answer(row, row["canonical_solution"]).value == 1.0, row["task_id"]
        assert bench.answer(row, "    return None\n").value == 0.0, row["task_id"]
