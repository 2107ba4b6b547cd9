"""The critic in a checkpoint: its weights and AdamW's state, which engines and exports do not read. They are in one
file, or in the parts of the ranks.

The rest of a checkpoint is written in training_state.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError, WeightError
from areal_like.weights.tensor_parts import has_parts
from trainer.backends.port import Backend
from trainer.checkpoints.checkpoint import CRITIC
from trainer.checkpoints.convert import CRITIC_PREFIX, WEIGHT, reason_of, stored_critic
from trainer.export import named_tensors
from trainer.gathered import GatheredTensors
from trainer.host_copy import Part
from trainer.model.outline import moment_reader
from trainer.model.stored_tensor import as_tensor
from trainer.weights.tensor_file import FileFacts, write_tensors

_PREFIX, _WEIGHT = CRITIC_PREFIX, WEIGHT


def critic_parts(backend: Backend) -> list[Part]:
    """Return this rank's parts of the critic, with keys that differ from the policy's."""
    return [part._replace(key=_PREFIX + part.key) for part in backend.parts()]


def write_critic(folder: Path, tensors: GatheredTensors) -> dict[str, FileFacts]:
    """Write the critic's tensors, gathered from `critic_parts`, to a checkpoint; nothing if there is no critic."""
    own = tensors.select(lambda key: key.removeprefix(_PREFIX) if is_critics(key) else None)
    return {CRITIC: write_tensors(folder / CRITIC, own)} if own else {}


def is_critics(key: str) -> bool:
    """True for the key of a critic's tensor."""
    return key.startswith(_PREFIX)


def load_critic_weights(folder: Path, model: PreTrainedModel) -> None:
    """Load the weights of a checkpoint into a full critic.

    Raises UserError if it was saved without a critic, WeightError if the file is damaged.
    """
    file = folder if has_parts(folder) else folder / CRITIC
    weights = named_tensors(model)
    try:
        stored = stored_critic(folder)
    except UserError as error:
        raise WeightError(f"{file} cannot be read ({reason_of(error)})") from error
    if not stored:
        raise UserError(
            "the checkpoint contains no critic, because the run was trained without one",
            where=str(folder),
            remedy="remove trainer.critic, or start a new run from this policy",
        )
    _check_names(file, stored, weights)
    try:
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(as_tensor(stored[_WEIGHT + name]))
    except (OSError, RuntimeError) as error:  # RuntimeError: another shape
        raise WeightError(f"{file} cannot be read ({error})") from error


def restore_critic_moments(folder: Path, backend: Backend) -> None:
    """Restore the critic's AdamW state from a checkpoint. Collective. Raises WeightError."""
    file = folder if has_parts(folder) else folder / CRITIC
    try:
        stored = stored_critic(folder)
        if not stored:
            raise WeightError(f"{file} cannot be read (there is no critic)")
        kinds: dict[str, list[str]] = {}
        for key in sorted(stored):
            kind, _, name = key.partition("/")
            if not key.startswith(_WEIGHT):
                kinds.setdefault(name, []).append(kind)
        backend.load_moments(moment_reader(stored, kinds))
    except (OSError, UserError) as error:
        raise WeightError(f"{file} cannot be read ({reason_of(error)})") from error


def _check_names(file: Path, keys: Iterable[str], weights: Mapping[str, torch.Tensor]) -> None:
    stored = {key.removeprefix(_WEIGHT) for key in keys if key.startswith(_WEIGHT)}
    if different := sorted(stored ^ weights.keys()):
        where = "file" if different[0] in stored else "model"
        raise WeightError(f"{file} belongs to a different model: the tensor {different[0]} is only in the {where}")
