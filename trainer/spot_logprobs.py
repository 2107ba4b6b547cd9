"""`python -m trainer.spot_logprobs IN OUT`: log-probs of stored samples, for `areal-like verify --spot`.

A plain forward pass of transformers on the CPU, one sequence at a time, without any of the trainer's own kernels or
packing, so that the result does not depend on the code that is checked.

IN is a `SpotSpec` (areal_like/spot_files.py), OUT a list of log-probs of the sampled tokens per sequence.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from areal_like import quick_exit
from areal_like.probe_files import run_spec
from areal_like.spot_files import SpotSpec
from trainer.export import TORCH_DTYPES
from trainer.model.model import load_causal_lm


def logprobs_of(order: SpotSpec) -> list[list[float]]:
    """Compute log_softmax(logits / temperature) of each sampled token, in nats. Raises UserError."""
    torch.set_num_threads(order.num_threads)
    model = load_causal_lm(Path(order.model_dir), device="cpu").eval()
    found: list[list[float]] = []
    with torch.no_grad():
        for parameter in model.parameters():  # the engine had them in this type
            parameter.copy_(parameter.to(TORCH_DTYPES[order.dtype]))
        for tokens, is_sampled in order.sequences:
            tokens_T, mask_T = torch.tensor(tokens), torch.tensor(is_sampled)
            logits_TV = model(input_ids=tokens_T[None]).logits[0, :-1].float() / order.temperature
            logprobs_T = torch.log_softmax(logits_TV, -1).gather(-1, tokens_T[1:, None])[:, 0]
            found.append(logprobs_T[mask_T[1:]].tolist())
    return found


def main(source: Path, target: Path) -> None:
    """Run the process."""
    run_spec(source, target, SpotSpec, logprobs_of)


if __name__ == "__main__":
    quick_exit.run(lambda: main(Path(sys.argv[1]), Path(sys.argv[2])))
