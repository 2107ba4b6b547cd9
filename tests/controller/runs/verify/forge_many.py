"""Forges a recorded run N times (1000) and counts what is found: `python .../forge_many.py [N]`."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).parents[4]))
sys.path.insert(0, str(Path(__file__).parents[3]))


def main(num: int) -> int:
    """Print what was forged and found by kind; return 1 if anything was missed."""
    from recorded_run import copy_run, forge, make_recorded_run

    from controller.runs.verify.verify import verify

    made, found, spent_s = Counter[str](), Counter[str](), 0.0
    with tempfile.TemporaryDirectory() as name:
        run = make_recorded_run(Path(name))
        assert not verify(run).findings
        for seed in range(num):
            copy = copy_run(run, Path(name) / str(seed))
            kind, what = forge(copy, seed)
            started_s = time.perf_counter()
            result = verify(copy)
            spent_s += time.perf_counter() - started_s
            made[kind] += 1
            found[kind] += bool(result.findings)
            if not result.findings:
                print(f"seed {seed}: {kind}: {what} was not found")
            shutil.rmtree(copy.root)
    for kind, count in made.items():
        print(f"{kind:22} {found[kind]:5} of {count} found")
    print(f"{found.total()} of {num} found, {1e3 * spent_s / num:.1f} ms for each verification")
    return int(found.total() != num)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
