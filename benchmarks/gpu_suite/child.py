"""`python -m benchmarks.gpu_suite.child REQUEST`: runs one part; started by isolation.py, not by hand."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

PARENT_POLL_S = 0.5

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; one thread per process, as in a run


def main() -> None:
    """Run the part that the request names; rows are written to its file, everything else to standard output."""
    request = json.loads(sys.argv[1])
    start_s = time.monotonic()
    threading.Thread(target=_follow, args=(request["parent_pid"],), daemon=True).start()
    logging.basicConfig(level=logging.WARNING)
    from benchmarks.gpu_suite.case import Context, Row

    rows = Path(request["rows"]).open("w", buffering=1)  # noqa: SIM115

    def write(row: Row) -> None:
        rows.write(json.dumps({key: _plain(value) for key, value in row.items()}, allow_nan=False) + "\n")

    context = Context(
        device=request["device"], is_quick=request["is_quick"], is_tiny=request["is_tiny"],
        scratch=Path(request["scratch"]), shared_memory=Path(request["shared_memory"]),
        deadline_s=start_s + request["budget_s"], write=write,
    )  # fmt: skip
    part = importlib.import_module(f"benchmarks.gpu_suite.{request['module']}")
    part.run(context)


def _plain(value: Any) -> Any:
    """A JSON value: numbers with six digits, values that are not finite as text."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def _follow(parent_pid: int) -> None:
    """End when the parent process ends, even if it was killed."""
    while os.getppid() == parent_pid:
        time.sleep(PARENT_POLL_S)
    os.killpg(os.getpgid(0), 9)


if __name__ == "__main__":
    main()
