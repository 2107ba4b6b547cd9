"""Does it matter which engine generates? The quickstart with the embedded engine and with SGLang, seeds paired.

    python -m benchmarks.engines                       5 seeds x 2 engines, about an hour on two cores
    python -m benchmarks.engines --quick               2 seeds, 20 steps; writes nothing
    python -m benchmarks.engines rollout.interruption=keep_kv

Needs an environment with SGLang (`make sglang-cpu`). The engines sample from the same distributions with other random
numbers, so single runs differ and their mean difference should not. Samples per second of the run include the server's
start. What is compared, and how: benchmarks/paired.py.
"""

from __future__ import annotations

from benchmarks.paired import Comparison

if __name__ == "__main__":
    Comparison("engines", "rollout.engine.kind", ("embedded", "sglang")).main(__doc__)
