"""Does asynchrony cost accuracy, and what does it gain? The quickstart in three modes, seeds paired.

    python -m benchmarks.modes                       5 seeds x 3 modes, about 35 minutes on two cores
    python -m benchmarks.modes --quick               2 seeds, 20 steps, about 5 minutes; writes nothing
    python -m benchmarks.modes configs/mine.yaml num_steps=40

`sync` uses all cores in each phase, strictly one phase after the other, with a rollout worker on each core, which the
search of benchmarks/async_vs_sync.py finds fastest for such a small model (CONFIG runs with its own number of workers);
`async` has one core per process. The comparison is described in benchmarks/paired.py.
"""

from __future__ import annotations

from benchmarks.paired import Comparison
from controller.wiring.process_specs import num_cores


def main() -> None:
    a_core_each = (f"rollout.num_workers={num_cores()}", "rollout.threads=1")
    Comparison("modes", "mode", ("sync", "one_step_off", "async"), {"sync": a_core_each}).main(__doc__)


if __name__ == "__main__":
    main()
