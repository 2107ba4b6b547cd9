"""The critic in a checkpoint: one file with its weights and AdamW's state, which engines and exports do not read.

The rest of a checkpoint is written in training_state.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from areal_like.errors import UserError, WeightError
from trainer.backends.port import Backend
from trainer.checkpoints.checkpoint import CRITIC
from trainer.export import named_tensors
from trainer.gathered import GatheredTensors
from trainer.host_copy import Part
from trainer.model.outline import moment_reader
from trainer.weights.tensor_file import FileFacts, write_tensors

_PREFIX = "critic/"
_WEIGHT = "weight/"


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
    file = folder / CRITIC
    if not file.is_file():
        raise UserError(
            "the checkpoint contains no critic, because the run was trained without one",
            where=str(folder),
            remedy="remove trainer.critic, or start a new run from this policy",
        )
    weights = named_tensors(model)
    try:
        with safe_open(str(file), framework="pt") as opened, torch.no_grad():
            _check_names(file, opened.keys(), weights)
            for name, tensor in weights.items():
                tensor.copy_(opened.get_tensor(_WEIGHT + name))
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: another shape
        raise WeightError(f"{file} cannot be read ({error})") from error


def restore_critic_moments(folder: Path, backend: Backend) -> None:
    """Restore AdamW's state from the file of `write_critic`. Collective. Raises WeightError."""
    file = folder / CRITIC
    try:
        with safe_open(str(file), framework="pt") as opened:
            kinds: dict[str, list[str]] = {}
            for key in sorted(opened.keys()):
                kind, _, name = key.partition("/")
                if not key.startswith(_WEIGHT):
                    kinds.setdefault(name, []).append(kind)
            backend.load_moments(moment_reader(file, kinds))
    except (OSError, SafetensorError) as error:
        raise WeightError(f"{file} cannot be read ({error})") from error


def _check_names(file: Path, keys: Iterable[str], weights: Mapping[str, torch.Tensor]) -> None:
    stored = {key.removeprefix(_WEIGHT) for key in keys if key.startswith(_WEIGHT)}
    if different := sorted(stored ^ weights.keys()):
        where = "file" if different[0] in stored else "model"
        raise WeightError(f"{file} belongs to a different model: the tensor {different[0]} is only in the {where}")
