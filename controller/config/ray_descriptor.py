"""Descriptor of the Ray launcher (LauncherDescriptor). ray is not imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from areal_like.setting_problem import SettingProblem
from controller.config.cluster_settings import PoolSettings
from controller.config.launch_settings import LaunchSettings
from controller.config.launcher_descriptor import LauncherDescriptor, Mirroring


class RayDescriptor(LauncherDescriptor):
    """Runs the processes on the nodes of a Ray cluster."""

    name = "ray"
    title = "Ray"
    factory = "controller.launch.cluster.launcher:make"
    survey = "controller.launch.cluster.survey:survey"
    section = "ray"
    package = "ray"
    is_one_machine = False
    chooses_gpus = True
    host_key = "launch.ray.host"
    host_hint = "null uses the node's own address"
    job_folder = "working_dir_files"

    def host(self, launch: LaunchSettings) -> str | None:
        """None: the address of the controller's node in the cluster."""
        return launch.ray.host

    def pool(self, launch: LaunchSettings, name: str) -> PoolSettings | None:
        """Its placement group."""
        pool: PoolSettings = getattr(launch.ray, name)
        return pool

    def mirroring(self, launch: LaunchSettings) -> Mirroring | None:
        """Always mirrored: run folders on a cluster are on network file systems."""
        return Mirroring(launch.ray.local_dir, launch.ray.mirror_every_s)

    def node_wait_s(self, launch: LaunchSettings) -> float:
        """`launch.ray.node_wait_s`."""
        return launch.ray.node_wait_s

    def setting_problems(self, launch: LaunchSettings) -> Iterator[SettingProblem]:
        """Problems of `local_dir` and of custom resources."""
        local = launch.ray.local_dir
        if local is not None and not Path(local).expanduser().is_absolute():
            what = f"`{local}` is relative"
            yield SettingProblem(("launch.ray.local_dir",), what, "use an absolute path on the controller's disk")
        for name in ("rollout", "trainer", "reward"):
            key = f"launch.ray.{name}.resources"
            for resource, amount in getattr(launch.ray, name).resources.items():
                if resource in ("CPU", "GPU"):
                    remedy = f"set launch.ray.{name}.{resource.lower()}s instead"
                    yield SettingProblem((key,), f"{resource} is a built-in resource, not a custom one", remedy)
                elif amount <= 0:
                    yield SettingProblem(
                        (key,),
                        f"{resource} must be greater than 0, not {amount:g}",
                        "remove this resource, or set a positive amount",
                    )


RAY = RayDescriptor()
