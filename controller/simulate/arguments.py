"""Arguments of `areal-like simulate`. The command is in command.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_EPILOG = """\
examples:
  areal-like simulate math_8b_8gpu --gpus 128 --model 7b --lengths 6000:0.9
  areal-like simulate math_8b_8gpu --sweep rollout_share=0.5,0.75 --plot a.png
  areal-like simulate math_8b_8gpu --gpus 64 --sweep mode=sync,one_step_off,async
  areal-like simulate quickstart --calibrate quickstart --sweep mode=sync,async

In `mode: sync`, generation and training take turns on all GPUs. In other modes, --rollout-share is the fraction of the
GPUs that generate.

Admission, leases, staleness, batching and the distribution over ranks are computed by the real coordinator. Only the
time that a GPU takes is modelled. The defaults of --efficiency are typical values, not measurements; --calibrate is
more accurate for your own machines.
"""


def add_simulate(commands: Any, command: Callable[..., Any], positive: Callable[[str], float]) -> None:
    """Add the command to the parser."""
    simulate = command(
        commands, "simulate",
        "predict step time, waiting times and the best split of GPUs for a job without running it",
        _EPILOG,
        "Simulate a job: the real coordinator runs on a virtual clock, with modelled GPUs or with costs measured in "
        "one of your runs. The simulation predicts step time, waiting times and staleness, and finds the best split of "
        "GPUs.",
    )  # fmt: skip
    simulate.add_argument(
        "config", metavar="CONFIG", help="a YAML file, a run's folder, or the name of a shipped config"
    )
    simulate.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help="override one key")
    simulate.add_argument(
        "--gpu", metavar="KIND", help="GPU model: h100, h200, a100, ... (default: hardware.gpu of the config, or h800)"
    )
    simulate.add_argument("--gpus", type=_number, metavar="N", help="number of GPUs of the whole job (default: 8)")
    simulate.add_argument(
        "--rollout-share", type=_share, metavar="X", help="fraction of the GPUs used for rollout (default: 0.75)"
    )
    simulate.add_argument(
        "--tp",
        type=_number,
        metavar="N",
        help="number of GPUs per rollout worker (default: as many as the weights need)",
    )
    simulate.add_argument(
        "--model", default="", metavar="M", help="model: 1.5b, 7b, qwen3-8b, ..., or a folder with config.json"
    )
    simulate.add_argument(
        "--lengths", default="", metavar="L",
        help="answer lengths: `thinking` (a built-in table of measured lengths), MEAN, MEAN:CV (log-normal with this "
        "mean and coefficient of variation), a run's folder, or a JSON file with a list of lengths per group; append "
        "@MEAN to the name of a file to scale its lengths to that mean",
    )  # fmt: skip
    simulate.add_argument(
        "--prompt-tokens",
        type=_number,
        metavar="N",
        help="prompt length in tokens (default: 200, or the prompt length of the --calibrate run)",
    )
    simulate.add_argument(
        "--reward-s", type=positive, default=0.0, metavar="S", help="seconds that scoring an answer takes (default: 0)"
    )
    simulate.add_argument(
        "--steps",
        type=_number,
        metavar="N",
        help="number of steps to simulate (default: num_steps of the config, at most 100)",
    )
    simulate.add_argument(
        "--sweep", action="append", default=[], metavar="key=a,b,c",
        help="simulate each of these values of a config key, or of gpus, rollout_share or tp; this option can be "
        "repeated",
    )  # fmt: skip
    simulate.add_argument(
        "--efficiency",
        action="append",
        default=[],
        metavar="key=X",
        help="replace an assumed efficiency: bandwidth, train_mfu or prefill_mfu (a fraction of the GPU's peak), or "
        "decode_floor_s, step_overhead_s or reduction_s (seconds); this option can be repeated",
    )
    simulate.add_argument("--calibrate", default="", metavar="RUN", help="use the costs measured in this run")
    simulate.add_argument(
        "--plot", default="", metavar="FILE", help="plot the results of the sweep to this file (.png, .svg or .pdf)"
    )
    simulate.add_argument("--json", action="store_true", help="print a JSON list, one object per variant")


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) <= 10_000_000:
        raise _error(f"{text!r} is not a whole number above 0")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise _error(f"{text!r} is not between 0 and 1")
    return value


def _error(words: str) -> Exception:
    import argparse

    return argparse.ArgumentTypeError(words)
