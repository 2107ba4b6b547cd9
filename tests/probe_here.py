"""The processes of `areal-like probe`, run in this one: each start of Python imports torch and transformers again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import rollout.probe_answers
import services.reward.try_answers
import trainer.probe_logprobs
from trainer.prepare import prepare
from trainer.prepare_spec import PrepareSpec

MODULES = {
    "rollout.probe_answers": rollout.probe_answers.main,
    "services.reward.try_answers": services.reward.try_answers.main,
    "trainer.probe_logprobs": trainer.probe_logprobs.main,
}


def run_here(arguments: Sequence[str], limit_s: float) -> None:
    """In the place of controller.probe.probe.run_module."""
    with contextlib.redirect_stdout(sys.stderr):  # a package that is imported may print, as DeepSpeed does
        if arguments[0] == "trainer.prepare":
            prepare(PrepareSpec.load(Path(arguments[2])))
        else:
            MODULES[arguments[0]](Path(arguments[1]), Path(arguments[2]))
