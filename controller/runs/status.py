"""`areal-like status RUN`: shows health, progress and waits of a run; once, live, or as JSON.

Files are read in facts.py; the layout is in status_view.py.

Exit status: 0 the run is in progress, finished or stopped; 1 it failed or crashed; 3 it belongs to another machine and
its state is unknown.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from controller.report.finding import DEATHS, Finding
from controller.run_folder.formatting import span
from controller.run_folder.owner_host import status_exit
from controller.run_folder.run_folder import RunFolder
from controller.runs.facts import SILENT_S, Facts, Memory, read_facts
from controller.runs.status_view import Health, Verdict, findings, one_line, page

_ENDED: Mapping[str, Verdict] = {"finished": "ok", "stopped": "ok", "foreign": "unknown"}
SLOW_FACTOR = 5.0
SLOW_S = 60.0
"""A step is overdue after SLOW_FACTOR times the usual time, but not before this."""


def status(
    folder: RunFolder,
    *,
    watch: bool = False,
    as_json: bool = False,
    why: bool = False,
    interval_s: float = 1.0,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print the status; with `watch` repeatedly until the run is over. Returns the exit status.

    why: also print a diagnosis of the run's metrics, with recommended changes.
    """
    console = console or Console(highlight=False, markup=False)
    if not watch:
        facts = read_facts(folder)
        _print(console, facts, as_json, _diagnosed(folder) if why else None)
        return status_exit(facts.where.kind)
    try:
        return _watch(folder, console, as_json, interval_s, sleep)
    except KeyboardInterrupt:  # the usual way to quit
        return 0


def _watch(
    folder: RunFolder, console: Console, as_json: bool, interval_s: float, sleep: Callable[[float], None]
) -> int:
    memory = Memory()
    facts = read_facts(folder, memory)
    if as_json or not console.is_terminal:
        shown_line = ""
        while True:
            line = as_line(facts) if as_json else one_line(facts, health(facts))
            if line != shown_line:
                console.out(line)
            if not _goes_on(facts):
                return status_exit(facts.where.kind)
            shown_line = line
            sleep(interval_s)
            facts = read_facts(folder, memory)
    with Live(page(facts, health(facts)), console=console, auto_refresh=False, transient=True) as live:
        while _goes_on(facts):
            sleep(interval_s)
            facts = read_facts(folder, memory)
            live.update(page(facts, health(facts)), refresh=True)
    _print(console, facts, as_json)
    return status_exit(facts.where.kind)


def _goes_on(facts: Facts) -> bool:
    """Return whether the status may still change: the run is in progress here, or elsewhere with a status file that is
    still updated.
    """
    if facts.where.is_running:
        return True
    return facts.where.kind == "foreign" and facts.age_s is not None and facts.age_s < SILENT_S * 6


def _print(console: Console, facts: Facts, as_json: bool, found: list[Finding] | None = None) -> None:
    if as_json:
        console.out(as_line(facts, found))
        return
    for part in parts(facts, found):
        console.print(part)


def parts(facts: Facts, found: Sequence[Finding] | None) -> list[Group]:
    """The status, and the findings if requested. Findings come first if the run failed, so that the cause is on top."""
    shown = [page(facts, health(facts))]
    if found is not None:
        shown.insert(0 if found[0].kind in DEATHS else 1, findings(found))
    return shown


def _diagnosed(folder: RunFolder) -> list[Finding]:
    """Diagnose the run. This reads all metrics and the ledger, so it is done only on request."""
    from controller.report.data import RunData
    from controller.report.diagnosis import diagnose

    return diagnose(RunData.load(folder))


def health(facts: Facts) -> Health:
    """Health of the run, with its reason."""
    kind = facts.where.kind
    if kind != "running":
        return Health(_ENDED.get(kind, "bad"), facts.where.words)
    if facts.controller.get("is_suspended"):
        pid = facts.where.pid
        return Health("bad", f"the controller is suspended; resume it with `kill -CONT {pid}`")
    age_s = facts.age_s
    if age_s is not None and age_s > SILENT_S:
        return Health(
            "bad",
            f"no message from the controller for {span(age_s)}; the controller hangs, or the machine is overloaded",
        )
    troubled = [
        f"{name}: {row.get('state')}"
        for name, row in facts.processes.items()
        if str(row.get("state", "")).startswith(("restarting", "gone", "lost"))
    ]
    troubled += [str(wait) for wait in facts.status.get("waits") or () if _is_trouble(str(wait))]
    if troubled:
        return Health("warning", "; ".join(troubled))
    clients = [str(wait) for wait in facts.status.get("waits") or () if " waits for clients at " in str(wait)]
    if clients:
        return Health("ok", "; ".join(clients))
    since_s = _since_step_s(facts)
    if since_s is not None and facts.step_s is not None and since_s > max(SLOW_S, SLOW_FACTOR * facts.step_s):
        return Health("warning", f"no step has finished for {span(since_s)}; a step usually takes {span(facts.step_s)}")
    if facts.status.get("status") == "preparing":
        return Health("ok", "preparing the starting model")
    if not facts.status:
        return Health("unknown", "the run has written no status yet")
    return Health("ok", "good")


def _is_trouble(wait: str) -> bool:
    return any(word in wait for word in (" is quarantined", " is lost; ", " is lost and not restarted"))


def _since_step_s(facts: Facts) -> float | None:
    """Time since the last step; None during the evaluation at the end of a run, when no step is due."""
    stepped_s = facts.last_step.get("time_s")
    if not isinstance(stepped_s, int | float) or facts.step == facts.num_steps:
        return None
    return time.time() - stepped_s


def as_line(facts: Facts, found: list[Finding] | None = None) -> str:
    """Return everything as one JSON object."""
    judged = health(facts)
    fields: dict[str, Any] = {
        "run": facts.folder.name,
        "folder": str(facts.folder.root),
        "kind": facts.where.kind,
        "words": facts.where.words,
        "health": {"verdict": judged.verdict, "words": judged.words},
        "step": facts.step,
        "num_steps": facts.num_steps,
        "accuracy": {str(version): value for version, value in facts.accuracy.items()},
        "rates": {name: {"per_s": rate.per_s, "busy": rate.busy} for name, rate in facts.rates.items()},
        "state": dict(facts.where.state),
        "status": facts.status or None,
        "summary": facts.summary or None,
        "last_step": facts.last_step or None,
        "problems": facts.problems,
    }
    if found is not None:
        fields["findings"] = [dataclasses.asdict(one) for one in found]
    return json.dumps(_strict(fields), ensure_ascii=False)


def _strict(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not support."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list) else value
