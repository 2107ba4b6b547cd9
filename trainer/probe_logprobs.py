"""`python -m trainer.probe_logprobs IN OUT`: the trainer's log-probs of sampled answers, for `areal-like probe`.

It runs the same passes as a training step does for an engine's tokens. The comparison is done by the controller.

IN is a `LogprobSpec` (areal_like/probe_files.py), OUT a list of log-probs [R] per sequence.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from areal_like import quick_exit
from areal_like.probe_files import LogprobSpec, run_spec
from trainer.model import attention
from trainer.model.logprobs import token_logprobs
from trainer.model.model import load_causal_lm
from trainer.model.packed import PackedSequences


def logprobs_of(order: LogprobSpec) -> list[list[float]]:
    """Compute log-probs [R] of each answer, in nats, at the sampling temperature. Raises UserError."""
    torch.set_num_threads(order.num_threads)
    model = load_causal_lm(Path(order.model_dir), device=order.device)
    device = next(model.parameters()).device
    attention.attach(model, attention.choose(order.attention, device, order.precision))
    found: list[list[float]] = []
    is_half = order.precision == "bfloat16"
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_half):
        for prompt_P, answer_R in order.sequences:
            tokens = np.array([*prompt_P, *answer_R], np.int64)
            packed = PackedSequences.build([tokens], [np.arange(len(tokens)) >= len(prompt_P)]).to(device)
            logprobs_N, _ = token_logprobs(
                model, packed, temperature=order.temperature, chunk_tokens=1024, with_entropy=False
            )
            found.append(logprobs_N.float().cpu().tolist())
    return found


def main(source: Path, target: Path) -> None:
    """Run the process."""
    run_spec(source, target, LogprobSpec, logprobs_of)


if __name__ == "__main__":
    quick_exit.run(lambda: main(Path(sys.argv[1]), Path(sys.argv[2])))
