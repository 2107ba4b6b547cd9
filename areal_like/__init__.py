"""Bottom layer of areal_like: contracts, wire format, channels and pure rules. Imports no torch, ray or sglang.

The names of the public Python API are resolved on first use. Some of them are defined in packages of upper layers,
which this package must not import, and `import areal_like` must stay fast in every process of a run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_like.errors import DeadlineExceeded, OperationError, RunFailed, UserError
    from areal_like.trajectory import Segment, Trajectory
    from areal_like.verdict import Verdict
    from controller.config.loading import load_config
    from controller.config.problems import ConfigError
    from controller.config.run_config import RunConfig
    from controller.python_api.jobs import evaluate, resume, train
    from controller.python_api.offline_jobs import dpo, reward_model, sft
    from controller.python_api.run import Run, RunStatus
    from rollout.transcript import Transcript
    from rollout.workflow import Sample, SampleTools, Workflow
    from services.reward.scorers.port import CannotJudge, Scorer, ScorerInput

__version__ = "0.1.0"

_EXPORTS = {
    "train": "controller.python_api.jobs",
    "resume": "controller.python_api.jobs",
    "evaluate": "controller.python_api.jobs",
    "sft": "controller.python_api.offline_jobs",
    "dpo": "controller.python_api.offline_jobs",
    "reward_model": "controller.python_api.offline_jobs",
    "Run": "controller.python_api.run",
    "RunStatus": "controller.python_api.run",
    "RunConfig": "controller.config.run_config",
    "load_config": "controller.config.loading",
    "Trajectory": "areal_like.trajectory",
    "Segment": "areal_like.trajectory",
    "Verdict": "areal_like.verdict",
    "Workflow": "rollout.workflow",
    "SampleTools": "rollout.workflow",
    "Sample": "rollout.workflow",
    "Transcript": "rollout.transcript",
    "Scorer": "services.reward.scorers.port",
    "ScorerInput": "services.reward.scorers.port",
    "CannotJudge": "services.reward.scorers.port",
    "UserError": "areal_like.errors",
    "ConfigError": "controller.config.problems",
    "OperationError": "areal_like.errors",
    "RunFailed": "areal_like.errors",
    "DeadlineExceeded": "areal_like.errors",
}
"""Public names and the modules that define them."""

__all__ = [
    "CannotJudge", "ConfigError", "DeadlineExceeded", "OperationError", "Run", "RunConfig", "RunFailed", "RunStatus",
    "Sample", "SampleTools", "Scorer", "ScorerInput", "Segment", "Trajectory", "Transcript", "UserError",
    "Verdict", "Workflow", "__version__", "dpo", "evaluate", "load_config", "resume", "reward_model", "sft", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
