"""Runs the coordinator and the real ledger on simulated disks, with as many random schedules as wanted.

    python -m tests.disk_faults --runs 1000              1,000 seeds of each kind of crash
    python -m tests.disk_faults --seed 17 --how kill     one seed again

Each run has crashes at random changes of its files, after which it continues from what the disk holds, and faults (EIO,
ENOSPC). At its end `--states` more crash states of its last life are opened and checked. Exit status 1 if an invariant
is broken; the seeds are printed. tests/controller/support/disk_ledger.py says what must be true after each kind of
crash.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

SUPPORT = Path(__file__).parent / "controller" / "support"


def main() -> int:
    sys.path[:0] = [str(SUPPORT)]
    import disk_cluster
    import disk_ledger
    import recorded_sqlite

    kinds = {
        "kill": ("kill", False), "power": ("power", True), "power-without-fsync": ("power", False),
        "lost-syncs": ("lost_syncs", True),
    }  # fmt: skip
    parser = argparse.ArgumentParser(
        prog="python -m tests.disk_faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help="seeds of each kind")
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--how", choices=tuple(kinds), action="append", help="only this kind, repeatable")
    parser.add_argument("--states", type=int, default=20, help="additional crash states of each run")
    options = parser.parse_args()
    if why := recorded_sqlite.unavailable():
        parser.error(why)
    logging.disable()  # warnings of the copier on disks that fail
    seeds = range(options.runs) if options.seed is None else range(options.seed, options.seed + 1)
    is_good = True
    with tempfile.TemporaryDirectory() as folder, disk_ledger.recorders() as recorders:
        for name in options.how or kinds:
            how, fsync = kinds[name]
            found: Counter[str] = Counter()
            for seed in seeds:
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    try:
                        found += disk_cluster.run_on_disk(
                            seed, Path(place), recorders, how=how, fsync=fsync, num_states=options.states
                        ).found
                    except disk_ledger.LossReported:
                        found["runs that ended with a reported loss"] += 1
                    except AssertionError as error:
                        is_good = False
                        print(f"{name}, seed {seed}: {error}", flush=True)
            print(
                f"{name}: {len(seeds)} runs, " + ", ".join(f"{count} {what}" for what, count in sorted(found.items()))
            )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
