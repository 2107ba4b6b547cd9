"""What do grouped products gain over a loop over experts? One layer's experts, forward and backward, one thread.

    python -m benchmarks.experts             about 3 minutes on two cores
    python -m benchmarks.experts --quick     one small case, two rounds; writes nothing

The block of a Qwen3-MoE layer (router and 64 experts, 8 of which each token uses) computes random tokens and their
gradients: `grouped`, as in the trainer (trainer/model/experts.py); `loop`: the loop over experts of transformers'
class; `transformers`: its own `grouped_mm`, which is its default. The three alternate in one process, and each round
gives a ratio of processor times; the first round is discarded. Outputs and gradients are compared with those of the
loop. With bfloat16 the weights stay float32 and autocast is on, as in the trainer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; oversubscribed threads would measure nothing

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.publishing import add_replace, result_path
from benchmarks.runs import command_of, write
from trainer.model.experts import LOOP, NAME, attach_experts

EXPERTS, CHOSEN = 64, 8
WAYS = {"grouped": NAME, "loop": LOOP, "transformers": "grouped_mm"}
ROUNDS, QUICK_ROUNDS = 7, 2
Row = dict[str, Any]


class Case(NamedTuple):
    """Sizes of a layer and number of tokens."""

    hidden: int
    inner: int
    tokens: int
    dtype: str = "float32"


CASES = (
    Case(64, 32, 512), Case(128, 64, 1024), Case(256, 128, 2048), Case(128, 64, 1024, "bfloat16"),
    Case(256, 128, 2048, "bfloat16"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    add_replace(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'hidden':>8}{'inner':>7}{'tokens':>8} {'dtype':10}{'grouped ms':>11}{'loop/grouped':>24}"
          f"{'transformers/grouped':>24}{'difference':>12}")  # fmt: skip
    rows = []
    for case in CASES[:1] if options.quick else CASES:
        row = measure(case, QUICK_ROUNDS if options.quick else ROUNDS)
        rows.append(row)
        ratios = (
            f"{statistics.median(row[key]):.2f} ({min(row[key]):.2f} to {max(row[key]):.2f})"
            for key in ("loop_ratio", "transformers_ratio")
        )
        print(f"{case.hidden:8}{case.inner:7}{case.tokens:8} {case.dtype:10}{row['grouped_ms']:11.1f}"
              f"{''.join(f'{text:>24}' for text in ratios)}{row['difference']:12.1e}", flush=True)  # fmt: skip
    if not options.quick:
        result = {"experts": EXPERTS, "chosen": CHOSEN, "rounds": ROUNDS, "rows": rows}
        print(f"written to {write('experts', command_of('experts'), result, result_path('experts', options))}")


def measure(case: Case, rounds: int) -> Row:
    """Compute all ways in turns. difference: the largest of grouped products from the loop, of output and gradients, as
    a share of each one's largest value."""
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=case.hidden, moe_intermediate_size=case.inner, num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, norm_topk_prob=True, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, vocab_size=64, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    block = model.model.layers[0].mlp
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens_1TD = torch.randn(1, case.tokens, case.hidden, requires_grad=True)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    found: dict[str, list[torch.Tensor]] = {}
    for _ in range(rounds + 1):
        for way, name in WAYS.items():
            attach_experts(model, name)
            block.zero_grad(set_to_none=True)
            tokens_1TD.grad = None
            began_s = time.process_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "bfloat16"):
                output = block(tokens_1TD)
            output.float().square().mean().backward()
            seconds[way].append(time.process_time() - began_s)
            gradients = [parameter.grad.clone() for parameter in (tokens_1TD, *block.parameters())]
            found[way] = [output.detach(), *gradients]
    differences = [
        float((ours - loop).abs().max() / loop.abs().max())
        for ours, loop in zip(found["grouped"], found["loop"], strict=True)
    ]
    measured = {way: values[1:] for way, values in seconds.items()}
    return {
        **case._asdict(),
        "grouped_ms": 1e3 * statistics.median(measured["grouped"]),
        **{
            f"{way}_ratio": [one / ours for one, ours in zip(measured[way], measured["grouped"], strict=True)]
            for way in ("loop", "transformers")
        },
        "difference": max(differences),
    }


if __name__ == "__main__":
    main()
