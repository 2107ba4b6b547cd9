"""What the scorers of a configuration demand of the sandbox, against what this machine has.

Owns: the question before a run starts, the remedy. Refuses: the trial itself (layers), choosing a layer (layers).
"""

from __future__ import annotations

from collections.abc import Iterator

from services.reward.code_options import CodeOptions
from services.reward.config import RewardSettings
from services.reward.sandbox.layers import sandbox_problem

SANDBOX_REMEDY = (
    "apt install bubblewrap, or use a kernel with Landlock (Linux 5.13); `areal-like doctor` shows what is missing; "
    "option `require` accepts a weaker layer, in which programs read your files"
)


def sandbox_problems(reward: RewardSettings) -> Iterator[tuple[str, str, str]]:
    """Where no sandbox is as strong as a scorer `code` demands: key below `reward`, what is wrong, what to do."""
    for index, scorer in enumerate(() if reward.addresses else reward.scorers):
        if scorer.kind == "code":
            options = CodeOptions.model_validate(scorer.options)
            if fault := sandbox_problem(options.require, options.layer, options.python or ""):
                what = f"no sandbox as strong as `{options.require}` works here: {fault}"
                yield f"scorers.{index}.options.require", what, SANDBOX_REMEDY
