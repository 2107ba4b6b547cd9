"""What does chunking the vocabulary save? Peak memory and time of log-probs with their backward pass, on this machine.

    python -m benchmarks.logprob_memory             about 3 minutes on two cores, up to 4 GB of memory
    python -m benchmarks.logprob_memory --quick     the smallest case; writes nothing

A one-layer model with a large vocabulary; the same predictions once in chunks of logits, as in the trainer, and once
all at once under torch's own autograd. Each case runs in a separate process with one thread; peaks are its resident
memory minus that before the passes, gradients included. (On a GPU: `python -m benchmarks.gpu_suite`.)
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks.folders import REPOSITORY
from benchmarks.runs import environment, write

CASES = ((1024, 32_768), (4096, 32_768), (1024, 151_936))
"""(predictions, vocabulary)."""
CHUNKS = (256, 1024, 0)
"""Predictions per chunk; 0: all logits at once."""
QUICK = (512, 4096, 256)
"""(predictions, vocabulary, chunk)."""
HIDDEN, LENGTH, REPEATS = 128, 512, 3
MB = 1 << 20
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", type=int, nargs=3, metavar=("PREDICTIONS", "VOCABULARY", "CHUNK"), help="one process")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(*options.case)))
        return
    rows = []
    print(f"{'predictions':>12}{'vocabulary':>12}{'chunk':>8}{'peak MB':>10}{'one copy of logits MB':>24}{'s':>8}")
    cases = [(*case, chunk) for case in CASES for chunk in CHUNKS]
    for num, vocabulary, chunk in [QUICK] if options.quick else cases:
        rows.append(one(num, vocabulary, chunk))
        row = rows[-1]
        print(f"{num:12,}{vocabulary:12,}{chunk or 'whole':>8}{row['peak_mb']:10,.0f}{row['logits_mb']:24,.0f}"
              f"{row['seconds']:8.2f}", flush=True)  # fmt: skip
    if not options.quick:
        print(f"written to {write('logprob_memory', 'python -m benchmarks.logprob_memory', {'rows': rows})}")


def one(num: int, vocabulary: int, chunk: int) -> Row:
    """Run one case in a separate process. Raises SystemExit with its output if it fails."""
    command = [sys.executable, "-m", "benchmarks.logprob_memory", "--case", str(num), str(vocabulary), str(chunk)]
    variables = environment() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=variables, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def case(num: int, vocabulary: int, chunk: int) -> Row:
    """Measure one case in this process."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.model.attention import attach, choose, register
    from trainer.model.logprobs import hidden_states, token_logprobs
    from trainer.model.packed import PackedSequences

    torch.set_num_threads(1)
    register()
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "qwen3", hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            head_dim=64, intermediate_size=256, vocab_size=vocabulary, max_position_embeddings=1024,
        )
    )  # fmt: skip
    attach(model, choose("sdpa", torch.device("cpu")))
    rng = np.random.default_rng(0)
    length = min(num, LENGTH)
    tokens = [rng.integers(0, vocabulary, length + 1) for _ in range(num // length)]
    packed = PackedSequences.build(tokens, [np.arange(length + 1) > 0 for _ in tokens])

    def both_passes() -> None:
        model.zero_grad(set_to_none=True)
        if chunk:
            logprobs_N, _ = token_logprobs(model, packed, temperature=1.0, chunk_tokens=chunk, with_entropy=False)
        else:
            logits_NV = model.get_output_embeddings()(hidden_states(model, packed)[packed.sources_N])
            logprobs_N = torch.log_softmax(logits_NV.float(), -1).gather(-1, packed.targets_N[:, None])[:, 0]
        (-logprobs_N.mean()).backward()

    before_bytes = _resident_bytes()
    both_passes()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes
    began_s = time.perf_counter()
    for _ in range(REPEATS):
        both_passes()
    return {
        "predictions": num, "vocabulary": vocabulary, "chunk": chunk, "peak_mb": peak_bytes / MB,
        "logits_mb": num * vocabulary * 4 / MB, "seconds": (time.perf_counter() - began_s) / REPEATS,
    }  # fmt: skip


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
