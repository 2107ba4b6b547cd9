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
WARM_START = ("warm_start.sft.steps=600", "warm_start.sft.batch_size=32")
"""Fixed here: the figures do not depend on what the quickstart chooses."""


@dataclass(frozen=True)
class Task:
    """Running sums of digits (areal_like/tasks/running_sum.py). max_terms: of one sum; max_new: tokens of an answer;
    start_seed: of the starting model of all seeds; None: each seed has its own.
    """

    name: str
    max_terms: int
    max_new: int
    groups_per_step: int
    group_size: int = 8
    start_seed: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of the generator."""
        if self.max_terms < 10:
            return {"max_terms": self.max_terms, "pgeo": 0.4}
        return {"max_terms": self.max_terms, "pgeo": 0.25, "bias": 0.2, "noise": 0.05}

    @property
    def max_context(self) -> int:
        """Bound of prompt and answer, tokens."""
        return 2 * self.max_terms + self.max_new + 2


TASKS = {task.name: task for task in (Task("short", 6, 48, 16), Task("long", 12, 80, 16, start_seed=1000))}
"""`short`: sums of at most six terms. `long`: sums of up to twelve terms, with answers of up to 70 tokens in which
every step must be right, and fewer wrong demonstrations. On long sums the warm start of some seeds has not learned the
form of an answer after all its steps, so all seeds start from a model that has."""
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
    """A warm start on the sums of a task, as a Hugging Face folder; made once for each seed, or for the task."""
    seed = seed if task.start_seed is None else task.start_seed
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
