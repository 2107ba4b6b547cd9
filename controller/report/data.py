"""Reads all data of a run from its folder: finished, in progress, crashed, damaged, or written by an older version.

`RunData` contains the content of each file as far as it can be read, and sentences about what is missing. The diagnosis
is in diagnosis.py, charts in charts.py, the ledger's samples in sample_reader.py.

Damage inside the folder raises no exception: what cannot be read is left out and listed in `problems`. Rows are checked
so far that readers can rely on `step` being an integer and on pulses having their nested structure. Single numbers are
read with `number` and `series`, which convert anything else to NaN.
"""

from __future__ import annotations

import json
import math
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from areal_like.encryption.files import read_bytes
from areal_like.encryption.texts import Texts
from areal_like.errors import UserError
from controller.ledger.sample_reader import SampleStats, Unreadable, read_samples
from controller.run_folder.owner_host import Whereabouts, whereabouts
from controller.run_folder.run_folder import FORMAT, RunFolder, is_from_files, misfits
from controller.wiring.process_specs import num_cores

STATUS_FORMAT = 1
"""Format version of status.json; a newer one is ignored."""
KINDS = frozenset(
    {
        "step", "eval", "pulse", "note", "dropped", "swap", "release", "checkpoint", "checkpoint_failed", "process",
        "sink", "counters", "offline", "slices", "eval_values",
    }
)  # fmt: skip
"""Kinds of lines of metrics.jsonl that this version knows."""
ENDED = frozenset({"finished", "stopped", "failed"})

Row = dict[str, Any]


@dataclass(frozen=True)
class RunData:
    """All data of one run for reports, diagnosis and commands."""

    folder: RunFolder
    state: Row
    """state.json; {} when damaged."""
    config: Row
    """The resolved configuration as plain YAML; {} when damaged."""
    summary: Row | None
    """summary.json; None before the end of a run."""
    status: Row | None
    """status.json, replaced about once a second while the run is in progress; None for older runs."""
    steps: list[Row] = field(default_factory=list)
    """Newest row of each step of the surviving lineage, in order of steps."""
    evals: list[Row] = field(default_factory=list)
    """Newest row of each version, in order of versions; `values`: of its answers, if they are known (paired.py)."""
    slices: list[Row] = field(default_factory=list)
    """Results of evaluations by slices: the newest row of each version, in order of versions."""
    pulses: list[Row] = field(default_factory=list)
    """Pulses in the order they were written; counters are cumulative since the incarnation of a process started."""
    notes: list[Row] = field(default_factory=list)
    dropped: list[Row] = field(default_factory=list)
    swaps: list[Row] = field(default_factory=list)
    processes: list[Row] = field(default_factory=list)
    """Events: processes lost, restarted, removed."""
    sinks: list[Row] = field(default_factory=list)
    """Events: metrics sinks down, up, closed."""
    counters: Row | None = None
    """Final counters of every process over its incarnations; only after a normal end."""
    samples: SampleStats | None = None
    """None if the ledger cannot be read, or no sample was consumed yet."""
    problems: list[str] = field(default_factory=list)
    """Sentences about data that is missing, damaged or truncated."""
    where: Whereabouts | None = None
    """Whether the run is in progress, and how it ended, at the time of reading; None if state.json is damaged."""
    weight_dir: str = ""
    """Folder through which versions were transferred; empty if not known."""
    cores: int | None = None
    """Processor cores of the run's machine; only known on that machine."""

    @staticmethod
    def load(folder: RunFolder, *, max_samples: int = 20_000) -> RunData:
        """Read the folder. Raises UserError if there is nothing to read, or a newer version wrote it."""
        problems: list[str] = []
        state = _state(folder, problems)
        rows = _metrics(folder, problems, is_running=state.get("status") == "running")
        config = read_settings(folder, problems)
        is_offline = is_from_files(state)  # a run from files has no ledger, and no process that waits for another
        data = RunData(
            folder=folder,
            state=state,
            config=config,
            summary=_json_object(folder.summary, problems, must_exist=state.get("status") in {"finished", "stopped"}),
            status=_status(folder, problems),
            steps=_surviving(rows["step"], problems),
            evals=with_values(_newest(rows["eval"], "version"), rows["eval_values"]),
            slices=_newest(rows["slices"], "version"),
            pulses=[checked_pulse(row) for row in rows["pulse"]],
            notes=rows["note"],
            dropped=rows["dropped"],
            swaps=rows["swap"],
            processes=rows["process"],
            sinks=rows["sink"],
            counters=rows["counters"][-1] if rows["counters"] else None,
            samples=None if is_offline else _samples(folder, problems, max_samples),
            problems=problems,
            where=_whereabouts(folder, state),
            weight_dir=_weight_dir(folder),
            cores=num_cores() if state.get("host") == socket.gethostname() else None,
        )
        if data.steps and not data.pulses and not is_offline:
            problems.append(
                "metrics.jsonl has no rows of kind `pulse`, probably because an older version of areal_like wrote the "
                "file, so waiting times are only partly known"
            )
        if not (state or config or data.summary or data.status or data.samples or any(rows.values())):
            raise UserError(
                f"the folder contains no readable run data ({'; '.join(problems)})",
                where=str(folder.root),
                remedy="specify the folder of a run, such as runs/<name>",
            )
        return data

    @property
    def is_over(self) -> bool:
        """Whether the run ended with a recorded state: finished, stopped or failed (after a crash the state is still
        `running`).
        """
        return self.state.get("status") in ENDED

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted path; `default` if the file is damaged or lacks it."""
        found: Any = self.config
        for key in path.split("."):
            if not isinstance(found, dict) or key not in found:
                return default
            found = found[key]
        return found


def number(row: Mapping[str, Any] | None, key: str, default: float = math.nan) -> float:
    """A finite number from a row; `default` if it is missing, null, infinite or not a number."""
    value = row.get(key) if isinstance(row, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    try:
        return float(value) if math.isfinite(value) else default
    except OverflowError:
        return default


def series(rows: Iterable[Mapping[str, Any]], key: str) -> np.ndarray:
    """One number of every row as float64, NaN if a row has none."""
    return np.array([number(row, key) for row in rows], dtype=np.float64)


# ------------------------------------------------------------ one file each


def _state(folder: RunFolder, problems: list[str]) -> Row:
    if not folder.root.is_dir():
        raise UserError("there is no such folder", where=str(folder.root), remedy="specify the folder of a run")
    state = _json_object(folder.state, problems, must_exist=True) or {}
    found = state.get("format")
    if isinstance(found, int) and found > FORMAT:
        raise UserError(
            f"the run was created by a newer version of areal_like (folder layout {found}; this version supports "
            "layouts up to "
            f"{FORMAT})",
            where=str(folder.root),
            remedy="update areal_like",
        )
    odd = misfits(state)
    if odd:
        problems.append(f"{folder.state.name} is damaged: invalid values of {', '.join(odd)} are ignored")
    return {key: value for key, value in state.items() if key not in odd}


def _status(folder: RunFolder, problems: list[str]) -> Row | None:
    path = folder.root / "status.json"
    status = _json_object(path, problems, must_exist=False)
    if status is not None and number(status, "format") > STATUS_FORMAT:
        problems.append(f"{path.name} was written by a newer version and is ignored")
        return None
    return status


def _json_object(path: Path, problems: list[str], *, must_exist: bool) -> Row | None:
    """The object in a JSON file; None if it is missing or damaged, which is added to `problems`."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        if must_exist:
            problems.append(f"{path.name} is missing")
        return None
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror or error})")
        return None
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} is damaged ({_short(error)})")
        return None
    if not isinstance(found, dict):
        problems.append(f"{path.name} is damaged (it is not a JSON object)")
        return None
    return found


def read_settings(folder: RunFolder, problems: list[str]) -> Row:
    """The resolved configuration as plain YAML; {} if it is missing or damaged, which is added to `problems`."""
    name = folder.config.name
    try:
        found = yaml.safe_load(read_bytes(folder.config))
    except FileNotFoundError:
        problems.append(f"{name} is missing")
        return {}
    except OSError as error:
        problems.append(f"{name} cannot be read ({error.strerror or error})")
        return {}
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        problems.append(f"{name} is damaged ({_short(error)})")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{name} is damaged (it contains no settings)")
        return {}
    return found


def _metrics(folder: RunFolder, problems: list[str], *, is_running: bool) -> dict[str, list[Row]]:
    """Rows by kind. An incomplete last line is normal while the run is in progress."""
    rows: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    texts = Texts.to_show(folder.root)
    try:
        *lines, rest = folder.metrics.read_bytes().split(b"\n")
    except FileNotFoundError:
        problems.append("metrics.jsonl is missing, so steps and evaluations are unknown")
        return rows
    except OSError as error:
        problems.append(f"metrics.jsonl cannot be read ({error.strerror or error})")
        return rows
    damaged, strange = 0, Counter[str]()
    for line in [*lines, rest]:
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if line is not rest:
                damaged += 1
            elif not is_running:
                problems.append("the last line of metrics.jsonl is truncated")
            continue
        kind = row.get("kind") if isinstance(row, dict) else None
        if not isinstance(kind, str):
            damaged += 1
        elif kind in KINDS:
            rows[kind].append(texts.opened_row(row))
        else:
            strange[kind[:40]] += 1
    if damaged:
        problems.append(f"{damaged} of {len(lines) + bool(rest)} lines of metrics.jsonl are damaged and ignored")
    if strange:
        named = ", ".join(kind for kind, _ in strange.most_common(3))
        problems.append(f"{strange.total()} lines of metrics.jsonl are of kinds unknown to this version ({named})")
    return rows


def _samples(folder: RunFolder, problems: list[str], max_samples: int) -> SampleStats | None:
    try:
        return read_samples(folder.ledger, max_samples=max_samples)
    except Unreadable as error:
        problems.append(f"{folder.ledger.name}: {error}; statistics of individual samples are omitted")
        return None


def _whereabouts(folder: RunFolder, state: Row) -> Whereabouts | None:
    try:
        return whereabouts(folder) if state else None
    except (UserError, OSError):  # replaced between the two reads
        return None


def _weight_dir(folder: RunFolder) -> str:
    """The weight folder from the trainer's settings; empty if the file is missing or incomplete."""
    try:
        spec = json.loads(read_bytes(folder.processes / "trainer.json"))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(spec.get("weight_dir", "")) if isinstance(spec, dict) else ""


# ------------------------------------------------------------ rows


def _surviving(rows: list[Row], problems: list[str]) -> list[Row]:
    """The newest row of every step. A repeated step invalidates the later steps of the previous session
    (`exactly-once`).
    """
    found: dict[int, Row] = {}
    damaged = 0
    for row in rows:
        step = _whole(row.get("step"))
        if step is None:
            damaged += 1
            continue
        if found and step <= max(found):
            found = {key: kept for key, kept in found.items() if key < step}
        found[step] = {**row, "step": step}
    if damaged:
        problems.append(f"{damaged} step lines of metrics.jsonl have no step number and are ignored")
    return [found[step] for step in sorted(found)]


def _newest(rows: list[Row], key: str) -> list[Row]:
    found = {whole: {**row, key: whole} for row in rows if (whole := _whole(row.get(key))) is not None}
    return [found[whole] for whole in sorted(found)]


def with_values(evals: Iterable[Row], values: Iterable[Row]) -> list[Row]:
    """Rows of kind `eval` with the row of kind `eval_values` of the same version under the key `values`."""
    found = {version: row for row in values if (version := _whole(row.get("version"))) is not None}
    return [{**row, "values": found[row["version"]]} if row["version"] in found else row for row in evals]


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if math.isfinite(value) and value == int(value) else None


def checked_pulse(row: Row) -> Row:
    """The row with its nested parts; parts of a wrong type become empty."""
    processes = row.get("processes")
    processes = processes if isinstance(processes, dict) else {}
    waits = row.get("waits")
    counts = row.get("counts")
    return {
        **row,
        "waits": [str(one) for one in waits] if isinstance(waits, list) else [],
        "counts": counts if isinstance(counts, dict) else {},
        "processes": {
            str(name): {**one, "counters": one["counters"] if isinstance(one.get("counters"), dict) else {}}
            for name, one in processes.items()
            if isinstance(one, dict)
        },
    }


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
