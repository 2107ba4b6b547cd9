"""Checks or cleans a set of files with a plan: the implementation of `areal-like data check` and `clean`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_like import __version__
from controller.data.origins import MANIFEST, ROWS
from controller.preflight.dataset.card import Card, CardMaker
from controller.preflight.dataset.columns import Columns
from controller.preflight.dataset.croissant import croissant
from controller.preflight.dataset.output import OutputFolder, refuse_existing
from controller.preflight.dataset.passing import Outcome, Pass
from controller.preflight.dataset.reading import Line, Source, find_sources, first_rows, lines_of
from controller.preflight.dataset.registry import Plan
from controller.preflight.dataset.totals import StageTotals

FORMAT = 1
SHOW_EVERY = 1_000
"""Number of rows between two calls that show progress."""
SUSPICIOUS_SHARE = 0.5
"""A stage that removes more than this share of the rows may be the wrong one for them."""


@dataclass
class Report:
    """What a pass found."""

    sources: Sequence[Source]
    columns: Columns
    stages: list[StageTotals] = field(default_factory=list)
    num_in: int = 0
    num_out: int = 0
    card: Card | None = None
    """Of the kept rows."""

    @property
    def num_removed(self) -> int:
        """Rows that some stage removed."""
        return self.num_in - self.num_out

    @property
    def notes(self) -> list[str]:
        """Remarks on stages that removed most of the rows."""
        return [
            f"{one.kind} removed {one.num_removed:,} of {one.num_in:,} rows: check that this stage is suitable for "
            "your rows"
            for one in self.stages
            if one.num_removed > SUSPICIOUS_SHARE * one.num_in and one.num_in > 1
        ]

    def as_dict(self) -> dict[str, Any]:
        """For the manifest. The same files and plan give the same manifest."""
        return {
            "format": FORMAT,
            "made_by": f"areal-like {__version__}",
            "sources": [
                {"path": str(one.path), "bytes": one.num_bytes, "sha256": one.sha256} for one in self.sources
            ],
            "columns": asdict(self.columns),
            "rows_in": self.num_in,
            "rows_out": self.num_out,
            "stages": [one.as_dict() for one in self.stages],
        }  # fmt: skip


@dataclass(frozen=True)
class CleaningJob:
    """Files and a plan. show: called with the number of rows that were looked at."""

    files: Sequence[str]
    plan: Plan
    num_processes: int
    num_examples: int = 5
    show: Callable[[int], None] = lambda _: None

    def check(self) -> Report:
        """Count what the stages would remove; writes nothing. Raises UserError, OperationError."""
        return self._run(None)

    def clean(self, target: Path) -> Report:
        """Write the kept and the removed rows to a new folder. Raises UserError, OperationError, OSError."""
        refuse_existing(target)
        return self._run(target)

    def _run(self, target: Path | None) -> Report:
        sources = find_sources(self.files)
        lines, columns = opened(sources, self.plan.columns, needs_answer=True)
        work = Pass(self.plan.stages, columns, self.num_processes)
        report = Report(sources, columns)
        for spec, stage in zip(self.plan.stages, work.stages, strict=True):
            options = stage.options.model_dump(mode="json") or dict(spec.options)
            report.stages.append(StageTotals(spec.kind, _plain(options), stage.is_private, self.num_examples))
        if target is None:
            self._count(work, lines, report, None, None)
            return report
        maker = CardMaker(columns)
        with OutputFolder(target) as folder:
            self._count(work, lines, report, folder, maker)
            report.card = maker.card()
            files = folder.close_rows()
            manifest = {**report.as_dict(), "files": files}
            folder.finish(
                {
                    MANIFEST: json.dumps(manifest, indent=2, ensure_ascii=False) + "\n",
                    "card.json": report.card.as_json(manifest),
                    "card.md": report.card.as_markdown(target.name, manifest),
                    "croissant.json": croissant(target.name, report.card, ROWS, files[ROWS]),
                }
            )
        return report

    def _count(
        self, work: Pass, lines: Iterator[Line], report: Report, folder: OutputFolder | None, maker: CardMaker | None
    ) -> None:
        with closing(work.run(lines)) as outcomes:
            self._count_all(outcomes, report, folder, maker)

    def _count_all(
        self, outcomes: Iterator[Outcome], report: Report, folder: OutputFolder | None, maker: CardMaker | None
    ) -> None:
        for outcome in outcomes:
            report.num_in += 1
            last = len(report.stages) if outcome.stage is None else outcome.stage + 1
            for totals in report.stages[:last]:
                totals.num_in += 1
            kind = ""
            if outcome.stage is None or outcome.finding is None:
                report.num_out += 1
                if maker is not None:
                    maker.add(outcome.row)
            else:
                report.stages[outcome.stage].add(outcome.row, outcome.finding)
                kind = report.stages[outcome.stage].kind
            if folder is not None:
                folder.add(outcome, kind)
            if report.num_in % SHOW_EVERY == 0:
                self.show(report.num_in)


def opened(
    sources: Sequence[Source], mapped: Mapping[str, str | None], *, needs_answer: bool
) -> tuple[Iterator[Line], Columns]:
    """The lines of the files, and the columns by the first rows that can be read. Raises UserError."""
    rows, where, lines = first_rows(lines_of(sources), str(sources[0].path))
    return lines, Columns.plan(rows, mapped, where, needs_answer=needs_answer)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
