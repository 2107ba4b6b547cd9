"""The console that a command writes to, which outlives its reader.

Owns: `Screen`. Refuses: layout.

Where nobody reads any more (`areal-like train ... | head`, a closed terminal), what would be shown is dropped and
whatever the command does goes on: hours of training are worth more than their last lines on a screen.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from rich.console import Console

log = logging.getLogger(__name__)


class Screen(Console):
    """Standard output, with texts shown as they are: no markup, no highlighting, no wrapping of printed lines."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"highlight": False, "soft_wrap": True, "markup": False, **more})

    def on_broken_pipe(self) -> None:
        """Nothing more is written. rich would end the process here."""
        self.quiet = True
        log.warning("nobody reads the output of this command any more; it goes on without")
        with contextlib.suppress(OSError, ValueError):  # a file without a descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())  # or the interpreter fails at its end, when it flushes the stream
            os.close(nowhere)
