"""The spec of `python -m trainer.replay`. Imports no torch, so that the controller can write it."""

from __future__ import annotations

from areal_like.config import ProcessSpec, StartSpec


class ReplaySpec(StartSpec):
    """One start of a trainer that replays recorded steps. It reads batches from stdin and writes events to stdout."""

    name: str = "replay"
    trainer: ProcessSpec
    """The recorded spec of the trainer, rank 0. Its `run_dir` is a scratch folder, and `resume_from` the checkpoint
    to start from."""
    last_step: int
    """The step after which it ends."""
    saves_at: tuple[int, ...] = ()
    """Versions of which a checkpoint is saved in the scratch folder."""
    policies_at: tuple[int, ...] = ()
    """Versions of which the policy is exported to the scratch folder, as the engines received it."""
    has_export: bool = False
    """Export the policy after the last step, as the trainer does at the end of a run."""
    min_ess: float | None = None
    """End before a step whose samples have a smaller effective sample size under the policy, as a share of the tokens;
    None: not measured."""
    has_gradients: bool = False
    """Report a digest of each tensor of the gradient of each update."""
