"""The finished sample of an agent's session: its trajectories, its text, and the counts in its verdict."""

from __future__ import annotations

from collections.abc import Sequence

from areal_like.trajectory import Trajectory
from areal_like.verdict import Verdict
from rollout.agent.session import AgentSession
from rollout.workflow import Sample, SampleTools


def sample_of(tools: SampleTools, trajectories: Sequence[Trajectory], verdict: Verdict) -> Sample:
    """The sample of at least one trajectory, the main one first; its text is that of all sampled tokens."""
    text = "\n".join(tools.tokens.decode(one.tokens_T[one.loss_mask_T]) for one in trajectories)
    return Sample(trajectory=trajectories[0], others=tuple(trajectories[1:]), verdict=verdict, response_text=text)


def counts_of(session: AgentSession) -> dict[str, float]:
    """Components of the verdict: numbers of answers and of requests, by outcome."""
    return {
        "turns": float(len(session.store.turns)),
        "agent_rendered_again": float(session.store.num_rendered_again),
        "agent_without_reasoning": float(session.store.num_without_reasoning),
        **{name: float(count) for name, count in session.counts.items()},
    }
