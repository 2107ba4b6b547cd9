"""`areal-like probe CONFIG`: reports why the reward of a run would stay flat, before the run is started.

Prints the result and sets the exit status. The sampling and the analysis are in controller/probe/.
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
    """Probe and print; return 0 if nothing was found, else 1. Raises UserError, OperationError."""
    config = loaded.config
    if arguments.warm_start and config.warm_start is None:
        raise UserError(
            "the config has no supervised warm start", where="warm_start", remedy="remove the option --warm-start"
        )
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
