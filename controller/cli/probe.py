"""`areal-like probe CONFIG`: why a reward would stay flat, before a run is paid for.

Owns: the command's arguments, its output and exit status. Refuses: looking and judging (controller/probe/).
"""

from __future__ import annotations

import argparse
import signal
import sys

from areal_like.errors import UserError
from controller.config.loading import LoadedConfig
from controller.data.table import Table
from controller.probe.findings import find
from controller.probe.page import as_json, as_text
from controller.probe.probe import Probe


def probe(arguments: argparse.Namespace, loaded: LoadedConfig, table: Table | None) -> int:
    """Probe and print; 0 where nothing was found, else 1. Raises UserError, OperationError."""
    config = loaded.config
    if arguments.warm_start and config.warm_start is None:
        raise UserError("there are no supervised steps", where="warm_start", remedy="leave --warm-start out")
    assert table is not None, "preflight reads the rows"
    looking = Probe(
        config, arguments.prompts, arguments.samples, arguments.warm_start,
        say=lambda words: print(f"probe: {words}", file=sys.stderr, flush=True),
    )  # fmt: skip
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: its folder may hold a whole model
    try:
        seen, notes = looking.run(table)
    finally:
        signal.signal(signal.SIGTERM, before)
    findings = find(seen)
    show = as_json if arguments.json else as_text
    sys.stdout.write(show(config.name, seen, findings, notes))
    return int(bool(findings))
