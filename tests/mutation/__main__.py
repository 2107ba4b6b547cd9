"""How strong are the unit tests: `python -m tests.mutation --seed 1 --mutants 120` (`make mutation`).

Draws mutants of core modules, runs for each the unit tests that execute the changed statement (quickest first, ended by
the first failure), prints the score and every survivor. All of it happens in a copy of the checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.mutation.coverage_map import CoverageMap
from tests.mutation.draw import draw, named
from tests.mutation.page import print_score
from tests.mutation.sandbox import sandbox
from tests.mutation.trial import ForkServer, Trial

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "mutation"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--mutants", type=int, default=120, help="how many are drawn")
    parser.add_argument("--threshold", type=float, default=92.0, help="per cent; below it the status is 1")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N",
                        help="every N-th mutant of the draw from the K-th on: N commands share the work")  # fmt: skip
    parser.add_argument("--only", default="*", help="pattern of modules, e.g. 'controller/*ledger*'")
    parser.add_argument("--tests", action="append", metavar="PATTERN",
                        help="use only test files that match, e.g. 'tests/trainer/*', repeatable: a quick look at "
                             "one package, whose score is at most that of all tests")  # fmt: skip
    parser.add_argument("--budget-s", type=float, default=60.0, help="of tests for each mutant, measured without one")
    parser.add_argument(
        "--grace-s",
        type=float,
        default=20.0,
        help="processor time a session may take, plus five times its tests'; of waiting four times as much",
    )
    parser.add_argument("--place", action="append", help="run this mutant alone: FILE:LINE:OPERATOR, repeatable")
    parser.add_argument("--map", choices=("exact", "quick", "kept"), default="exact",
                        help="measure again whatever ran changed code; follow its lines, measure only new tests; "
                             "or measure nothing")  # fmt: skip
    parser.add_argument("--map-only", action="store_true", help="only build the map of tests by line")
    parser.add_argument("--equivalent", type=Path, default=ROOT / "tests" / "mutation" / "equivalent.txt",
                        help="mutants that change nothing observable, with reasons")  # fmt: skip
    return parser.parse_args(arguments)


def part(text: str) -> tuple[int, int]:
    """`2/3` as (2, 3)."""
    number, _, total = text.partition("/")
    if not 1 <= int(number) <= int(total):
        raise ValueError(text)
    return int(number), int(total)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    options = parse()
    os.nice(5)
    with sandbox(ROOT) as folder, ForkServer(folder) as server:
        tests = CoverageMap(folder / "copy", KEPT / "map", how=options.map, patterns=options.tests)
        tests.build(server.measure, say)
        if options.map_only:
            return 0
        copy = folder / "copy"
        chosen = (
            named(copy, options.place) if options.place else draw(copy, options.seed, options.mutants, options.only)
        )
        number, total = options.part
        chosen = chosen[number - 1 :: total]
        trial = Trial(copy, server, tests, budget_s=options.budget_s, grace_s=options.grace_s)
        results = [trial.run(drawn, say) for drawn in chosen]
    commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    share = f", part {number} of {total}" if total > 1 else ""
    say(f"\nseed {options.seed}{share}, {len(results)} mutants, commit {commit.stdout.strip()}")
    return print_score(results, options.equivalent, options.threshold, say)


if __name__ == "__main__":
    sys.exit(main())
