"""Which settings cannot work on a cluster. Pure, as run.py is.

Owns: the cross-checks of `launch.kind: ray` and its section. Refuses: looking at one (launch/cluster/survey.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from controller.config.cluster_settings import RaySettings
from controller.config.engines import configured_engine
from controller.config.problems import Problem
from controller.config.run_config import RunConfig

JOB_FOLDER = "working_dir_files"
"""In the path of every folder that Ray unpacks a job's working directory into, and throws away afterwards."""


def cluster_problems(config: RunConfig) -> Iterator[Problem]:
    """Of `launch.ray`, and of what means something else on a cluster."""
    launch = config.launch
    if launch.kind != "ray":
        if launch.ray != RaySettings():
            yield Problem(
                ("launch.ray", "launch.kind"),
                f"sets the placement of processes, but the kind is {launch.kind}",
                "kind: ray",
            )
        return
    yield from _folders(config)
    yield from _devices(config)
    if config.is_colocated:
        yield Problem(
            ("placement", "launch.kind"),
            "Ray reserves devices for each pool separately: engines and trainer would share none",
            "launch.kind: local, or placement: disaggregated",
        )
    if launch.host != "127.0.0.1":
        yield Problem(
            ("launch.host", "launch.kind"), "is for processes on this machine", f"launch.ray.host: {launch.host}"
        )
    for name in ("rollout", "trainer", "reward"):
        for resource, amount in getattr(launch.ray, name).resources.items():
            key = f"launch.ray.{name}.resources"
            if resource in ("CPU", "GPU"):
                yield Problem((key,), f"{resource} is not a custom resource", f"launch.ray.{name}.{resource.lower()}s")
            elif amount <= 0:
                yield Problem((key,), f"{resource} must be more than 0, not {amount:g}", "remove it")


def _folders(config: RunConfig) -> Iterator[Problem]:
    folder = Path(config.runs_dir).expanduser()
    if not folder.is_absolute():
        yield Problem(
            ("runs_dir", "launch.kind"),
            f"`{config.runs_dir}` is relative, and a job's current folder differs on every node",
            "the absolute path of a folder that all nodes share",
        )
    elif JOB_FOLDER in folder.parts:
        yield Problem(
            ("runs_dir",), f"{folder} belongs to Ray and is deleted with the job", "a folder that all nodes share"
        )
    local = config.launch.ray.local_dir
    if local is not None and not Path(local).expanduser().is_absolute():
        yield Problem(("launch.ray.local_dir",), f"`{local}` is relative", "an absolute path on the controller's disk")
    engine = configured_engine(config)
    python = engine.interpreter(config.rollout.engine)
    if python is not None and not Path(python).expanduser().is_absolute():
        yield Problem(
            ("rollout.engine.python", "launch.kind"),
            f"`{python}` is relative, and nodes share no current folder",
            f"the absolute path of {engine.title}'s interpreter, the same on every node",
        )


def _devices(config: RunConfig) -> Iterator[Problem]:
    pools = {"rollout": ("rollout.engine.device", config.rollout.engine.device)}
    pools["trainer"] = ("trainer.device", config.trainer.device)
    for name, (key, device) in pools.items():
        gpus = getattr(config.launch.ray, name).gpus
        if re.fullmatch(r"cuda:\d+", device):
            yield Problem((key, "launch.kind"), f"Ray chooses the GPU of a process, not `{device}`", f"{key}: cuda")
        if device == "cuda" and gpus == 0:
            yield Problem((f"launch.ray.{name}.gpus", key), "no GPU is reserved, but the device is cuda", "null")
