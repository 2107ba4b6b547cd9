"""How a critic comes to be: from the starting model, or as a checkpoint has it, spread over the ranks.

Owns: `make_critic`. Refuses: training it (critic.py), AdamW's state (critic_state.py, once the policy's is there).
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
    """Make the critic that `trainer.critic` asks for; None where it asks for none. Collective.

    Args:
        backend: the policy's, which trains the critic as well.
        setup: the policy's.
        source: a folder with the model whose architecture it has.
        resumed: a checkpoint of at least one step, where there is one: its weights are there.
        device: where it is loaded to before it is spread.

    Raises:
        UserError: the backend cannot train one, or the checkpoint was saved without.
        WeightError: the checkpoint is damaged.
    """
    settings = setup.settings.critic
    if settings is None:
        return None
    if not backend.trains_critics:
        what = f"{backend.name} cannot train a critic"
        raise UserError(what, where="trainer.critic", remedy="another trainer.backend, or critic: null")
    model = load_critic(source, device=device)
    if resumed is not None:
        load_critic_weights(resumed, model)
    ready_critic(model, setup)
    return Critic(make_backend(backend, model, setup.for_critic()), settings, setup.ranks)
