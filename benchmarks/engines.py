"""Does it matter which engine generates? The quickstart with each engine, seeds paired.

    python -m benchmarks.engines --seeds 1,2,3         3 seeds x 3 engines, about 40 minutes on two cores
    python -m benchmarks.engines --quick               2 seeds, 20 steps; writes nothing
    python -m benchmarks.engines rollout.interruption=keep_kv

Needs the environments of SGLang and vLLM (`make sglang-cpu vllm-cpu`). The engines sample from the same distributions
with different random numbers, so single runs differ, but the mean difference should be zero. Samples per second of a
run include the server's start. The comparison is described in benchmarks/paired.py.
"""

from __future__ import annotations

from benchmarks.paired import Comparison

if __name__ == "__main__":
    Comparison("engines", "rollout.engine.kind", ("embedded", "sglang", "vllm")).main(__doc__)
