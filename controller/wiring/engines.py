"""Checks of engine arguments that the engine's own package makes."""

from __future__ import annotations

from areal_like.errors import UserError
from controller.config.run_config import RunConfig
from rollout.engine.sglang.arguments import extra_words
from rollout.engine.sglang.environment import argument_table, check_version, find_python


def engine_argument_problems(config: RunConfig) -> list[UserError]:
    """What the environment of `rollout.engine.kind: sglang` lacks here, and arguments its version does not take."""
    engine = config.rollout.engine
    if engine.kind != "sglang" or engine.sglang.attach:
        return []
    try:
        python = find_python(engine.python)
        check_version(python)
        interruption = "drain" if config.mode == "one_step_off" else config.rollout.interruption
        if engine.sglang.arguments:
            extra_words(engine, argument_table(python, is_cpu=engine.device == "cpu"), interruption)
    except UserError as error:
        return [error]
    return []
