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

In `mode: sync` every phase has all GPUs, one after the other; otherwise --rollout-share of them generate.

What is real: admission, leases, staleness, batching, dealing to ranks. What is a model: how long a GPU takes. The
defaults of --efficiency are typical values, not measured; --calibrate describes your own machines better.
"""


def add_simulate(commands: Any, command: Callable[..., Any], positive: Callable[[str], float]) -> None:
    """Add the command to the parser."""
    simulate = command(
        commands, "simulate", "predict a job's step time, waiting times and best GPU split, without running it",
        _EPILOG,
        "Simulate a job: the real coordinator runs under a virtual clock, with modelled GPUs or costs measured in "
        "one of your runs. Predicts step time, waiting times and staleness, and finds the best split of GPUs.",
    )  # fmt: skip
    simulate.add_argument("config", metavar="CONFIG", help="YAML file or shipped config")
    simulate.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help="override one key")
    simulate.add_argument("--gpu", metavar="KIND", help="h100, h200, a100, ... (hardware.gpu of the config, or h800)")
    simulate.add_argument("--gpus", type=_number, metavar="N", help="GPUs of the whole job (8)")
    simulate.add_argument("--rollout-share", type=_share, metavar="X", help="share of the GPUs for rollout (0.75)")
    simulate.add_argument(
        "--tp", type=_number, metavar="N", help="GPUs of one rollout worker (as many as its weights need)"
    )
    simulate.add_argument(
        "--model", default="", metavar="M", help="1.5b, 7b, qwen3-8b, ..., or a folder with config.json"
    )
    simulate.add_argument(
        "--lengths", default="", metavar="L",
        help="answer lengths: thinking (a measured table), MEAN, MEAN:CV (log-normal), a run's folder, or a JSON file "
        "with lists of lengths by group; FILE@MEAN scales it",
    )  # fmt: skip
    simulate.add_argument(
        "--prompt-tokens",
        type=_number,
        metavar="N",
        help="prompt length in tokens (200, or that of the --calibrate run)",
    )
    simulate.add_argument("--reward-s", type=positive, default=0.0, metavar="S", help="seconds per verdict (0)")
    simulate.add_argument("--steps", type=_number, metavar="N", help="steps to simulate (num_steps, at most 100)")
    simulate.add_argument(
        "--sweep", action="append", default=[], metavar="key=a,b,c",
        help="try these values of a config key, or of gpus, rollout_share, tp; may be given several times",
    )  # fmt: skip
    simulate.add_argument(
        "--efficiency",
        action="append",
        default=[],
        metavar="key=X",
        help="share of the data sheet's figures that is achieved",
    )
    simulate.add_argument("--calibrate", default="", metavar="RUN", help="use the costs measured in this run")
    simulate.add_argument("--plot", default="", metavar="FILE", help="draw the sweep (.png, .svg, .pdf)")
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
