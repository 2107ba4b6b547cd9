"""State that all samples of a rollout worker share."""

from __future__ import annotations

import itertools
from typing import Protocol

from areal_like.clock import Clock
from areal_like.red_team import RedTeamJudge, RedTeamSettings
from areal_like.safety import SafetyFilter
from areal_like.trace import Tracer, arrow_name
from areal_like.verdict import Verdict
from areal_like.wire.messages import SampleTask
from rollout.activity import WorkerActivity
from rollout.engine.port import Engine
from rollout.environment_client import EnvironmentClient
from rollout.models.hosting import ModelHosts
from rollout.tokens import PromptTokens
from rollout.weights.versions import VersionGate


def arrow_of(task: SampleTask, tracer: Tracer) -> str:
    """Name of the sample on the timeline; empty if its group is not drawn."""
    is_eval = task.purpose == "eval"
    return arrow_name(task.group_id, task.sample_index, is_eval=is_eval) if tracer.draws(task.group_id) else ""


class Rewards(Protocol):
    """Source of verdicts (`reward_client.RewardClient`)."""

    async def score(self, task: SampleTask, response: str, finish_reason: str, num_tokens: int) -> Verdict: ...

    @property
    def environments(self) -> EnvironmentClient: ...


class SampleContext:
    """State that all samples of a worker share."""

    def __init__(
        self,
        *,
        engine: Engine,
        gate: VersionGate,
        tokens: PromptTokens,
        rewards: Rewards,
        version_deadline_s: float,
        clock: Clock,
        tracer: Tracer,
        models: ModelHosts | None = None,
        safety: SafetyFilter | None = None,
        red_team: RedTeamJudge | None = None,
    ) -> None:
        self.safety, self.red_team = safety, red_team or RedTeamJudge(RedTeamSettings())
        self.models = models or ModelHosts()
        self.engine, self.gate, self.tokens, self.rewards = engine, gate, tokens, rewards
        self.version_deadline_s, self.clock, self.tracer = version_deadline_s, clock, tracer
        self.doing = WorkerActivity(clock, tracer)
        self.request_ids = itertools.count(1)
        self.version_waits = 0
        """Number of samples that had to wait for their version."""
        self.version_wait_s = 0.0
        self.score_wait_s = 0.0
        """Sums over samples, so both may grow faster than the clock."""
