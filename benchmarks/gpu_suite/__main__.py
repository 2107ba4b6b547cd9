"""What can this GPU do with areal_like? One command, one CUDA GPU, nothing downloaded.

    python -m benchmarks.gpu_suite --quick              under 8 minutes
    python -m benchmarks.gpu_suite                      more sizes, under 50 minutes
    python -m benchmarks.gpu_suite --only engine,swap   some parts
    python -m benchmarks.gpu_suite --device cpu --quick a self-check on tiny shapes, whose figures mean nothing

Parts: environment, attention, engine, training, logprobs, swap, modes, quickstart (see their docstrings).
Each runs in a separate process with a deadline; a part that fails or lacks a package does not affect the others. Time
that a part does not use is given to the next ones. Needs torch 2.11, transformers 5.17 or newer and a few small
packages.

Exit status: 1 if a part failed (not if one was skipped or cut), 2 if there is no device to run on.
benchmarks/results/gpu_suite.json is written if every part is done, on CUDA; --out FILE writes in any case.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.folders import RESULTS
from benchmarks.gpu_suite.isolation import Outcome, run_part
from benchmarks.gpu_suite.parts import PARTS, Part, chosen
from benchmarks.gpu_suite.tables import render
from benchmarks.publishing import add_replace, result_path
from benchmarks.runs import command_of, write

SELF_CHECK = "SELF-CHECK ON A CPU: tiny shapes; it shows that the suite runs, and its figures have no meaning"
SELF_CHECK_PATIENCE = 4
"""Factor on the budget for a CPU that may have other work: the duration of a self-check has no meaning."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen parts and return the exit status."""
    options = _options(arguments)
    parts = options.parts
    obstacle = _obstacle(options.device)
    if obstacle:
        print(f"error: {obstacle}", file=sys.stderr)
        return 2
    is_tiny = options.device == "cpu"
    signal.signal(signal.SIGTERM, _terminated)
    if is_tiny:
        print(SELF_CHECK)
    start_s = time.monotonic()
    outcomes = run_all(parts, device="cpu" if is_tiny else "cuda:0", is_quick=options.quick or is_tiny)
    is_complete = not is_tiny and len(parts) == len(PARTS) and all(outcome.status == "done" for outcome in outcomes)
    print(f"\n{'part':<12} {'':<8} {'s':>5}")
    for outcome in outcomes:
        print(f"{outcome.part:<12} {outcome.status:<8} {outcome.wall_s:>5.0f}  {outcome.reason}".rstrip())
    wall_s = time.monotonic() - start_s
    print(f"{wall_s:.0f} s in all")
    _save(options, outcomes, wall_s=wall_s, is_complete=is_complete, is_tiny=is_tiny)
    if is_tiny:
        print(SELF_CHECK)
    return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


def run_all(parts: Sequence[Part], *, device: str, is_quick: bool) -> list[Outcome]:
    """Run every part in its own process and print its tables as they arrive."""
    is_tiny = device == "cpu"
    patience = SELF_CHECK_PATIENCE if is_tiny else 1
    due_s = time.monotonic()
    outcomes = []
    shared = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(prefix="areal_like-gpu_suite-"))
    # The weight store's sweep knows this prefix: after a kill, the next run removes the folder.
    shared_memory = Path(tempfile.mkdtemp(prefix="areal_like-gpu_suite-", dir=shared if shared.is_dir() else scratch))
    try:
        for part in parts:
            due_s += patience * (part.quick_s if is_quick else part.full_s)
            print(f"\n== {part.name}: {part.title}", flush=True)
            options = {"device": device, "is_quick": is_quick, "is_tiny": is_tiny}
            outcome = run_part(part, options, due_s - time.monotonic(), scratch, shared_memory)
            outcomes.append(outcome)
            _show(outcome)
    finally:
        for folder in (scratch, shared_memory):
            shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def _show(outcome: Outcome) -> None:
    if outcome.rows:
        print(render(outcome.rows))
    if outcome.status != "done":
        print(f"{outcome.part}: {outcome.status}: {outcome.reason}")
    if outcome.status == "failed" and outcome.output:
        print("last lines of its output:\n" + outcome.output)
    sys.stdout.flush()


def _save(
    options: argparse.Namespace, outcomes: Sequence[Outcome], *, wall_s: float, is_complete: bool, is_tiny: bool
) -> None:
    result: dict[str, Any] = {
        "form": "quick" if options.quick or is_tiny else "full", "device": options.device, "complete": is_complete,
        **({"warning": SELF_CHECK} if is_tiny else {}), "wall_s": round(wall_s, 1),
        "parts": {
            outcome.part: {
                "status": outcome.status, "reason": outcome.reason, "wall_s": round(outcome.wall_s, 1),
                "rows": outcome.rows,
            }
            for outcome in outcomes
        },
    }  # fmt: skip
    command = command_of("gpu_suite")
    if options.out is not None:
        print(f"written to {write('gpu_suite', command, result, options.out)}")
    elif is_complete:
        print(f"written to {write('gpu_suite', command, result, result_path('gpu_suite', options))}")
    elif not is_tiny:
        print("not complete: nothing written to benchmarks/results (--out FILE writes in any case)")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", metavar="NAME,...", help="some parts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here, complete or not")
    add_replace(parser)
    options = parser.parse_args(arguments)
    try:
        options.parts = chosen([name.strip() for name in options.only.split(",") if name.strip()])
    except ValueError as error:
        parser.error(str(error))
    if options.out is not None and RESULTS.resolve() in options.out.resolve().parents:
        parser.error("--out: the results in benchmarks/results are complete and measured on CUDA; remove --out")
    return options


def _obstacle(device: str) -> str:
    """Why nothing can run here; empty if the suite can run."""
    missing = [name for name in ("torch", "transformers", "numpy") if find_spec(name) is None]
    if missing:
        return f"not installed: pip install {' '.join(missing)}"
    if device == "cpu":
        return ""
    import torch

    if torch.cuda.is_available():
        return ""
    build = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no CUDA device"
    return f"{build} ({torch.__version__}); --device cpu --quick checks the suite itself"


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
