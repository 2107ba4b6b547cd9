"""Does asynchrony cost accuracy, and what does it gain? The quickstart in three modes, seeds paired.

    python -m benchmarks.modes                       5 seeds x 3 modes, about 35 minutes on two cores
    python -m benchmarks.modes --quick               2 seeds, 20 steps, about 5 minutes; writes nothing
    python -m benchmarks.modes configs/mine.yaml num_steps=40

`sync` has all cores in both phases, strictly one after the other; `async` has one core per process. What is compared,
and how: benchmarks/paired.py.
"""

from __future__ import annotations

from benchmarks.paired import Comparison

if __name__ == "__main__":
    Comparison("modes", "mode", ("sync", "one_step_off", "async")).main(__doc__)
