"""`Screen`: the console that a command writes to, which tolerates a closed output.

If the output is closed (`areal-like train ... | head`, a closed terminal), text is discarded and the command continues:
hours of training are worth more than their last lines on a terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from rich.console import Console

log = logging.getLogger(__name__)


class Screen(Console):
    """Standard output without interpretation of text: no markup, no highlighting, no wrapping of printed lines."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"highlight": False, "soft_wrap": True, "markup": False, **more})

    def on_broken_pipe(self) -> None:
        """Stop writing. rich would exit the process here."""
        self.quiet = True
        log.warning("the output of this command was closed by its reader; the run continues without printing")
        with contextlib.suppress(OSError, ValueError):  # a file without a descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            # otherwise the interpreter fails at its exit, when it flushes the stream
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)
