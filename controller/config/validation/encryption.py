"""Cross-checks of `encryption`: settings that would store content of the run in the clear. Pure, like run.py.

What is encrypted is described in docs/encryption.md. A setting is refused here until what it writes is encrypted too.
"""

from __future__ import annotations

from collections.abc import Iterator

from controller.config.launchers import launcher_of
from controller.config.problems import Problem
from controller.config.run_config import RunConfig

KEY = "encryption"


def encryption_problems(config: RunConfig) -> Iterator[Problem]:
    """Settings that are not supported with encryption."""
    if config.encryption is None:
        return
    for key, what, remedy in (*_data(config), *_processes(config), *_destinations(config), *_recorded(config)):
        yield Problem((key, KEY), f"{what}, which is not supported with encryption", f"{remedy}, or remove {KEY}")


def _data(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    if config.warm_start is not None:
        remedy = "train the model first with areal-like sft, and set model.path"
        yield "warm_start", "the model of a warm start is stored in runs_dir/.prepared in the clear", remedy
    if config.data.train.stages:
        what = "the rows that the stages keep are stored in the run's folder in the clear"
        yield "data.train.stages", what, "run areal-like data clean first"
    if config.data.train.follow:
        yield "data.train.follow", "the positions in files that grow are stored in the clear", "set this key to false"


def _processes(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    if not launcher_of(config).is_one_machine:
        yield "launch.kind", "files are copied to other machines in the clear", "set launch.kind: local"
    if config.trainer.weights.place != "shm":
        what = "weight versions are written to a disk in the clear"
        yield "trainer.weights.kind", what, "use a kind whose versions are in shared memory, such as shm"


def _destinations(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    metrics = config.metrics
    for name in ("wandb", "mlflow", "trackio", "openlineage"):
        if getattr(metrics, name) is not None:
            yield f"metrics.{name}", "settings and texts are written to it in the clear", "set this key to null"
    if metrics.tensorboard:
        what = "settings and texts are written to its files in the clear"
        yield "metrics.tensorboard", what, "set this key to false"


def _recorded(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    what, remedy = "requests and answers of the external model are recorded in the clear", "set record: off"
    for index, model in enumerate(config.rollout.models):
        if model.endpoint is not None and model.endpoint.record != "off":
            yield f"rollout.models.{index}.endpoint.record", what, remedy
    for index, scorer in enumerate(config.reward.scorers):
        if scorer.kind == "llm_judge" and scorer.options.get("record") not in ("off", False):
            yield f"reward.scorers.{index}.options.record", what, remedy
