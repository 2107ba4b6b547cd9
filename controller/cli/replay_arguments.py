"""Arguments of `areal-like replay`, `areal-like whatif` and `areal-like capsule`.

The commands are in controller/runs/replay/.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from areal_like.arguments import whole

_REPLAY_EPILOG = """\
examples:
  areal-like replay quickstart                 all steps, from the starting model
  areal-like replay quickstart --from 60       from the newest kept checkpoint up to version 60
  areal-like replay step_8.capsule             one step, anywhere

Compared are the metrics of every step, every kept checkpoint with its optimizer state, and the final policy; of a
capsule the gradients, the metrics, and the weights and optimizer state after the step. Nothing is written to the run.

A replay needs the tokens of its steps (ledger.keep_mb), the starting model or a checkpoint, and the same kind of
hardware and packages: other ones are noted. On a GPU some kernels add in another order each time (docs/replay.md).

exit status: 0 everything is equal; 1 something differs (the first difference is printed), or the trainer failed;
2 a user error.
"""
_CAPSULE_EPILOG = """\
example:
  areal-like capsule quickstart --step 8 -o step_8.capsule

The file is a zip archive: weights and optimizer state before the step, the batch, the config without secrets,
versions of packages, and what came out. It holds the prompts and answers of the step.
"""

_WHATIF_EPILOG = """\
examples:
  areal-like whatif quickstart trainer.loss.eps_high=0.4
  areal-like whatif quickstart trainer.optimizer.lr=3e-4 trainer.mini_batches=2
  areal-like whatif quickstart staleness.max_staleness=8
  areal-like whatif quickstart rollout.num_workers=2

Settings of trainer.loss, advantage, optimizer, mini_batches, passes_per_batch, critic, lora and others that use the
same samples are answered by training on the recorded batches again. Settings of the schedule are simulated with the
costs that the run measured. Settings that change what would have been sampled or scored are refused (docs/whatif.md).

exit status: 0 answered; 1 the replay ended early, because the recorded samples say too little about the changed
policy; 2 a user error.
"""


def add_replay(commands: Any, command: Callable[..., Any], run_help: str) -> None:
    """Add the commands to the parser."""
    replay = command(
        commands, "replay", "train the recorded steps of a run again and compare, bit for bit", _REPLAY_EPILOG,
        "Train the recorded steps of a run that has ended again, or the step of a capsule, and compare what comes out "
        "with the record, bit for bit.",
    )  # fmt: skip
    replay.add_argument("run", metavar="RUN|CAPSULE", help=f"{run_help}; or the file of a capsule")
    replay.add_argument(
        "--from", dest="first", type=whole, metavar="STEP",
        help="start from the newest kept checkpoint up to this version (without it from the starting model)",
    )  # fmt: skip
    replay.add_argument("--to", dest="last", type=whole, metavar="STEP", help="the last step (that of the run)")
    whatif = command(
        commands, "whatif", "other settings of the trainer or the schedule on what a run recorded", _WHATIF_EPILOG,
        "Train on the recorded batches of a run that has ended with other settings, and compare each step with the "
        "record; or simulate another schedule with the costs of the run.",
    )  # fmt: skip
    whatif.add_argument("run", metavar="RUN", help=run_help)
    whatif.add_argument("overrides", nargs="+", metavar="key.path=value", help="a changed setting")
    whatif.add_argument("--from", dest="first", type=whole, metavar="STEP", help="as in areal-like replay")
    whatif.add_argument("--to", dest="last", type=whole, metavar="STEP", help="the last step (that of the run)")
    whatif.add_argument(
        "--min-ess", type=_share, default=0.8, metavar="X",
        help="end where the effective sample size is a smaller share of a step's tokens (0.8)",
    )  # fmt: skip
    whatif.add_argument("--json", action="store_true", help="print one JSON object")
    capsule = command(
        commands, "capsule", "write one step of a run to a file that repeats it anywhere", _CAPSULE_EPILOG,
        "Write one file with everything that `areal-like replay FILE` needs to repeat a step of a run that has ended, "
        "for a bug report.",
    )  # fmt: skip
    capsule.add_argument("run", metavar="RUN", help=run_help)
    capsule.add_argument("--step", type=whole, required=True, metavar="N", help="the step")
    capsule.add_argument("-o", "--out", required=True, metavar="FILE", help="a new file")


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value
