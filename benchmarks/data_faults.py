"""Does `areal-like data clean` find planted faults, and how fast is it?

    python -m benchmarks.data_faults --gsm8k FOLDER --math FOLDER               20 minutes of processor time
    python -m benchmarks.data_faults --gsm8k FOLDER --math FOLDER --quick       20 faults of each kind; writes nothing

FOLDER of GSM8K has train.jsonl and test.jsonl as published; that of MATH has math_train.jsonl and math_test.jsonl (or
.gz) with `problem`, `solution` and `answer`. 2,000 faults of ten kinds (data_planting.py) replace rows of both
training sets; the test sets are the evaluation files. A fault is found if the stage of its kind removes its row.
Precision counts every other row that the stage removes as false, although some have a real fault: `unplanted` says how
many. `--examples FILE` writes these rows, and planted ones that no stage removed, to read; the result itself has no
text of a row.

Unplanted rows that were read by hand are in data_faults_read.json, by digest: `unplanted_true` counts those with a real
fault, and `precision_read` counts them as found.

Then the command is run on `--rows` rows (the same rows, with other numbers in each copy), with all its processes:
seconds, processor time, and resident memory of all processes together after a quarter of the time and at its highest.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from areal_like.guard import tied
from benchmarks.data_planting import KINDS, Row, plant, read_gsm8k, read_math, with_other_numbers
from benchmarks.publishing import add_replace, result_path
from benchmarks.runs import command_of, environment, write

SEED = 31
"""Stages and planting were developed with seed 29."""
NUM_EACH = 200
COMPARING = ("exact_duplicates", "near_duplicates")
"""Stages that compare a row with earlier ones. Last, so that rows which others remove are not compared."""
LOOK_S = 0.25
READ = Path(__file__).parent / "data_faults_read.json"
"""Unplanted rows that were read: by digest, whether the row has the fault."""


def stages_text() -> str:
    """The file of stages: one for each kind of fault, with default options."""
    files = {"contamination": {"files": ["eval.jsonl"]}}
    kinds = sorted(KINDS, key=COMPARING.__contains__)
    return json.dumps({"stages": [{"kind": kind, "options": files.get(kind, {})} for kind in kinds]})  # JSON is YAML


def run_command(words: list[str], folder: Path) -> dict[str, Any]:
    """Run `areal-like data`; returns seconds, processor seconds and memory in MB of all its processes together."""
    started_s = time.monotonic()
    process = subprocess.Popen(
        tied([sys.executable, "-P", "-m", "controller", "data", *words]), cwd=folder, env=environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    samples: list[tuple[float, float]] = []
    cpu_s: dict[int, float] = {}
    while process.poll() is None:
        samples.append((time.monotonic() - started_s, _look(process.pid, cpu_s)))
        time.sleep(LOOK_S)
    wall_s = time.monotonic() - started_s
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
    quarter = [size for at_s, size in samples if at_s <= wall_s / 4]
    return {
        "wall_s": round(wall_s, 1), "cpu_s": round(sum(cpu_s.values()), 1),
        "memory_mb_first_quarter": round(max(quarter, default=0.0)),
        "memory_mb_peak": round(max(size for _, size in samples)),
    }  # fmt: skip


def _look(pid: int, cpu_s: dict[int, float]) -> float:
    """Resident MB of a process and its descendants; their processor seconds are noted."""
    total = 0.0
    try:
        found = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return total
    for one in found:
        try:
            times, total = one.cpu_times(), total + one.memory_info().rss / 1e6
            cpu_s[one.pid] = times.user + times.system
        except psutil.Error:  # it has just ended
            continue
    return total


def faults(rows: list[Row], eval_rows: list[Row], num_each: int, folder: Path, examples: Path | None) -> dict[str, Any]:
    """Plant, clean, count."""
    planted = plant(rows, eval_rows, num_each, SEED)
    source = folder / "planted.jsonl"
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in eval_rows))
    source.write_bytes(b"\n".join(planted.lines) + b"\n")
    (folder / "stages.yaml").write_text(stages_text())
    ran = run_command(["clean", source.name, "-o", "cleaned", "--stages", "stages.yaml"], folder)
    removed = [json.loads(line) for line in (folder / "cleaned" / "removed.jsonl").open()]
    by_line = {int(one["where"].rpartition(":")[2]): one for one in removed}
    judged = json.loads(READ.read_text())
    lines, texts = [], []
    for kind in KINDS:
        places = [place for place, planted_kind in planted.kinds.items() if planted_kind == kind]
        of_stage = {place: one for place, one in by_line.items() if one["stage"] == kind}
        found = [place for place in places if place in of_stage]
        unplanted = sorted(place for place in of_stage if place not in planted.kinds)
        true = [place for place in unplanted if judged.get(_key_of(kind, of_stage[place]))]
        elsewhere = Counter(by_line[place]["stage"] for place in places if place in by_line and place not in of_stage)
        lines.append(
            {
                "kind": kind, "planted": len(places), "found": len(found), "removed": len(of_stage),
                "unplanted": len(unplanted), "of_another_kind": len(of_stage) - len(found) - len(unplanted),
                "recall": round(len(found) / len(places), 4),
                "precision": round(len(found) / len(of_stage), 4) if of_stage else 0.0,
                "unplanted_true": len(true),
                "precision_read": round((len(found) + len(true)) / len(of_stage), 4) if of_stage else 0.0,
                "found_by_another_stage": dict(elsewhere),
            }
        )  # fmt: skip
        texts += [{"is": "unplanted", "key": _key_of(kind, of_stage[place]), **of_stage[place]} for place in unplanted]
        texts += [{"is": "missed", "kind": kind, "line": planted.lines[place - 1].decode("utf-8", "replace")}
                  for place in places if place not in by_line]  # fmt: skip
        texts += [{"is": "of another kind", "kind": kind, **by_line[place]}
                  for place in places if place in by_line and place not in of_stage]  # fmt: skip
    if examples is not None:
        examples.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return {"rows": len(planted.lines), "seed": SEED, "kinds": lines, "run": ran}


def _key_of(kind: str, removed: dict[str, Any]) -> str:
    """Digest of a removed row and the stage that removed it."""
    text = json.dumps([kind, removed.get("row")], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def speed(rows: list[Row], num_rows: int, folder: Path) -> dict[str, Any]:
    """Clean `num_rows` rows; the files of `faults` must be in the folder."""
    source = folder / "many.jsonl"
    with source.open("w") as file:
        for number in itertools.islice(itertools.count(), num_rows):
            turn, place = divmod(number, len(rows))
            file.write(json.dumps(with_other_numbers(rows[place], turn)) + "\n")
    found = run_command(["clean", source.name, "-o", "many", "--stages", "stages.yaml"], folder)
    manifest = json.loads((folder / "many" / "manifest.json").read_text())
    return {"rows": num_rows, "kept": manifest["rows_out"], "megabytes": round(source.stat().st_size / 1e6, 1), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--math", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the measurement of time (100000); 0: none")
    parser.add_argument("--examples", type=Path, metavar="FILE", help="rows to read (JSON Lines)")
    parser.add_argument("--quick", action="store_true", help="20 faults of each kind in 2,000 rows, and no result file")
    add_replace(parser)
    options = parser.parse_args()
    rows = [*read_gsm8k(options.gsm8k, "train"), *read_math(options.math, "train")]
    eval_rows = [*read_gsm8k(options.gsm8k, "test"), *read_math(options.math, "test")]
    if options.quick:
        rows, eval_rows = rows[::7], eval_rows[::7]
    with tempfile.TemporaryDirectory(prefix="data-faults-") as name:
        folder = Path(name)
        result = faults(rows, eval_rows, 20 if options.quick else NUM_EACH, folder, options.examples)
        for line in result["kinds"]:
            print(f"{line['kind']:20} recall {line['recall']:.3f}  precision {line['precision']:.3f}"
                  f"  unplanted {line['unplanted']}  of another kind {line['of_another_kind']}"
                  f"  elsewhere {line['found_by_another_stage']}", flush=True)  # fmt: skip
        num_rows = 5_000 if options.quick else options.rows
        if num_rows:
            result["speed"] = speed(rows, num_rows, folder)
            print(result["speed"])
    if not options.quick:
        print(f"written to {write('data_faults', _command(options), result, result_path('data_faults', options))}")


def _command(options: argparse.Namespace) -> str:
    """The command as typed, with the names of the sets for their folders, without the file of examples."""
    command = command_of("data_faults").replace(str(options.gsm8k), "GSM8K").replace(str(options.math), "MATH")
    return command.replace(f" --examples {options.examples}", "")


if __name__ == "__main__":
    main()
