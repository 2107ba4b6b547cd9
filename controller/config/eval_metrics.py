"""Names of the metrics of an evaluation, derived from the configuration.

They are computed in telemetry/eval_results.py.
"""

from __future__ import annotations

from controller.config.run_config import RunConfig

UNSAFE = "red_team_unsafe"
RED_TEAM_METRICS = ("red_team_refused", UNSAFE)
"""Shares of the answers to data.red_team."""
ACCURACY, PASS = "accuracy", "pass_at_"


def chosen_ks(num_samples: int) -> tuple[int, ...]:
    """Values of k for pass@k: the powers of two up to the number of answers, and that number. Empty with one answer per
    row."""
    if num_samples < 2:
        return ()
    return tuple(sorted({*(2**power for power in range(num_samples.bit_length())), num_samples}))


def metric_names(config: RunConfig) -> tuple[str, ...]:
    """Names of the metrics of this run's evaluations."""
    plain = (ACCURACY, *(f"{PASS}{k}" for k in chosen_ks(config.eval.num_samples)))
    sets = config.data.accuracy_sets
    of_sets = tuple(f"{name}/{of}" for of in sets for name in plain) if len(sets) > 1 else ()
    return plain + of_sets + (RED_TEAM_METRICS if config.data.red_team is not None else ())
