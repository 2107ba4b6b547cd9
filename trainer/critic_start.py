"""Creates the critic from the starting model or a checkpoint, distributed over the ranks.

It is trained in critic.py. AdamW's state is restored in critic_state.py, after the policy's.
"""

from __future__ import annotations

from pathlib import Path

from areal_like.errors import UserError
from trainer.backends.choice import make_backend
from trainer.backends.descriptor import BackendDescriptor
from trainer.backends.port import Setup
from trainer.critic import Critic
from trainer.critic_state import load_critic_weights
from trainer.model.values import load_critic
from trainer.step import ready_critic


def make_critic(
    backend: BackendDescriptor, setup: Setup, source: Path, resumed: Path | None, *, device: str
) -> Critic | None:
    """Create the critic of `trainer.critic`; returns None if it is not set. Collective.

    Args:
        backend: the policy's, which trains the critic as well.
        setup: the policy's.
        source: a folder with a model of the critic's architecture.
        resumed: a checkpoint of at least one step, if there is one, from which the weights are loaded.
        device: where it is loaded before it is distributed.

    Raises:
        UserError: the backend cannot train a critic, or the checkpoint was saved without one.
        WeightError: the checkpoint is damaged.
    """
    settings = setup.settings.critic
    if settings is None:
        return None
    if not backend.trains_critics:
        what = f"{backend.name} cannot train a critic"
        raise UserError(
            what,
            where="trainer.critic",
            remedy="set trainer.backend to a backend that trains critics, or set trainer.critic: null",
        )
    model = load_critic(source, device=device)
    if resumed is not None:
        load_critic_weights(resumed, model)
    ready_critic(model, setup)
    return Critic(make_backend(backend, model, setup.for_critic()), settings, setup.ranks)
