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

BENCHMARKS = ("controller", "logprob_memory", "packing", "prompt_sharing", "row_order", "sessions")


def digests() -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in RESULTS.glob("*.json")}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_quick_form_runs_and_publishes_nothing(name: str, tmp_path: Path) -> None:
    before = digests()
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick"]
    variables = environment() | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(character.isdigit() for character in done.stdout), "a table with numbers"
    assert digests() == before
