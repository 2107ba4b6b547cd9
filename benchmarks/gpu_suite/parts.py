"""The list of the suite's parts in their order, with the packages they need and their time budgets.

isolation.py runs them. This module imports only the standard library. The quickstart comes last because it can use the
time that the others leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

WHEELS = {"zmq": "pyzmq", "yaml": "pyyaml"}
"""Package names that differ from the module's name."""


@dataclass(frozen=True)
class Part:
    """One part. `module`: in benchmarks.gpu_suite, with a function `run(context)`. Budgets are in seconds."""

    name: str
    module: str
    title: str
    quick_s: float
    full_s: float
    needs: tuple[str, ...] = ()
    """Modules that it imports in addition to torch, transformers and numpy."""

    def missing(self) -> list[str]:
        """Missing packages, by their names for pip."""
        return [WHEELS.get(module, module) for module in self.needs if find_spec(module) is None]


MESSAGES = ("msgspec", "pydantic", "psutil")
JOB = (*MESSAGES, "zmq", "yaml", "rich", "safetensors", "tokenizers")
PARTS = (
    Part("environment", "environment", "machine, versions and limits", 30, 60),
    Part("attention", "attention", "attention kernels against SDPA per sequence", 60, 240),
    Part("engine", "decoding", "embedded engine: decode and prefill", 65, 420, MESSAGES),
    Part("training", "training_speed", "trainer: MFU by length and packing", 65, 480, ("msgspec", "pydantic")),
    Part("logprobs", "logprob_memory", "log-probs: memory of chunks and of whole logits", 35, 120),
    Part("swap", "swapping", "a version through shared memory and disk into a generating engine", 50, 420, MESSAGES),
    Part("modes", "modes", "asynchronous against synchronous, two processes on one GPU", 70, 480, JOB),
    Part("quickstart", "quickstart", "the quickstart on the GPU", 100, 600, JOB),
)  # fmt: skip

QUICK_TOTAL_S = sum(part.quick_s for part in PARTS)
FULL_TOTAL_S = sum(part.full_s for part in PARTS)


def chosen(names: Sequence[str]) -> list[Part]:
    """The parts with these names in the suite's order; all if no name is given. Raises ValueError: an unknown name."""
    unknown = sorted(set(names) - {part.name for part in PARTS})
    if unknown:
        raise ValueError(f"no part called {', '.join(unknown)}; there are {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if not names or part.name in names]
