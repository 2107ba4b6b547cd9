"""What a checkpoint holds of a running training, and how it comes back bit for bit.

Owns: AdamW's state as safetensors (`<moment>/<number of the parameter>`), the states of the random generators.
Refuses: the folder's law (checkpoint.py), the schedule (a pure function of the step, so it has no state).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from areal_like.errors import WeightError
from trainer.export import copy_companions, write_model
from trainer.optimizer import PolicyOptimizer

OPTIMIZER = "optimizer.safetensors"
_GENERATOR = "generator/"


def write_training_state(folder: Path, model: PreTrainedModel, optimizer: PolicyOptimizer, source: Path) -> None:
    """Model (float32), tokenizer files of `source`, optimizer state and torch's generators into `folder`."""
    write_model(model, folder, dtype="float32")
    copy_companions(source, folder)
    tensors: dict[str, torch.Tensor] = {}
    for number, moments in optimizer.state_dict()["state"].items():
        for kind, value in moments.items():
            tensors[f"{kind}/{number}"] = value.detach().contiguous()
    tensors[_GENERATOR + "cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors |= {f"{_GENERATOR}cuda{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    save_file(tensors, str(folder / OPTIMIZER))


def restore_training_state(folder: Path, optimizer: PolicyOptimizer) -> None:
    """Put the optimizer and torch's generators where `write_training_state` found them; the model is loaded already.

    Raises WeightError when the file is damaged or belongs to another model.
    """
    file = folder / OPTIMIZER
    try:
        tensors = load_file(str(file))
    except (OSError, SafetensorError) as error:
        raise WeightError(f"{file} cannot be read ({error})") from error
    if _GENERATOR + "cpu" not in tensors:
        raise WeightError(f"{file} holds no generator state")
    torch.set_rng_state(tensors.pop(_GENERATOR + "cpu"))
    num_cuda = sum(name.startswith(_GENERATOR) for name in tensors)
    cuda = [tensors.pop(f"{_GENERATOR}cuda{index}") for index in range(num_cuda)]
    if torch.cuda.is_available() and num_cuda == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
    groups = optimizer.state_dict()["param_groups"]
    num_parameters = sum(len(group["params"]) for group in groups)
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, number = key.partition("/")
        if not number.isdigit() or int(number) >= num_parameters:
            raise WeightError(f"{file} belongs to another model: it has no parameter {key}")
        moments.setdefault(int(number), {})[kind] = tensor.clone()  # out of the mapped file, into aligned memory
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def generator_states() -> dict[str, Any]:
    """States of Python's and NumPy's global generators, as JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    words_624 = np.asarray(keys).tolist()
    return {"python": [version, list(words), gauss], "numpy": [name, words_624, position, has_gauss, cached]}


def restore_generators(states: dict[str, Any]) -> None:
    """Undo of `generator_states`; generators it does not know keep their state."""
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
    if "numpy" in states:
        name, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))
