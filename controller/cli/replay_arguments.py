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
  areal-like replay step_8.capsule             one step, on any machine
  areal-like replay quickstart --engine        the answers, drawn again under the versions stamped on their tokens

A replay of a run compares the metrics of every step, every kept checkpoint with its optimizer state, and the final
policy. A replay of a capsule compares the gradients, the metrics, and the weights and optimizer state after the step.
Nothing is written to the run.

With --engine the recorded answers are compared instead: each token is drawn again with the weights that sampled it,
which are those of a checkpoint or of a replay of the trainer. Tokens that differ only by rounding are counted as ties.

A replay needs the tokens of its steps (ledger.keep_mb), the starting model or a checkpoint, and the same kind of
hardware and package versions; differences are reported. On a GPU, some kernels add numbers in a different order each
time (docs/replay.md).

exit status: 0 all results are equal; 1 a result differs (the first difference is printed), or the trainer failed; 2 a
user error.
"""
_CAPSULE_EPILOG = """\
example:
  areal-like capsule quickstart --step 8 -o step_8.capsule

The file is a zip archive: weights and optimizer state before the step, the batch, the config without secrets,
package versions, and the results. It contains the prompts and answers of the step.
"""

_WHATIF_EPILOG = """\
examples:
  areal-like whatif quickstart trainer.loss.eps_high=0.4
  areal-like whatif quickstart trainer.optimizer.lr=3e-4 trainer.mini_batches=2
  areal-like whatif quickstart staleness.max_staleness=8
  areal-like whatif quickstart rollout.num_workers=2

Changes of trainer.loss, advantage, optimizer, mini_batches, passes_per_batch, critic, lora and other settings that use
the same samples are evaluated by training on the recorded batches again. Changes of the schedule are simulated with the
costs measured in the run. Settings that would change what is sampled or scored are rejected (docs/whatif.md).

exit status: 0 done; 1 the replay ended early, because the recorded samples are too unlikely under the changed policy; 2
a user error.
"""


def add_replay(commands: Any, command: Callable[..., Any], run_help: str) -> None:
    """Add the commands to the parser."""
    replay = command(
        commands, "replay",
        "repeat the recorded training steps of a run and compare the results bit for bit", _REPLAY_EPILOG,
        "Repeat the training steps of a run that has ended, or the step in a capsule, and compare the results bit for "
        "bit with the recorded ones.",
    )  # fmt: skip
    replay.add_argument("run", metavar="RUN|CAPSULE", help=f"{run_help}; or a file written by `areal-like capsule`")
    replay.add_argument(
        "--from", dest="first", type=whole, metavar="STEP",
        help="start from the newest kept checkpoint at or before this version (default: the starting model)",
    )  # fmt: skip
    replay.add_argument(
        "--to", dest="last", type=whole, metavar="STEP", help="last step to repeat (default: the last step of the run)"
    )
    replay.add_argument(
        "--engine", action="store_true",
        help="generate the recorded answers again and compare tokens and log-probs; --from and --to then select the "
        "answers by the steps that trained on them",
    )  # fmt: skip
    replay.add_argument(
        "--samples", type=whole, metavar="N",
        help="with --engine, compare only N samples, chosen at random but the same each time (default: all)",
    )  # fmt: skip
    replay.add_argument("--json", action="store_true", help="with --engine, print one JSON object")
    whatif = command(
        commands, "whatif", "evaluate changed settings on the recorded data of a run", _WHATIF_EPILOG,
        "For a run that has ended, train on its recorded batches with changed settings and compare each step with the "
        "recorded one; or simulate a changed schedule with the costs measured in the run.",
    )  # fmt: skip
    whatif.add_argument("run", metavar="RUN", help=run_help)
    whatif.add_argument("overrides", nargs="+", metavar="key.path=value", help="setting to change, and its new value")
    whatif.add_argument(
        "--from", dest="first", type=whole, metavar="STEP",
        help="start from the newest kept checkpoint at or before this version (default: the starting model)",
    )  # fmt: skip
    whatif.add_argument(
        "--to", dest="last", type=whole, metavar="STEP", help="last step to repeat (default: the last step of the run)"
    )
    whatif.add_argument(
        "--min-ess", type=_share, default=0.8, metavar="X",
        help="stop at the first step whose effective sample size, as a fraction of its tokens, is below X (default: "
        "0.8)",
    )  # fmt: skip
    whatif.add_argument("--json", action="store_true", help="print one JSON object")
    capsule = command(
        commands, "capsule", "write one step of a run to a file that can be replayed on any machine", _CAPSULE_EPILOG,
        "Write a file with everything that `areal-like replay FILE` needs to repeat one step of a run that has ended, "
        "for example for a bug report.",
    )  # fmt: skip
    capsule.add_argument("run", metavar="RUN", help=run_help)
    capsule.add_argument(
        "--step", type=whole, required=True, metavar="N", help="number of the step to write to the file"
    )
    capsule.add_argument("-o", "--out", required=True, metavar="FILE", help="output file, which must not exist")


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value
