"""The files of a new job: a config made from the closest recipe, and a scorer with its test if the answers need one.

The questions are asked in init.py; `areal-like validate` checks the result.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.errors import UserError

ANSWER_KINDS: Mapping[str, str] = {
    "math": "a number or a formula, compared by value",
    "code": "a program, which is run with the tests of its row",
    "text": "a short text, which is compared by a generated function that you can edit",
}
HARDWARE: Mapping[str, str] = {
    "cpu": "two cores, no GPU", "1gpu": "one GPU, shared by engine and trainer", "8gpu": "one node of 8 GPUs",
    "64gpu": "a Ray cluster of eight nodes of 8 GPUs",
}  # fmt: skip
TRACKERS: Mapping[str, dict[str, Any]] = {
    "none": {}, "tensorboard": {"tensorboard": True}, "wandb": {"wandb": {}}, "mlflow": {"mlflow": {}},
    "trackio": {"trackio": {}}, "prometheus": {"prometheus": {}},
}  # fmt: skip
TINY = "tiny"
"""Answer to the question about the model: a small, randomly initialized one, to try data and reward on a CPU."""
_CODE = {"kind": "code", "options": {"time_limit_s": 4, "total_limit_s": 8}}


@dataclass(frozen=True)
class NewJob:
    """The target file and five answers. data: training rows, optionally a comma and held-out rows. model: hub name,
    folder, or `tiny`."""

    target: Path
    data: str
    answer: str
    model: str
    hardware: str
    tracker: str

    def files(self) -> dict[Path, str]:
        """Text of each file. A scorer is written to the current folder, where the commands look for modules. Paths in
        the config are also relative to that folder.

        Raises UserError: the answers contradict each other, or the name of the file cannot be the name of a run.
        """
        from controller.run_folder.run_folder import NAME_REMEDY, is_run_name  # see find_config below

        if not is_run_name(self.target.stem) or not str(self.target).isprintable():
            what = f"the run's folder would be named {self.target.stem!r}, which is not a valid folder name"
            raise UserError(what, where=repr(str(self.target)), remedy=f"choose a different file name; {NAME_REMEDY}")
        if self.model == TINY and self.hardware != "cpu":
            raise UserError(
                "the tiny model can only be used on a CPU",
                where="--model",
                remedy="use --hardware cpu, or choose a different model",
            )
        files = {self.target: self._config_text()}
        if self.answer == "text":
            name = self.target.name.replace("\\", "\\\\").replace('"', '\\"')
            files[Path(f"{self.module}.py")] = _SCORER.format(config=name)
            files[Path(f"test_{self.module}.py")] = _SCORER_TEST.format(module=self.module)
        return files

    @property
    def module(self) -> str:
        """Name of the scorer's module: the config's name, with characters that Python does not allow replaced."""
        words = re.sub(r"[^0-9A-Za-z_]", "_", self.target.stem)
        if not words.strip("_") or words[0].isdigit():
            words = f"job_{words.strip('_')}".rstrip("_")
        return f"{words}_reward"

    @property
    def notes(self) -> list[str]:
        """Sentences about choices that the user did not make."""
        found, wanted = [], f"{self.target.stem}_reward"
        if self.answer == "text" and self.module != wanted:
            found.append(f"the scorer is named {self.module}, because `{wanted}` cannot be the name of a Python module")
        if self.hardware == "64gpu":
            found.append(
                "on the cluster, runs_dir must be a folder that all nodes share, and rollout.engine.python the "
                "interpreter of SGLang's environment on each node"
            )
        return found

    @property
    def recipe(self) -> str:
        """Name of the shipped config that the new one is made from."""
        if self.hardware == "8gpu":
            return "code_8b_8gpu" if self.answer == "code" else "gsm8k_8b_8gpu"
        return {"cpu": "own_data", "1gpu": "gsm8k_1.7b_1gpu", "64gpu": "math_8b_64gpu"}[self.hardware]

    def _config_text(self) -> str:
        import yaml

        from controller.config.loading import find_config  # every command reads ANSWER_KINDS; most need no config

        config = yaml.safe_load(find_config(self.recipe).read_text())
        config |= {"name": self.target.stem, "data": self._data()}
        if "eval" not in config["data"]:
            config.pop("eval", None)
        config["reward"] = {**config["reward"], **self._reward()}
        if self.model != TINY:
            config["model"] = {"path": self.model, "dtype": config["model"].get("dtype", "float32")}
            if self.hardware == "cpu":
                config |= _CPU_SIZES
                config["rollout"] = {"engine": {"device": "cpu", "num_slots": 16, "max_context": 1024}}
        if metrics := TRACKERS[self.tracker]:
            config["metrics"] = metrics
        text = yaml.safe_dump(config, sort_keys=False, width=110)
        place = f" Start commands in the folder of {self.module}.py." if self.answer == "text" else ""
        return _HEADER.format(recipe=self.recipe, file=shlex.quote(str(self.target)), place=place) + text

    def _data(self) -> dict[str, Any]:
        places = [place.strip() for place in self.data.split(",")]
        if not all(places) or len(places) > 2:
            what = f"`{self.data}` does not specify one or two data files"
            raise UserError(what, where="--data", remedy="train.jsonl, or train.jsonl,heldout.jsonl")
        columns = {"columns": {"answer": None}} if self.answer == "code" else {}
        return {key: {"path": place, **columns} for key, place in zip(("train", "eval"), places, strict=False)}

    def _reward(self) -> dict[str, Any]:
        if self.answer == "text":
            return {"scorers": [{"kind": f"{self.module}:score"}]}
        if self.answer == "code":
            return {"scorers": [_CODE], "timeout_s": 60}
        return {"scorers": [{"kind": "math"}]}


_CPU_SIZES: dict[str, Any] = {
    "groups_per_step": 4,
    "sampling": {"temperature": 1.0, "max_new_tokens": 256},
    "trainer": {"device": "cpu", "micro_batch_tokens": 2048, "optimizer": {"lr": 1.0e-6, "warmup_steps": 2}},
}
_HEADER = """\
# Written by `areal-like init` from the recipe {recipe}. One row per line: {{"prompt": ..., "answer": ...}}; map other
# column names in data.train.columns. Sizes, learning rate and lengths are the recipe's: adjust them to your task.
#
# Paths are relative to the folder in which a command is started.{place}
#
#   areal-like validate {file}      errors, memory, hours
#   areal-like probe {file}         would the reward stay flat?
#   areal-like train {file}
"""
_SCORER = '''\
"""The reward of {config}: change it to suit your answers."""


def score(row, response, **info):
    """1.0 if the response is the row's `answer`, ignoring case and surrounding whitespace; otherwise 0.0."""
    return float(response.strip().casefold() == str(row["answer"]).strip().casefold())
'''
_SCORER_TEST = """\
from {module} import score


def test_right_answer_gets_the_reward():
    assert score({{"answer": "Paris"}}, " paris\\n") == 1.0


def test_another_answer_gets_none():
    assert score({{"answer": "Paris"}}, "Rome") == 0.0
"""
