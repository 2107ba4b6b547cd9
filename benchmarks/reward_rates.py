"""How often is the reward correct on data whose correct reward is known?

    python -m benchmarks.reward_rates              about 15 minutes
    python -m benchmarks.reward_rates --quick      about 2 minutes, every tenth row

Uses the code of `areal-like score` on published data sets, as JSON lines in the folder that the environment variable
AREAL_LIKE_TEST_DATA names (gsm8k/train.jsonl, gsm8k/test.jsonl, math/math_train.jsonl.gz, math/math_test.jsonl.gz,
code/humaneval.jsonl, code/mbpp_nontest.jsonl):

- `references`: solutions of HumanEval and MBPP against their own tests: all must pass.
- `mutants`: the same solutions, each with one small change, compared with plain Python without a sandbox that runs
  program and tests in one file: both must agree on every one. The oracle runs mutants without protection: they are
  small changes of programs that read and write nothing.
- `gold`: solutions of GSM8K and MATH against their own answers: all must be correct, except solutions of MATH that end
  with several boxes, of which the published column `answer` holds only the last one; these are scored again, against
  all of their boxes. `others`: answers of GSM8K against those of the next row, where only equal numbers are correct.

Every row with another verdict is listed in the output and in the result file.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.program_mutants import bare_verdict, mutants_of
from benchmarks.reward import DATA, FILES, rows_of
from benchmarks.runs import write
from services.reward.score_file import ScoreSpec, score_file

NUM_MUTANTS, SEED = 2, 11
TIME_LIMIT_S, ORACLE_TIMEOUT_S = 2.0, 8.0
MAX_NAMED = 60

Rows = list[dict[str, Any]]


def scored(kind: str, rows: Rows, folder: Path, **options: Any) -> Rows:
    """The verdicts for these rows, in order."""
    source, target = folder / "rows.jsonl", folder / "verdicts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    num_workers = len(os.sched_getaffinity(0))
    order = ScoreSpec(kind, source, target, num_workers, options=options, overwrite=True)
    standing = score_file(order, lambda standing: None)
    if standing.stopped_by:
        raise SystemExit(128 + standing.stopped_by)
    return [json.loads(line) for line in target.read_text().splitlines()]


def rate(name: str, verdicts: Rows, wanted: list[float]) -> dict[str, Any]:
    """Number of verdicts that are as expected; the others are listed."""
    pairs = list(zip(verdicts, wanted, strict=True))
    others = [f"{verdict['id']}: {verdict['verdict']} {verdict['value']} {verdict['reason']}" for verdict, want in pairs
              if verdict["value"] != want]  # fmt: skip
    print(f"{name:34} {len(pairs) - len(others):6,} of {len(pairs):6,} as they must be", flush=True)
    for other in others[:MAX_NAMED]:
        print(f"    {other}", flush=True)
    return {"rows": len(pairs), "as_they_must_be": len(pairs) - len(others), "others": others[:MAX_NAMED]}


def programs(every: int) -> Rows:
    """Published tasks as rows: `program` is the reference, `whole` a text of tests for plain Python."""
    rows: Rows = []
    for row in rows_of("code/humaneval.jsonl")[::every]:
        kept = {name: row[name] for name in ("prompt", "entry_point", "test")}
        tests = f"{row['test']}\ncheck({row['entry_point']})"
        program = row["prompt"] + row["canonical_solution"]
        rows.append({"id": row["task_id"], **kept, "program": program, "whole": tests})
    for row in rows_of("code/mbpp_nontest.jsonl")[::every]:
        tests = row["test_list"] + row["challenge_test_list"]
        kept = {"test_setup_code": row["test_setup_code"], "code": row["code"], "test_list": tests}
        whole = "\n".join([row["test_setup_code"], *tests])
        rows.append({"id": f"MBPP/{row['task_id']}", **kept, "program": row["code"], "whole": whole})
    return rows


def mutated(rows: Rows) -> Rows:
    """Mutants of the programs."""
    return [
        row | {"id": f"{row['id']} mutant {number}", "program": mutant, "time_limit_s": TIME_LIMIT_S}
        for row in rows
        for number, mutant in enumerate(mutants_of(row["program"], NUM_MUTANTS, SEED))
    ]


def oracle(rows: Rows) -> list[float]:
    """Verdicts of plain Python."""

    def one(row: dict[str, Any]) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return float(bare_verdict(row["program"], row["whole"], Path(folder), ORACLE_TIMEOUT_S))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return list(threads.map(one, rows))


def gold(every: int) -> dict[str, Rows]:
    """Solutions as responses, with their own answers."""
    word_problems = [
        {"id": row["id"], "response": row["answer"], "gold": row["final_answer"]}
        for name in ("gsm8k/train.jsonl", "gsm8k/test.jsonl")
        for row in rows_of(name)[::every]
    ]
    competition = [
        {"id": row["id"], "response": row["solution"], "gold": row["answer"]}
        for name in ("math/math_train.jsonl.gz", "math/math_test.jsonl.gz")
        for row in rows_of(name)[::every]
        if row["answer"]
    ]
    several = [
        {"id": row["id"], "response": row["solution"], "gold": row["solution"]}
        for name in ("math/math_train.jsonl.gz", "math/math_test.jsonl.gz")
        for row in rows_of(name)
        if row.get("boxed_all")
    ]
    return {"GSM8K": word_problems, "MATH": competition, "MATH, several boxes": several}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every tenth row, and no result file")
    parser.add_argument("--only", choices=("code", "maths"), help="run one half only, and write no result file")
    options = parser.parse_args()
    if missing := [name for name in FILES if not (DATA / name).is_file()]:
        raise SystemExit(f"AREAL_LIKE_TEST_DATA names a folder with {', '.join(FILES)}; {DATA} lacks {missing[0]}.")
    every = 10 if options.quick else 1
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only != "maths":
            rows = programs(every)
            results["references"] = rate("references", scored("code", rows, folder), [1.0] * len(rows))
            rows = mutated(rows)
            wanted = oracle(rows)
            results["mutants"] = rate("mutants, against a bare Python", scored("code", rows, folder), wanted)
            results["mutants"]["right_by_oracle"] = int(sum(wanted))
        for name, rows in gold(every).items() if options.only != "code" else ():
            found = rate(f"{name}, own answers", scored("math", rows, folder), [1.0] * len(rows))
            results[f"gold, {name}"] = found
        rows = gold(every)["GSM8K"] if options.only != "code" else []
        if rows:
            others = [row["gold"] for row in rows[1:] + rows[:1]]
            wanted = [float(row["gold"] == other) for row, other in zip(rows, others, strict=True)]
            swapped = [row | {"gold": other} for row, other in zip(rows, others, strict=True)]
            results["others, GSM8K"] = rate("GSM8K, the next row's answers", scored("math", swapped, folder), wanted)
    if not options.quick and options.only is None:
        write("reward_rates", "python -m benchmarks.reward_rates", results)


if __name__ == "__main__":
    main()
