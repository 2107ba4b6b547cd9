"""Loads a reward model: a decoder with a head of one number, as in transformers' classes for sequence classification.

What the number means is defined in trainer/offline/reward_task.py. Causal language models are loaded in model.py; the
critic of a policy, which keeps the policy's class, in values.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from areal_like.errors import UserError
from trainer.model.model import check_weights, load_weights, read_config
from trainer.model.values import HEAD

_SUFFIX = "ForSequenceClassification"


def load_reward_model(folder: Path, *, padding_id: int | None, device: str = "cpu") -> PreTrainedModel:
    """Load the model in `folder`, float32: a reward model unchanged, or a causal language model whose output layer is
    replaced by a head of one number. That head is initialised to zero, so that all answers have equal scores.

    Args:
        folder: in Hugging Face format.
        padding_id: see areal_like.scored_text.padding_id; recorded in the config.
        device: cpu, cuda or cuda:N.

    Raises:
        UserError: transformers has no such class for this model, or the folder cannot be loaded.
    """
    config = read_config(folder)
    check_weights(folder)
    if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        what = f"transformers has no {config.model_type} model for sequence classification"
        raise UserError(what, where=str(folder), remedy="use a different model, such as a Qwen3 or Llama model")
    is_trained = any(name.endswith(_SUFFIX) for name in config.architectures or ())
    if not is_trained:
        config.num_labels = 1
    config.pad_token_id = padding_id
    made = (f"{HEAD}.weight",) if not is_trained else ()
    with _quiet():  # no warning about a head that the folder lacks
        model = load_weights(folder, AutoModelForSequenceClassification, config=config, made=made, device=device)
    head = getattr(model, HEAD, None)
    if not isinstance(head, torch.nn.Linear) or head.out_features != 1 or head.bias is not None:
        what = f"the head of {type(model).__name__} does not map the last hidden state to one number"
        raise UserError(what, where=str(folder), remedy="use a different model, such as a Qwen3 or Llama model")
    if not is_trained:
        torch.nn.init.zeros_(head.weight)
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Make transformers report errors only inside the context."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)
