"""Cross-checks of `launch.kind`, based on the launcher's descriptor. Pure, like run.py.

A cluster is inspected in launch/cluster/survey.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from areal_like.device_names import resolved
from controller.config.engines import as_problems, configured_engine
from controller.config.launchers import LAUNCHERS, launcher_of
from controller.config.problems import Problem
from controller.config.run_config import RunConfig


def launcher_problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of the launcher's own settings, and of settings that have another meaning on the machines where it
    starts processes.
    """
    launch, launcher = config.launch, launcher_of(config)
    for other in LAUNCHERS.values():
        section = getattr(launch, other.section) if other.section and other.section != launcher.section else None
        if section is not None and section != type(section)():  # a resolved config lists every key, also defaults
            yield Problem(
                (f"launch.{other.section}", "launch.kind"),
                f"this section applies to a different launcher: launch.kind is {launch.kind}",
                f"set kind: {other.name}",
            )
    yield from as_problems(launcher.option_problems(launch.options))
    if not launcher.is_one_machine:
        yield from _folders(config)
    if launcher.chooses_gpus:
        yield from _devices(config)
    if launcher.chooses_gpus and config.is_colocated:
        yield Problem(
            ("placement", "launch.kind"),
            f"{launcher.title} reserves separate devices for each pool, so engines and trainer cannot share devices",
            "set launch.kind: local, or placement: disaggregated",
        )
    if launcher.host_key != "launch.host" and launch.host != type(launch)().host:
        yield Problem(
            ("launch.host", "launch.kind"),
            "this key applies only to a launcher that starts all processes on this machine",
            f"set {launcher.host_key}: {launch.host} instead",
        )
    yield from as_problems(launcher.setting_problems(launch))


def _folders(config: RunConfig) -> Iterator[Problem]:
    folder, launcher = Path(config.runs_dir).expanduser(), launcher_of(config)
    if not folder.is_absolute():
        yield Problem(
            ("runs_dir", "launch.kind"),
            f"`{config.runs_dir}` is a relative path, but the current folder differs between nodes",
            "use the absolute path of a folder that all nodes share",
        )
    elif launcher.job_folder in folder.parts:
        what = f"{folder} belongs to {launcher.title} and is deleted with the job"
        yield Problem(("runs_dir",), what, "use a folder that all nodes share")
    engine = configured_engine(config)
    python = engine.interpreter(config.rollout.engine)
    if python is not None and not Path(python).expanduser().is_absolute():
        yield Problem(
            ("rollout.engine.python", "launch.kind"),
            f"`{python}` is a relative path, but the current folder differs between nodes",
            f"use the absolute path of the {engine.title} interpreter, which must be valid on every node",
        )


def _devices(config: RunConfig) -> Iterator[Problem]:
    launcher = launcher_of(config)
    pools = {"rollout": ("rollout.engine.device", config.rollout.engine.device)}
    pools["trainer"] = ("trainer.device", config.trainer.device)
    for name, (key, device) in pools.items():
        reserved = launcher.pool(config.launch, name)
        if re.fullmatch(r"cuda:\d+", device):
            what = f"{launcher.title} chooses the GPU of each process, so `{device}` has no effect"
            yield Problem((key, "launch.kind"), what, f"set {key}: cuda")
        if resolved(device) == "cuda" and reserved is not None and reserved.gpus == 0:
            key_of_gpus = f"launch.{launcher.section}.{name}.gpus"
            yield Problem(
                (key_of_gpus, key),
                "no GPU is reserved, but the device is cuda",
                f"set this key to null, or set {key}: cpu",
            )
