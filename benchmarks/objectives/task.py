"""The tasks on which objectives are compared, and the starting model of a seed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from areal_like.tasks import running_sum
from benchmarks.folders import REPOSITORY
from benchmarks.runs import environment
from rollout.tokens import PromptTokens
from trainer.model.tokenizers import build_tokenizer

CONFIG = REPOSITORY / "configs" / "quickstart.yaml"
MODEL = ("model.init.hidden_size=64", "model.init.intermediate_size=192", "model.init.head_dim=16")
"""Half as wide as the quickstart's, so that a curve takes half a minute."""
WARM_START = ("warm_start.sft.steps=600", "warm_start.sft.batch_size=64")
"""Fixed here: the figures do not depend on what the quickstart chooses."""


@dataclass(frozen=True)
class Task:
    """Running sums of digits (areal_like/tasks/running_sum.py). max_terms: of one sum; max_new: tokens of an answer."""

    name: str
    max_terms: int
    max_new: int
    groups_per_step: int
    group_size: int = 8

    @property
    def options(self) -> dict[str, Any]:
        """Options of the generator."""
        return {"max_terms": self.max_terms, "pgeo": 0.4 if self.max_terms < 10 else 0.1}

    @property
    def max_context(self) -> int:
        """Bound of prompt and answer, tokens."""
        return 2 * self.max_terms + self.max_new + 2


TASKS = {task.name: task for task in (Task("short", 6, 48, 16), Task("long", 16, 112, 12))}
"""`short`: sums of at most six terms. `long`: sums of up to sixteen terms, with answers of up to 100
tokens in which every step must be right."""
SMALLEST = Task("smallest", 3, 20, 4, 4)
"""For tests and `--quick`."""


class Rows:
    """The prompts of a task as tokens, and what an answer is worth."""

    def __init__(self, task: Task, seed: int) -> None:
        self.tokenizer = build_tokenizer("characters:running_sum", None)
        self._tokens = PromptTokens(self.tokenizer, template=None, add_bos="auto", max_context=task.max_context)
        self._train = running_sum.rows(seed, "train", options=task.options)
        self._task, self._seed = task, seed

    def train(self, count: int) -> list[dict[str, Any]]:
        """The next rows to train on."""
        return list(islice(self._train, count))

    def held_out(self, count: int) -> list[dict[str, Any]]:
        """Rows to evaluate on, the same at every call."""
        rows: Iterator[dict[str, Any]] = running_sum.rows(self._seed, "eval", limit=count, options=self._task.options)
        return list(rows)

    def prompt(self, row: dict[str, Any]) -> np.ndarray:
        """int32 tokens of the prompt."""
        return self._tokens.prompt(row)

    def is_right(self, row: dict[str, Any], answer: np.ndarray, finish_reason: str) -> bool:
        """Whether the sampled tokens are a correct answer."""
        text = self.tokenizer.decode(answer.tolist(), skip_special_tokens=True)
        return running_sum.is_correct(row, text, finish_reason)


def starting_model(task: Task, seed: int, runs_dir: Path, overrides: tuple[str, ...] = ()) -> Path:
    """A warm start on the sums of a task, as a Hugging Face folder; made once for each seed."""
    folder = runs_dir / f"objectives-start-{task.name}-{seed}"
    if not (folder / "config.json").is_file():
        options = [f"warm_start.data.options.{key}={value}" for key, value in task.options.items()]
        command = [
            sys.executable, "-P", "-m", "controller", "sft", str(CONFIG), f"seed={seed}", f"out={folder}",
            f"runs_dir={runs_dir}", *MODEL, *WARM_START, *options, *overrides,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return folder
