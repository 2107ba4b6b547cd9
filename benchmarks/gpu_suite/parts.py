"""The parts of the suite: what each is called, what it needs, how long it may take.

Owns: the list, its order, packages and budgets. Refuses: running them (isolation.py). Imports nothing heavy.

The quickstart comes last, because it can use whatever time the others left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

WHEELS = {"zmq": "pyzmq", "yaml": "pyyaml"}
"""Where a package is called otherwise than the module it brings."""


@dataclass(frozen=True)
class Part:
    """One question. `module`: in benchmarks.gpu_suite, with a function `run(context)`. Budgets in seconds."""

    name: str
    module: str
    title: str
    quick_s: float
    full_s: float
    needs: tuple[str, ...] = ()
    """Modules beyond torch, transformers and numpy that it imports."""

    def missing(self) -> list[str]:
        """Names to install, as pip knows them."""
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
    """The parts of these names in the suite's order; all when there are none. Raises ValueError for an unknown one."""
    unknown = sorted(set(names) - {part.name for part in PARTS})
    if unknown:
        raise ValueError(f"no part called {', '.join(unknown)}; there are {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if not names or part.name in names]
