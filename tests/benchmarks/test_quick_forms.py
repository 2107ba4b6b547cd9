"""`--quick` of the benchmarks that need no whole run of a job: each still runs, and publishes nothing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.folders import REPOSITORY, RESULTS
from benchmarks.runs import environment

pytestmark = pytest.mark.e2e

BENCHMARKS = (
    "controller",
    "experts",
    "logprob_memory",
    "long_sequences",
    "packing",
    "prompt_sharing",
    "row_order",
    "sessions",
)


def digests() -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in RESULTS.glob("*.json")}


ALL = """
import runpy, sys
for name in sys.argv[1:]:
    print("##", name, flush=True)
    sys.argv = [name, "--quick"]
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
"""
"""In one process: importing torch takes longer than some of them."""


@pytest.mark.thorough
def test_quick_forms_run_and_publish_nothing(tmp_path: Path) -> None:
    before = digests()
    variables = environment() | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ALL, *BENCHMARKS], cwd=REPOSITORY, env=variables,
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    shown = dict(zip(BENCHMARKS, done.stdout.split("## ")[1:], strict=True))
    for name, text in shown.items():
        assert any(character.isdigit() for character in text), f"{name} prints no table with numbers"
    assert digests() == before
