"""A critic as a model: a causal language model with a head of one number, and the computation of its values.
Shapes: T packed tokens, D hidden.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from trainer.model.logprobs import hidden_states
from trainer.model.model import load_causal_lm
from trainer.model.packed import PackedSequences

HEAD = "score"
"""Name of the head of one number in transformers' classes for sequence classification."""


def load_critic(folder: Path, *, device: str = "cpu") -> PreTrainedModel:
    """Load the model in `folder` with a head of one number in place of its output layer. The head is initialised to
    zero, so that all answers have equal values and all ranks start alike. Raises UserError as `load_causal_lm`."""
    model = load_causal_lm(folder, device=device)
    weight_VD = model.get_output_embeddings().weight
    head = torch.nn.utils.skip_init(torch.nn.Linear, weight_VD.shape[1], 1, bias=False, device=weight_VD.device)
    torch.nn.init.zeros_(head.weight)
    model.set_output_embeddings(head)
    return model


def token_values(model: PreTrainedModel, packed: PackedSequences) -> torch.Tensor:
    """Compute the value after each packed token, float32 [T], with gradient if grad mode is on.

    model: a critic (`load_critic`) or a reward model (trainer.model.reward_model).

    The head multiplies in float32, whatever dtype the other layers use.
    """
    hidden_TD = hidden_states(model, packed)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        weight_1D = (getattr(model, HEAD, None) or model.get_output_embeddings()).weight
        return torch.nn.functional.linear(hidden_TD.float(), weight_1D.float())[:, 0]
