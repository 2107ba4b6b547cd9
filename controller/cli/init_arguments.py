"""Arguments of `areal-like init`. The command is in init.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from controller.cli.new_job import ANSWER_KINDS, HARDWARE, TRACKERS


def add_init(commands: Any, make: Callable[..., Any]) -> None:
    """Add the command; `make` creates its parser."""
    command = make(
        commands, "init", "write a first config and, if needed, a scorer with a test", "",
        "Ask five questions (or read the answers from options), write a config based on the most similar recipe, "
        "validate it, and probe the starting model if it is small. Existing files are never overwritten.",
    )  # fmt: skip
    command.add_argument(
        "config", nargs="?", default="job.yaml", metavar="FILE", help="config file to write (default: job.yaml)"
    )
    command.add_argument(
        "--data",
        metavar="ROWS",
        help="training data, optionally with held-out data: train.jsonl or train.jsonl,heldout.jsonl",
    )
    command.add_argument("--answer", choices=list(ANSWER_KINDS), help="kind of answers (default: math)")
    command.add_argument(
        "--model",
        metavar="M",
        help="Hugging Face Hub name or folder of a model, or `tiny` for a small model with random weights (default: "
        "tiny)",
    )
    command.add_argument("--hardware", choices=list(HARDWARE), help="hardware that the job will run on (default: cpu)")
    command.add_argument(
        "--tracker", choices=list(TRACKERS), help="experiment tracker that also receives the metrics (default: none)"
    )
    command.add_argument(
        "--probe", action=argparse.BooleanOptionalAction, default=None,
        help="probe the starting model, and fail if its reward would stay flat (default: probe it, without failing, if "
        "the job runs on a CPU and the model is small and on this machine)",
    )  # fmt: skip
