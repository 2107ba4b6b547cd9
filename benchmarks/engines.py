"""Does it matter which engine generates? The quickstart with the embedded engine and with SGLang, seeds paired.

    python -m benchmarks.engines                       5 seeds x 2 engines, about an hour on two cores
    python -m benchmarks.engines --quick               2 seeds, 20 steps; writes nothing
    python -m benchmarks.engines rollout.interruption=keep_kv

Needs an environment with SGLang (`make sglang-cpu`). The engines sample from the same distributions with different
random numbers, so single runs differ, but the mean difference should be zero. Samples per second of a run include the
server's start. The comparison is described in benchmarks/paired.py.
"""

from __future__ import annotations

from benchmarks.paired import Comparison

if __name__ == "__main__":
    Comparison("engines", "rollout.engine.kind", ("embedded", "sglang")).main(__doc__)
