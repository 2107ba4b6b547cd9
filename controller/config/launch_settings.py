"""The section `launch`: how the processes of a run are started and monitored.

Combinations are checked in validation/.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from areal_like import limits
from areal_like.settings import Settings
from controller.config.cluster_settings import RaySettings


class LaunchSettings(Settings):
    """How the run's processes are started and monitored."""

    kind: str = "local"
    """`local`: processes on this machine; `ray`: the same processes on a running Ray cluster; or `module:ATTRIBUTE`,
    the descriptor of a launcher of your own."""
    options: dict[str, Any] = Field({})
    """Settings of a launcher of your own. Its descriptor validates them."""
    ray: RaySettings = RaySettings()
    """For `kind: ray`."""
    start_method: Literal["auto", "forkserver", "spawn"] = "auto"
    """`local`: `forkserver` imports torch and transformers once and forks trainer, rollout workers and reward services
    from that process, so that they start in a fraction of a second and share memory; `spawn`: each process imports its
    own modules; `auto`: `forkserver` on Linux if all devices are CPUs."""
    host: str = "127.0.0.1"
    """`local`: address the controller binds and advertises."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the controller; 0: any free one."""
    heartbeat_s: float = Field(0.5, gt=0, le=limits.SECONDS)
    """Seconds between heartbeats of a process."""
    silence_s: float = Field(15.0, gt=0, le=limits.SECONDS)
    """A process that sends no heartbeat for this long counts as lost."""
    controller_silence_s: float = Field(60.0, gt=0, le=limits.SECONDS)
    """A process that receives nothing from the controller for this long exits. The controller commits the ledger
    between two messages, so the value must allow for a disk that is slow for some seconds. If the controller is killed,
    processes on its machine exit immediately by another mechanism, and processes on other machines after this time.
    """
    startup_timeout_s: float = Field(180.0, gt=0, le=limits.SECONDS)
    """The run ends if a process has not reported within this time."""
    stall_after_s: float | None = Field(None, gt=0, le=limits.SECONDS)
    """If there is no progress for this long although there is work left, the run ends and reports which process waits
    for which. None: a minute more than the longest automatic recovery (`areal-like validate` shows it); a value below
    that is rejected."""
    stop_grace_s: float = Field(60.0, gt=0, le=limits.SECONDS)
    """After Ctrl-C or SIGTERM: time for the current step and the checkpoint before processes are killed."""
