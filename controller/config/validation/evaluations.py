"""Cross-checks of the settings that depend on evaluations: the best checkpoint and the early stop.

They read only the configuration; metrics are computed in telemetry/eval_results.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from controller.config.eval_metrics import UNSAFE, metric_names
from controller.config.problems import Problem, nearest
from controller.config.run_config import RunConfig


def evaluation_problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of a best checkpoint or an early stop without the evaluations, checkpoints or metric that it needs."""
    if config.eval.slices and not config.data.eval_sources:
        yield Problem(("eval.slices",), "this key requires evaluation rows, but none are configured", "set data.eval")
    checkpoint = config.trainer.checkpoint
    for key, rule in (("trainer.checkpoint.best", checkpoint.best), ("early_stop", config.early_stop)):
        if rule is None:
            continue
        if not config.data.eval_sources or not config.eval.every_steps:
            what = "this key requires evaluations during training, but none are configured"
            yield Problem((key, "eval.every_steps"), what, "set data.eval, and set eval.every_steps to a value above 0")
            continue
        names = metric_names(config)
        if rule.metric not in names:
            near = nearest(rule.metric, names, count=3) or list(names)[:5]
            yield Problem(
                (f"{key}.metric",),
                f"no evaluation provides the metric `{rule.metric}`",
                f"use one of {', '.join(near)}",
            )
        elif rule.metric == UNSAFE and rule.mode == "max":
            what = f"more of {UNSAFE} is worse, but this key is max"
            yield Problem((f"{key}.mode", f"{key}.metric"), what, f"set {key}.mode: min")
    if checkpoint.best is not None and checkpoint.every_s is None:
        every = checkpoint.every_steps
        if not every or config.eval.every_steps % every:
            what = "this key requires a checkpoint of every evaluated version"
            remedy = "set trainer.checkpoint.every_steps to a divisor of eval.every_steps"
            yield Problem(("trainer.checkpoint.best", "trainer.checkpoint.every_steps"), what, remedy)
