"""Prints whether math-verify parses and compares. Its parser breaks if another package pins a different antlr4."""

from __future__ import annotations

import json

from math_verify import parse, verify


def main() -> None:
    gold = parse(r"$\frac{1}{2}$", parsing_timeout=None)
    facts = {
        "same": bool(verify(gold, parse("$0.5$", parsing_timeout=None), timeout_seconds=None)),
        "other": bool(verify(gold, parse("$0.25$", parsing_timeout=None), timeout_seconds=None)),
    }
    print("areal_like-doctor " + json.dumps(facts), flush=True)


main()
