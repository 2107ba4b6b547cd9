"""The contents of a checkpoint of a running training, restored bit for bit.

These are AdamW's state as safetensors (`<moment>/<name of the parameter>`, each tensor in full), the model's files, and
the states of the random generators. With several ranks the tensors may be in their parts instead (rank_parts.py). Any
backend with any number of ranks reads what any other wrote. The schedule has no state, because it is a pure function
of the step. The folder is managed in checkpoints/checkpoint.py.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from areal_like.errors import UserError, WeightError
from areal_like.settings import DType
from areal_like.weights.tensor_parts import has_parts
from trainer.backends.port import Backend
from trainer.checkpoints.atomic_folder import atomic_folder
from trainer.checkpoints.companion_files import copy_companions
from trainer.checkpoints.convert import WEIGHT, reason_of, stored_optimizer, stored_tensors
from trainer.checkpoints.provenance import write_provenance
from trainer.critic_state import is_critics, write_critic
from trainer.gathered import GatheredTensors
from trainer.host_copy import Part
from trainer.model.model import read_config, weight_files
from trainer.model.outline import is_converted, moment_reader
from trainer.model.stored_tensor import as_tensor
from trainer.weights.tensor_file import FileFacts, write_tensors

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
_WEIGHT = WEIGHT
_GENERATOR = "generator/"


class PolicyFiles(Protocol):
    """Writes the policy's named tensors to files: of a full model, or of an adapter (adapter_files.py)."""

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> dict[str, FileFacts]:
        """Write them into an existing folder; returns sizes and checksums of the large files."""


@dataclass(frozen=True)
class ModelFiles:
    """Writes named tensors as a model folder. Created from the full model, before it is distributed over ranks."""

    config_json: str
    model: PreTrainedModel | None
    """Set if tensors have other names or shapes on disk than in memory (transformers' weight conversions)."""
    ignored: frozenset[str]

    @staticmethod
    def of(model: PreTrainedModel) -> ModelFiles:
        """Create the files as transformers would save them, in float32."""
        holder: Any = model
        model.config.dtype = "float32"
        model.config.architectures = [type(model).__name__]
        with tempfile.TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            config_json = (Path(folder) / "config.json").read_text()
        ignored = frozenset(holder._keys_to_ignore_on_save or ())
        return ModelFiles(config_json, model if is_converted(model) else None, ignored)

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> dict[str, FileFacts]:
        """Write config.json and model.safetensors into an existing folder."""
        (folder / "config.json").write_text(self.config_json)
        kept: Mapping[str, torch.Tensor]
        if isinstance(weights, GatheredTensors):
            kept = weights.select(lambda name: None if name in self.ignored else name)
        else:
            kept = {name: tensor for name, tensor in weights.items() if name not in self.ignored}
        if self.model is not None:
            from transformers.core_model_loading import revert_weight_conversion

            converted = revert_weight_conversion(self.model, dict(kept))
            kept = {name: tensor.contiguous() for name, tensor in converted.items()}
        return {WEIGHTS: write_tensors(folder / WEIGHTS, kept)}


def export_gathered(
    files: ModelFiles, weights: GatheredTensors, source: Path, target: Path, *, dtype: DType, checkpoint: Path | None
) -> None:
    """Export weights that are in `dtype` for `from_pretrained`, completely or not at all. Companions are copied from
    `source`. checkpoint: one of the same version, named in provenance.json. Raises OperationError (disk)."""
    with atomic_folder(target) as partial:
        files.write(partial, weights)
        config = json.loads(files.config_json)
        config.pop("torch_dtype", None)
        (partial / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2, sort_keys=True) + "\n")
        copy_companions(source, partial)
        if checkpoint is not None:
            write_provenance(partial, checkpoint)


def is_plain(files: PolicyFiles) -> bool:
    """Return whether the policy's tensors are in its files as they are in memory, so that ranks can write parts of
    them."""
    return isinstance(files, ModelFiles) and files.model is None


def saved_parts(files: PolicyFiles, parts: Sequence[Part]) -> list[Part]:
    """Return the parts of a backend that belong into a checkpoint."""
    assert isinstance(files, ModelFiles)
    left_out = {_WEIGHT + name for name in files.ignored}
    return [part for part in parts if part.key not in left_out]


def write_model_facts(folder: Path, files: ModelFiles, source: Path) -> None:
    """Write what a checkpoint has besides tensors: the model's config and the tokenizer files of `source`."""
    (folder / "config.json").write_text(files.config_json)
    copy_companions(source, folder)


def torch_generators() -> dict[str, torch.Tensor]:
    """States of torch's generators, by their names in the file."""
    states = {_GENERATOR + "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"{_GENERATOR}cuda{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def write_training_state(
    folder: Path,
    tensors: GatheredTensors,
    generators: Mapping[str, torch.Tensor],
    files: PolicyFiles,
    source: Path,
) -> dict[str, FileFacts]:
    """Write model (float32), tokenizer files of `source`, optimizer state, generators and critic into `folder`.

    tensors: by the keys of trainer.host_copy. Returns sizes and checksums of the large files.
    """
    facts = files.write(folder, tensors.select(lambda key: _after(_WEIGHT, key)))
    copy_companions(source, folder)
    others = tensors.select(lambda key: None if key.startswith(_WEIGHT) or is_critics(key) else key)
    facts[OPTIMIZER] = write_tensors(folder / OPTIMIZER, others, generators)
    return facts | write_critic(folder, tensors)


def _after(prefix: str, key: str) -> str | None:
    """Return the key without the prefix; None if it does not begin with it."""
    return key.removeprefix(prefix) if key.startswith(prefix) else None


def restore_training_state(folder: Path, backend: Backend) -> None:
    """Restore the optimizer and torch's generators as saved by `write_training_state`; the model is loaded already.

    Raises WeightError if the file is damaged or belongs to another model.
    """
    file = folder if has_parts(folder) else folder / OPTIMIZER
    known = {name for name, _ in backend.model.named_parameters()}
    try:
        stored = stored_optimizer(folder)
        if _GENERATOR + "cpu" not in stored:
            raise WeightError(f"{file} contains no random generator state")
        _restore_torch_generators(
            {name: as_tensor(tensor) for name, tensor in stored.items() if name.startswith(_GENERATOR)}
        )
        kinds: dict[str, list[str]] = {}
        for key in sorted(stored):
            kind, _, name = key.partition("/")
            if key.startswith(_GENERATOR):
                continue
            if name not in known:
                raise WeightError(f"{file} belongs to a different model: the model of this run has no parameter {name}")
            kinds.setdefault(name, []).append(kind)
        backend.load_moments(moment_reader(stored, kinds))
    except (OSError, UserError) as error:
        raise WeightError(f"{file} cannot be read ({reason_of(error)})") from error


def check_architecture(checkpoint: Path, prepared: Path) -> None:
    """Raise UserError if the checkpoint has another model than `prepared` (if that folder still exists)."""
    if not (prepared / "config.json").is_file():
        return
    difference = ""
    for key in ("model_type", "num_hidden_layers"):
        there, here = (getattr(read_config(folder).get_text_config(), key, None) for folder in (checkpoint, prepared))
        if there != here:
            difference = difference or f"{key} is {there} in the checkpoint and {here} in the run's model"
    theirs, ours = _shapes(checkpoint), _shapes(prepared)
    for name in sorted(theirs.keys() & ours.keys()):
        if theirs[name] != ours[name]:
            shapes = f"{list(theirs[name])} in the checkpoint and {list(ours[name])} in the run's model"
            difference = difference or f"{name} is {shapes}"
    if difference:
        raise UserError(
            f"the checkpoint has a different architecture: {difference}",
            where=str(checkpoint),
            remedy="resume with the model of the original run, or start a new run",
        )


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a model folder's tensors by name, read from the files' headers."""
    if has_parts(folder):
        return {name: tensor.shape for name, tensor in stored_tensors(folder).items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            with safe_open(str(file), framework="np") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


def _restore_torch_generators(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states.pop(_GENERATOR + "cpu"))
    if torch.cuda.is_available() and len(states) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([states[f"{_GENERATOR}cuda{index}"] for index in range(len(states))])


def generator_states() -> dict[str, Any]:
    """States of Python's and NumPy's global generators, as JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    words_624 = np.asarray(keys).tolist()
    return {"python": [version, list(words), gauss], "numpy": [name, words_624, position, has_gauss, cached]}


def restore_generators(states: dict[str, Any]) -> None:
    """Restore the states of `generator_states`; generators that are not included keep their state."""
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
    if "numpy" in states:
        name, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))
