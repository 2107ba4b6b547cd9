"""Prints the GPUs that torch sees and whether each computes. Run by path, in a separate process with a deadline.

Uses CUDA or ROCm through torch, without changing settings of a device.
"""

from __future__ import annotations

import importlib
import json
from typing import Any


def device(torch: Any, index: int) -> dict[str, Any]:
    """Test one device with a small product."""
    properties = torch.cuda.get_device_properties(index)
    facts: dict[str, Any] = {
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "capability": [properties.major, properties.minor],
        "fault": "",
    }
    try:
        facts["free_bytes"] = torch.cuda.mem_get_info(index)[0]
        ones = torch.ones(256, 256, device=f"cuda:{index}")
        total = float((ones @ ones).sum())
        facts["fault"] = "" if total == 256.0**3 else f"computes a wrong result: {total} instead of {256.0**3}"
    except Exception as error:  # any error of a driver is the finding
        facts["fault"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return facts


def main() -> None:
    torch: Any = importlib.import_module("torch")
    fault, devices, peers = "", [], []
    try:
        torch.cuda.init()
        devices = [device(torch, index) for index in range(torch.cuda.device_count())]
        indices = range(len(devices))
        peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in indices] for a in indices]
    except Exception as error:  # "no driver", "driver too old", ...: the finding
        fault = " ".join(str(error).split())[:300]
    facts = {"fault": fault, "devices": devices, "peers": peers}
    print("areal_like-doctor " + json.dumps(facts), flush=True)


main()
