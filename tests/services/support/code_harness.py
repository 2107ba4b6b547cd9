"""A code scorer as the service uses it, without the service, for the tests."""

from __future__ import annotations

from typing import Any

import psutil

from services.reward.composition import WeightedSum
from services.reward.config import ScorerSettings
from services.reward.job import Job, Outcome
from services.reward.sandbox.layers import SandboxLayers, sandbox_layers

OPTIONS: dict[str, Any] = {"memory_limit_mb": 256, "time_limit_s": 3.0}
_layers: list[SandboxLayers] = []


def layers_here() -> SandboxLayers:
    """What this machine has; tried once."""
    if not _layers:
        _layers.append(sandbox_layers())
    return _layers[0]


class CodeBench:
    """One code scorer. `score` a program or a model's answer against a row."""

    def __init__(self, **options: Any) -> None:
        self._sum = WeightedSum.from_settings((ScorerSettings(kind="code", options=OPTIONS | options),))
        self.label = self._sum.label

    def answer(self, row: dict[str, Any], response: str, finish_reason: str = "stop") -> Outcome:
        job = Job(job_id=1, scorer="", row=row, response=response, finish_reason=finish_reason, num_tokens=1)
        return self._sum.score(job, lambda name: None)

    def score(self, program: str, tests: list[Any], **row: Any) -> Outcome:
        return self.answer({"program": program, "tests": tests, **row}, "")

    @property
    def judges(self) -> Any:
        (part,) = self._sum._parts.values()
        return part.scorer._judges  # type: ignore[attr-defined]

    def processes_left(self) -> list[psutil.Process]:
        """Everything below the supervisor but the waiting cell for tests; nothing, between two programs."""
        child = self.judges._child
        if child is None:
            return []
        supervisor = psutil.Process(child.pid)
        left = supervisor.children(recursive=True)
        waiting = supervisor.children()[:1]  # bubblewrap, and in it process 1; or that alone
        waiting += [process for cell in waiting for process in cell.children()[:1]]
        return [process for process in left if process not in waiting]

    def close(self) -> None:
        self.judges.close()
