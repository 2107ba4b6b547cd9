"""Compares the sandbox that the scorers of a configuration require with what this machine supports.

The trial and the choice of a layer are in layers.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.reward.code_options import CodeOptions
from services.reward.config import RewardSettings
from services.reward.sandbox.layers import sandbox_problem

SANDBOX_REMEDY = (
    "apt install bubblewrap, or use a kernel with Landlock (Linux 5.13); `areal-like doctor` shows what is missing; "
    "or set the option `require` to accept a weaker layer, in which programs can read your files"
)


def sandbox_problems(reward: RewardSettings) -> Iterator[tuple[str, str, str]]:
    """Problems if no sandbox is as strong as a scorer `code` requires: key below `reward`, fault, remedy."""
    for index, scorer in enumerate(() if reward.addresses else reward.scorers):
        if scorer.kind == "code":
            options = CodeOptions.model_validate(scorer.options)
            if fault := sandbox_problem(options.require, options.layer, options.python or ""):
                what = f"no sandbox layer as strong as `{options.require}` works on this machine: {fault}"
                yield f"scorers.{index}.options.require", what, SANDBOX_REMEDY
