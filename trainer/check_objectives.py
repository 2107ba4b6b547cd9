"""`python -m trainer.check_objectives IN OUT`: checks that a user's loss or advantages can be imported and used.

It calls them in a short-lived process, so that an error is found before a run starts. The contents of IN and OUT are
described in areal_like/user_check.py; the options are the full section trainer.loss or trainer.advantage. Imports are
in trainer/objectives/own_code.py, the call of a loss in trainer/objectives/trial.py.

Options, needs and combinations are checked without torch. A loss is called if torch is installed. Otherwise, for
example on a controller that trains on other hosts, the trainer calls it before its first step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from areal_like import quick_exit
from areal_like.errors import UserError
from areal_like.user_check import answer
from trainer.config import AdvantageSettings, LossSettings
from trainer.objectives.advantage import advantages_of, rewarded, targets_of
from trainer.objectives.own_code import ADVANTAGE_KEY, own_advantage
from trainer.objectives.port import Fault
from trainer.objectives.registry import advantage_faults, loss_faults


def check_objective(name: str, section: dict[str, Any]) -> None:
    """Check a loss or advantages with their section. Raises UserError for the first error."""
    kind, has_critic = section.pop("of"), section.pop("has_critic", False)
    if kind == "advantage":
        check_advantage(AdvantageSettings.model_validate(section), has_critic=has_critic)
    else:
        facts = {key: section.pop(key, False) for key in ("has_versions", "is_for_any_policy")}
        check_loss(LossSettings.model_validate(section), has_critic=has_critic, **facts)


def check_loss(
    settings: LossSettings, *, has_critic: bool = False, has_versions: bool = False, is_for_any_policy: bool = False
) -> None:
    """Import a loss, check its options and combinations, and call it if torch is installed. Raises UserError."""
    facts = {"has_critic": has_critic, "has_versions": has_versions, "is_for_any_policy": is_for_any_policy}
    _raise_first(loss_faults(settings, imports_own=True, **facts))
    if find_spec("torch") is not None:
        from trainer.objectives.trial import try_loss  # takes seconds, and the controller may have no torch

        try_loss(settings)


def check_advantage(settings: AdvantageSettings, *, has_critic: bool = False) -> None:
    """Import advantages, check their options, and call them on two groups of two samples. Raises UserError."""
    own = own_advantage(settings.kind)
    _raise_first(advantage_faults(settings, group_size=2, advantage=own, has_critic=has_critic))
    try:
        samples = rewarded(np.array([0.0, 1.0, 1.0, 1.0]), np.array([0, 0, 1, 1]), [2, 1, 3, 2], settings)
        if has_critic:
            samples = replace(
                samples,
                values_N=np.array([0.5, 0.4, 0.1, 0.3, 0.6, 0.9, 0.2, 0.0]),
                end_values_Q=np.array([0.2, 0.1, 0.8, 0.0]),
                turn_starts_N=np.array([True, True, True, True, True, False, True, False]),
                is_cut_Q=np.array([False, True, False, False]),
            )
            targets_of(samples, settings)
        if own.needs_starts:
            log_weights_B, square_norms_B = np.array([0.1, -0.2, 0.0, 0.3]), np.array([1.0, 2.0, 0.5, 1.0])
            samples = replace(samples, log_weights_B=log_weights_B, square_norms_B=square_norms_B)
        advantages_of(samples, settings)
    except UserError:
        raise
    except Exception as error:  # the user's code
        what = f"{settings.kind} failed on four samples ({type(error).__name__}: {error})"
        remedy = "check the code of the function, which is called as advantage(samples, **options)"
        raise UserError(what, where=ADVANTAGE_KEY, remedy=remedy) from error


def _raise_first(faults: Iterator[Fault]) -> None:
    for fault in faults:
        raise UserError(f"{fault.key}: {fault.what}", where=fault.key, remedy=fault.remedy)


if __name__ == "__main__":
    quick_exit.run(lambda: answer(Path(sys.argv[1]), Path(sys.argv[2]), check_objective))
