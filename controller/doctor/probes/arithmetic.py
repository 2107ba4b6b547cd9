"""Prints products per second and bytes copied per second with torch. Arguments: threads for `all`, repeats.

Each repeat is long enough to be timed (PIECE_S).
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

SIDE = 1024
COPY_BYTES = 256 << 20
PIECE_S = 0.25


def rate(work: Callable[[], Any], per_call: float) -> float:
    """Amount per second, over as many calls as fit into PIECE_S."""
    calls, started_s = 0, time.perf_counter()
    while (wall_s := time.perf_counter() - started_s) < PIECE_S:
        work()
        calls += 1
    return calls * per_call / wall_s


def main() -> None:
    num_threads, repeats = int(sys.argv[1]), int(sys.argv[2])
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    one, other, out = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE), torch.empty(SIDE, SIDE)
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    rates: dict[str, list[float]] = {"product_1": [], "product_all": [], "copy": []}
    # the first is a warm-up; the measurements alternate, so that a disturbance affects all of them
    for repeat in range(repeats + 1):
        for name, threads in (("product_1", 1), ("product_all", num_threads), ("copy", 1)):
            torch.set_num_threads(threads)
            if name == "copy":
                value = rate(lambda: target.copy_(source), COPY_BYTES)
            else:
                value = rate(lambda: torch.mm(one, other, out=out), 2.0 * SIDE**3)
            if repeat:
                rates[name].append(value)
    print("areal_like-doctor " + json.dumps(rates), flush=True)


main()
