"""Results of the tools of `areal-like mcp`: the text that a command prints, and the same content as data.

One function per tool. The protocol is in mcp_server.py.

No function changes a run. Functions on a config execute the user's scorers, as the commands of the same name do.
`probe` also runs the model, in separate processes and a folder that is removed afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from areal_like.errors import UserError
from controller.run_folder.locate import find_run_to_read

WIDTH = 120
MAX_SAMPLES = 50


@dataclass(frozen=True)
class Answer:
    """Result of a tool: `text` for people, `data` for programs."""

    text: str
    data: dict[str, Any]


def _console() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=WIDTH, highlight=False, markup=False), file


# ---------------------------------------------------------------- runs


def runs(show_all: bool) -> Answer:
    """List the runs of this machine."""
    from controller.runs.ps import gather, plain, ps

    console, file = _console()
    ps(show_all=show_all, console=console)
    rows = [plain(row) for row in gather() if show_all or row.kind == "running"]
    return Answer(file.getvalue(), {"runs": rows})


def status(run: str, *, why: bool = False) -> Answer:
    """Show the status of a run; `why`: also diagnose its metrics. Raises UserError."""
    from controller.report.data import RunData
    from controller.report.diagnosis import diagnose
    from controller.runs.facts import read_facts
    from controller.runs.status import as_line, parts

    folder = find_run_to_read(run)
    facts = read_facts(folder)
    console, file = _console()
    found = diagnose(RunData.load(folder)) if why else None
    for part in parts(facts, found):
        console.print(part)
    return Answer(file.getvalue(), json.loads(as_line(facts, found)))


def samples(run: str, choice: dict[str, Any]) -> Answer:
    """Show finished samples of a run. choice: fields of sample_rows.Choice. Raises UserError."""
    from controller.runs.sample_rows import Choice, read_samples
    from controller.runs.samples import as_lines
    from controller.runs.samples import samples as show

    if not 0 < choice["limit"] <= MAX_SAMPLES:
        raise UserError(f"the limit must be from 1 to {MAX_SAMPLES}, not {choice['limit']}", where="limit")
    folder, wanted = find_run_to_read(run), Choice(**choice)
    console, file = _console()
    show(folder, wanted, console=console)
    rows = [json.loads(line) for line in as_lines(read_samples(folder, wanted).samples)]
    return Answer(file.getvalue(), {"samples": rows})


def report(run: str) -> Answer:
    """Return the key figures of a run, its diagnosis and its summary. Raises UserError."""
    from controller.report.data import RunData
    from controller.report.diagnosis import diagnose
    from controller.report.overview import figures
    from controller.runs.facts import read_facts

    folder = find_run_to_read(run)
    data = RunData.load(folder)
    shown, found = figures(data), diagnose(data)
    page = folder.root / "report.html"
    lines = [f"{one.severity}: {' '.join(filter(None, (one.title, one.detail, one.advice)))}" for one in found]
    lines += [f"{one.label}: {one.value}" + (f" ({one.note})" if one.note else "") for one in shown]
    lines.append(f"page: {page}" if page.is_file() else f"no page yet: areal-like report {folder.root}")
    return Answer(
        "\n".join(lines) + "\n",
        {
            "figures": [dataclasses.asdict(one) for one in shown],
            "findings": [dataclasses.asdict(one) for one in found],
            "summary": read_facts(folder).summary or None,
            "page": str(page) if page.is_file() else None,
        },
    )


# ---------------------------------------------------------------- configs


def validate(config: str, overrides: Sequence[str]) -> Answer:
    """Return the resolved config with its derived numbers. Raises UserError with every problem."""
    from areal_like.config import dump_yaml
    from controller.cli.machine import look_at_machine
    from controller.cli.resolved_page import resolved_page
    from controller.config.loading import load_config
    from controller.config.offline_loading import is_offline_file, load_offline

    if is_offline_file(config, overrides):
        offline = load_offline(config, overrides)
        return Answer(dump_yaml(offline.config), {"source": offline.source, "notes": list(offline.notes)})
    loaded = load_config(config, overrides)
    found = look_at_machine(loaded, "validate")
    notes = [*loaded.notes, *(str(problem) for problem in found.absent), *found.notes]
    return Answer(resolved_page(loaded, found), {"source": loaded.source, "notes": notes})


def probe(config: str, overrides: Sequence[str], prompts: int, num_samples: int) -> Answer:
    """A few samples of the starting model, and why the reward would stay flat. Raises UserError, OperationError."""
    from controller.cli.machine import look_at_machine
    from controller.config.loading import load_config
    from controller.config.offline_loading import is_offline_file
    from controller.probe.findings import find
    from controller.probe.page import as_json, as_text
    from controller.probe.probe import Probe

    if is_offline_file(config, overrides):
        raise UserError(
            "this config trains from files without rollouts, so there are no rewards to probe",
            where=config,
            remedy="use the tool `validate` instead",
        )
    if prompts < 1 or num_samples < 1:
        raise UserError(
            "there are no samples to generate",
            where="prompts, samples",
            remedy="set both prompts and samples to 1 or more",
        )
    loaded = load_config(config, overrides)
    table = look_at_machine(loaded, "probe").train
    assert table is not None, "preflight reads the rows"
    looking = Probe(loaded.config, prompts, num_samples, False, say=lambda words: print(words, file=sys.stderr))
    seen, notes = looking.run(table)
    found = find(seen)
    name = loaded.config.name
    return Answer(as_text(name, seen, found, notes), json.loads(as_json(name, seen, found, notes)))


def simulate(words: Sequence[str]) -> Answer:
    """Simulate a config on machines that need not exist. words: arguments of `areal-like simulate`. Raises
    UserError.
    """
    from controller.cli.arguments import parse
    from controller.simulate.command import facts, print_trials, simulated
    from controller.simulate.plan import best

    def complain(text: str) -> int:
        raise UserError(text)

    with contextlib.redirect_stdout(io.StringIO()) as file:  # standard output of this process is used by the protocol
        try:
            arguments = parse(["simulate", *words], complain)
        except SystemExit:  # --help
            return Answer(file.getvalue(), {})
        trials = simulated(arguments, describe=True)
        print_trials(trials, arguments)
    return Answer(file.getvalue(), {"trials": [facts(trial) for trial in trials], "best": facts(best(trials))})
