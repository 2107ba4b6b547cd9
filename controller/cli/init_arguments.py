"""Arguments of `areal-like init`. The command is in init.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from controller.cli.new_job import ANSWER_KINDS, HARDWARE, TRACKERS


def add_init(commands: Any, make: Callable[..., Any]) -> None:
    """Add the command; `make` creates its parser."""
    command = make(
        commands, "init", "write a first config, and a scorer with its test where one is needed", "",
        "Ask five questions, or read the answers from flags, write a config based on the most similar recipe, and "
        "validate it, and probe the starting model if it is small. Existing files are never overwritten.",
    )  # fmt: skip
    command.add_argument("config", nargs="?", default="job.yaml", metavar="FILE", help="file to write (job.yaml)")
    command.add_argument("--data", metavar="ROWS", help="train.jsonl, or train.jsonl,heldout.jsonl")
    command.add_argument("--answer", choices=list(ANSWER_KINDS), help="kind of the answers (math)")
    command.add_argument("--model", metavar="M", help="hub name, folder, or tiny (the default: random weights)")
    command.add_argument("--hardware", choices=list(HARDWARE), help="hardware that the job will run on (cpu)")
    command.add_argument("--tracker", choices=list(TRACKERS), help="service that also receives the metrics (none)")
    command.add_argument(
        "--probe", action=argparse.BooleanOptionalAction, default=None,
        help="sample the starting model, and fail if its reward would stay flat "
        "(default: sample it if the model is on this machine and small)",
    )  # fmt: skip
