"""Which settings cannot work on a cluster. Pure, as validate.py is.

Owns: the cross-checks of `launch.kind: ray` and its section. Refuses: looking at one (launch/cluster/survey.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from areal_like.sockets import is_loopback
from controller.config import RunConfig
from controller.config_problems import Problem
from controller.launch.cluster.settings import RaySettings

JOB_FOLDER = "working_dir_files"
"""In the path of every folder that Ray unpacks a job's working directory into, and throws away afterwards."""


def cluster_problems(config: RunConfig) -> Iterator[Problem]:
    """Of `launch.ray`, and of what means something else on a cluster."""
    launch = config.launch
    if launch.kind != "ray":
        if launch.ray != RaySettings():
            yield Problem(
                ("launch.ray", "launch.kind"), f"says where processes sit, and the kind is {launch.kind}", "kind: ray"
            )
        return
    yield from _folders(config)
    yield from _devices(config)
    if config.is_colocated:
        yield Problem(
            ("placement", "launch.kind"),
            "Ray sets devices aside for each pool alone: engines and trainer would share none",
            "launch.kind: local, or placement: disaggregated",
        )
    if launch.host != "127.0.0.1":
        yield Problem(
            ("launch.host", "launch.kind"), "is for processes on this machine", f"launch.ray.host: {launch.host}"
        )
    host = launch.ray.host
    if launch.curve == "off" and not (host and is_loopback(host)):
        yield Problem(
            ("launch.curve", "launch.kind"), "plain sockets between the nodes of a cluster are refused", "curve: auto"
        )
    for name in ("rollout", "trainer", "reward"):
        for resource, amount in getattr(launch.ray, name).resources.items():
            key = f"launch.ray.{name}.resources"
            if resource in ("CPU", "GPU"):
                yield Problem(
                    (key,), f"{resource} is no resource of your own", f"launch.ray.{name}.{resource.lower()}s"
                )
            elif amount <= 0:
                yield Problem((key,), f"{resource} must be more than 0, not {amount:g}", "take it away")


def _folders(config: RunConfig) -> Iterator[Problem]:
    folder = Path(config.runs_dir).expanduser()
    if not folder.is_absolute():
        yield Problem(
            ("runs_dir", "launch.kind"),
            f"`{config.runs_dir}` is relative, and a job's current folder is another one on every node",
            "the absolute path of a folder that all nodes share",
        )
    elif JOB_FOLDER in folder.parts:
        yield Problem(("runs_dir",), f"{folder} is Ray's own and goes with the job", "a folder that all nodes share")
    local = config.launch.ray.local_dir
    if local is not None and not Path(local).expanduser().is_absolute():
        yield Problem(("launch.ray.local_dir",), f"`{local}` is relative", "an absolute path on the controller's disk")
    engine = config.rollout.engine
    if engine.kind == "sglang" and not engine.sglang.attach and not Path(engine.python).expanduser().is_absolute():
        yield Problem(
            ("rollout.engine.python", "launch.kind"),
            f"`{engine.python}` is relative, and nodes have no folder in common to start from",
            "the absolute path of SGLang's interpreter, the same on every node",
        )


def _devices(config: RunConfig) -> Iterator[Problem]:
    pools = {"rollout": ("rollout.engine.device", config.rollout.engine.device)}
    pools["trainer"] = ("trainer.device", config.trainer.device)
    for name, (key, device) in pools.items():
        gpus = getattr(config.launch.ray, name).gpus
        if re.fullmatch(r"cuda:\d+", device):
            yield Problem((key, "launch.kind"), f"Ray says which GPU a process gets, not `{device}`", f"{key}: cuda")
        if device == "cuda" and gpus == 0:
            yield Problem((f"launch.ray.{name}.gpus", key), "no GPU is set aside, and the device is cuda", "null")
