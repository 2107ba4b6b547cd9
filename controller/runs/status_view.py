"""Layout of the status of a run: a page for a terminal of any width, or one line.

Files are read in facts.py; health is determined in status.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from controller.report.finding import Finding
from controller.run_folder.formatting import ago, megabytes, number, percent, printable, span
from controller.run_folder.restarts import read_restarts
from controller.run_folder.run_folder import is_resumable
from controller.runs.facts import Facts, Rate

Verdict = Literal["ok", "warning", "bad", "unknown"]
STYLE: Mapping[str, str] = {
    "ok": "green", "good": "green", "warning": "yellow", "bad": "bold red", "unknown": "yellow",
    "running": "bold green", "finished": "bold green", "stopped": "bold", "failed": "bold red",
    "crashed": "bold red", "foreign": "bold yellow",
}  # fmt: skip
_UNIT = {"rollout": "tok/s", "trainer": "tok/s", "reward": "scores/s"}
_MAX_EVALS = 5


@dataclass(frozen=True)
class Health:
    """Health of the whole run, with the reason."""

    verdict: Verdict
    words: str


class Flow:
    """Parts placed next to each other up to the width; a part is wrapped only if it alone is too wide."""

    def __init__(self, parts: Sequence[str], style: str = "") -> None:
        self._parts, self._style = parts, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for part in self._parts:
            if line and cell_len(line) + 3 + cell_len(part) > options.max_width:
                yield Text(line, self._style)
                line = ""
            line = f"{line}   {part}" if line else part
        yield Text(line, self._style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = [cell_len(part) for part in self._parts] or [0]
        return Measurement(min(max(widths), options.max_width), min(sum(widths) + 3 * len(widths), options.max_width))


def page(facts: Facts, health: Health) -> Group:
    """Render the whole status."""
    facing = Table.grid(padding=(0, 2))
    facing.add_column(style="dim", no_wrap=True)
    facing.add_column(overflow="fold")
    for label, value in _facing(facts, health):
        facing.add_row(label, value)
    title = Text.assemble((facts.folder.name, "bold"), "  ", (facts.where.kind, STYLE[facts.where.kind]))
    parts: list[RenderableType] = [title, Text(str(facts.folder.root), style="dim", overflow="fold"), facing]
    if facts.processes and facts.where.kind in ("running", "foreign"):
        parts.append(Padding(_processes(facts), (1, 0, 0, 0)))
    parts += [Text(f"note: {printable(problem)}", style="yellow") for problem in facts.problems]
    return Group(*parts)


def _facing(facts: Facts, health: Health) -> Iterator[tuple[str, RenderableType]]:
    """Labels and their values."""
    yield "health", Text(printable(health.words), style=STYLE[health.verdict])
    if facts.where.kind == "crashed":
        yield "next", Text(f"areal-like resume {facts.folder.root}\nareal-like logs {facts.folder.root}")
    elif facts.where.kind in ("stopped", "failed") and is_resumable(facts.where.state):
        yield "next", Text(f"areal-like resume {facts.folder.root}")
    if progress := _progress(facts):
        yield "progress", Flow(progress)
    if restarts := read_restarts(facts.folder.root):
        newest = restarts[-1]
        words = f"{len(restarts)} by --keep-alive; the last one after step {newest.get('step', 0)}: {newest['cause']}"
        yield "restarts", Text(printable(words))
    if preparing := str(facts.status.get("preparing") or ""):
        yield "preparing", Text(" ".join(printable(preparing).split()))
    if facts.where.kind in ("running", "foreign") and facts.status.get("status") != "preparing":
        waits = [printable(str(wait)) for wait in facts.status.get("waits") or ()]
        yield "waits", Text("\n".join(waits) if waits else "none")
    if last := _last_step(facts.last_step):
        yield "last step", Flow(last)
    if facts.accuracy:
        shown = sorted(facts.accuracy.items())
        if len(shown) > _MAX_EVALS:
            shown = [shown[0], *shown[1 - _MAX_EVALS :]]
        yield "accuracy", Flow([f"v{version} {value:.3f}" for version, value in shown])
    if counts := facts.status.get("counts"):
        yield "groups", Flow([printable(f"{key} {value}") for key, value in counts.items()])
    if facts.summary and not facts.where.is_running:
        yield "summary", Flow(_summary(facts.summary))
    if facts.where.is_running and "rss_mb" in facts.controller:
        memory = megabytes(facts.controller["rss_mb"])
        yield "controller", Text(f"process {facts.controller['pid']}, {memory}")
    if facts.where.kind == "foreign" and facts.age_s is not None:
        yield "as of", Text(f"{ago(facts.age_s)}, on {facts.status.get('host', 'another machine')}")


def _progress(facts: Facts) -> list[str]:
    """`step 12 of 80 (15 %)`, `version 12`, `1 min 22 s so far`, `about 7 min left`."""
    parts = []
    step, num_steps = facts.step, facts.num_steps
    if num_steps:
        parts.append(f"step {step or 0} of {num_steps} ({percent((step or 0) / num_steps)})")
    elif step is not None:
        parts.append(f"{step} steps")
    version, elapsed_s, eta_s = (facts.status.get(key) for key in ("version", "elapsed_s", "eta_s"))
    if isinstance(version, int) and version >= 0:
        parts.append(f"version {version}")
    if isinstance(elapsed_s, int | float) and elapsed_s > 0:
        is_over = facts.where.kind not in ("running", "foreign")
        parts.append(f"{'took ' if is_over else ''}{span(elapsed_s)}{'' if is_over else ' so far'}")
    if isinstance(eta_s, int | float) and facts.where.kind in ("running", "foreign"):
        parts.append(f"about {span(eta_s)} left")
    return parts


def _last_step(row: Mapping[str, Any]) -> list[str]:
    if "step" not in row:
        return []
    parts = [f"{row['step']}"]
    for key, label, digits in (
        ("reward_mean", "reward", 3), ("loss", "loss", 4), ("grad_norm", "grad", 3), ("staleness_mean", "staleness", 2),
    ):  # fmt: skip
        if key in row:
            parts.append(f"{label} {number(row[key], digits)}")
    if isinstance(share := row.get("trainer_wait_share"), int | float):
        parts.append(f"trainer waited {percent(share)}")
    return parts


def _summary(summary: Mapping[str, Any]) -> list[str]:
    """Main results of the run."""
    parts, since = [], ""
    if (summary.get("lives") or 1) > 1:
        from controller.telemetry.summary import SINCE_RESUME  # imports the ledger's messages, which only writers need

        since = f" {SINCE_RESUME}"
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    if after is not None:
        start = f"{number(before)} -> " if before is not None else ""
        parts.append(f"accuracy {start}{number(after)}")
    if isinstance(wall_s := summary.get("wall_s"), int | float):
        parts.append(f"{span(wall_s)}{since}")
    if isinstance(rate := summary.get("samples_per_s"), int | float):
        parts.append(f"{rate:.1f} samples/s{since}")
    for key, words in (("trainer_wait_share", "trainer waited"), ("rollout_idle_share", "rollouts idle")):
        if isinstance(share := summary.get(key), int | float):
            parts.append(f"{words} {percent(share)}{since or ' of the whole run'}")
    if audit := summary.get("audit"):
        parts.append(f"audit {audit}")
    return parts


def _processes(facts: Facts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for title, justify in (
        ("process", "left"), ("state", "left"), ("pid", "right"), ("memory", "right"), ("work", "right"),
        ("busy", "right"),
    ):  # fmt: skip
        table.add_column(title, justify=justify, no_wrap=title != "state", overflow="fold")  # type: ignore[arg-type]
    for name, row in sorted(facts.processes.items()):
        rate = facts.rates.get(name, Rate(None, None))
        unit = _UNIT.get(str(row.get("role")), "/s")
        memory_mb = row.get("rss_mb")
        host = f" on {row['host']}" if row.get("host") else ""
        table.add_row(
            Text(printable(name + host)),
            Text(printable(str(row.get("state", "?")))),
            str(row.get("pid") or "-"),
            megabytes(memory_mb) if isinstance(memory_mb, int | float) else "-",
            "-" if rate.per_s is None else f"{rate.per_s:,.0f} {unit}",
            "-" if rate.busy is None else percent(rate.busy),
        )
    return table


def findings(found: Sequence[Finding]) -> Group:
    """Diagnosis of a run's metrics, with recommended changes."""
    parts: list[RenderableType] = []
    for finding in found:
        title = Text.assemble(
            (f"{finding.severity}: ", STYLE.get(finding.severity, "")), (printable(finding.title), "bold")
        )
        parts.append(Padding(title, (1, 0, 0, 0)))
        rest = (
            finding.detail,
            finding.advice and f"-> {finding.advice}",
            finding.predicted and f"   {finding.predicted}",
        )
        parts += [Padding(Text(printable(text)), (0, 0, 0, 2)) for text in rest if text]
    return Group(*parts)


def one_line(facts: Facts, health: Health) -> str:
    """The status in one line, for logs; it changes when the run progresses."""
    parts = [facts.folder.name, facts.where.kind]
    if facts.num_steps:
        parts.append(f"step {facts.step or 0}/{facts.num_steps}")
    if facts.accuracy:
        version = max(facts.accuracy)
        parts.append(f"accuracy v{version} {facts.accuracy[version]:.3f}")
    if health.verdict != "ok" or facts.where.kind != "running":
        parts.append(printable(health.words))
    return "  ".join(parts)
