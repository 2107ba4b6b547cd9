"""The card of a set of rows: counts, columns, lengths, languages and repeated prompts, as Markdown and JSON.

Lengths of all rows are counted in classes whose bounds grow by a quarter, so that memory does not grow with the rows;
quantiles are the upper bounds of their class. Languages are those of the first and then every N-th row.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from areal_like.errors import UserError
from areal_like.plain_text import printable
from controller.preflight.dataset.columns import Columns
from controller.preflight.dataset.index import SeenTexts
from controller.preflight.dataset.languages import Detector
from controller.preflight.dataset.port import Row
from controller.preflight.dataset.text import digest

MAX_COLUMNS = 100
"""Number of columns that are described; the others are counted."""
MAX_DETECTED = 2_000
"""Number of rows whose language is detected."""
MIN_LETTERS = 20
GROWTH = 1.25
QUANTILES = (0.05, 0.5, 0.95)


@dataclass
class Lengths:
    """Lengths in characters."""

    count: int = 0
    total: int = 0
    low: int = 0
    high: int = 0
    classes: Counter[int] = field(default_factory=Counter)

    def add(self, length: int) -> None:
        """Count one text."""
        self.low = length if not self.count else min(self.low, length)
        self.high = max(self.high, length)
        self.count, self.total = self.count + 1, self.total + length
        self.classes[math.ceil(math.log(length, GROWTH)) if length > 1 else 0] += 1

    def as_dict(self) -> dict[str, Any]:
        """Count, mean, extremes, quantiles."""
        if not self.count:
            return {"count": 0}
        quantiles = {f"p{round(100 * share)}": self._quantile(share) for share in QUANTILES}
        mean = round(self.total / self.count, 1)
        return {"count": self.count, "mean": mean, "min": self.low, **quantiles, "max": self.high}

    def _quantile(self, share: float) -> int:
        wanted, seen = share * self.count, 0
        for number in sorted(self.classes):
            seen += self.classes[number]
            if seen >= wanted:
                return max(self.low, min(self.high, math.floor(GROWTH**number)))
        return self.high


@dataclass(frozen=True)
class Card:
    """Facts of a set. languages: shares by code; None: the library is not installed."""

    num_rows: int
    columns: dict[str, dict[str, int]]
    """By column: number of rows with each type of value."""
    lengths: dict[str, dict[str, Any]]
    languages: dict[str, float] | None
    num_detected: int
    num_repeated: int
    """Rows whose prompt an earlier row has."""
    roles: Columns

    def as_dict(self) -> dict[str, Any]:
        """All facts, as plain data."""
        return {
            "rows": self.num_rows, "columns": self.columns, "lengths": self.lengths, "languages": self.languages,
            "languages_detected_in": self.num_detected, "repeated_prompts": self.num_repeated,
        }  # fmt: skip

    def as_json(self, manifest: dict[str, Any], *, is_ascii: bool = False) -> str:
        """Facts and sources, and what was removed if the set was cleaned. is_ascii: escape all other characters."""
        return json.dumps({**self.as_dict(), **_origin(manifest)}, indent=2, ensure_ascii=is_ascii) + "\n"

    def as_markdown(self, name: str, manifest: dict[str, Any]) -> str:
        """A page for people."""
        lines = [f"# {name}", "", f"{self.num_rows:,} rows. Prompts are in column `{self.roles.prompt}`"]
        lines[-1] += f", answers in `{self.roles.answer}`." if self.roles.answer else "; there are no answers."
        if self.num_repeated:
            lines.append(f"{self.num_repeated:,} rows have the prompt of an earlier row.")
        lines += ["", "## Columns", "", "| column | values |", "|---|---|"]
        lines += [f"| `{column}` | {_counts(kinds)} |" for column, kinds in self.columns.items()]
        lines += [
            "",
            "## Lengths in characters",
            "",
            "| text | rows | mean | min | p5 | p50 | p95 | max |",
            "|---|" + "---:|" * 7,
        ]
        for text, facts in self.lengths.items():
            if facts["count"]:
                cells = " | ".join(f"{facts[key]:,}" for key in ("count", "mean", "min", "p5", "p50", "p95", "max"))
                lines.append(f"| {text} | {cells} |")
        lines += ["", "## Languages", ""]
        if self.languages is None:
            lines.append("Not detected: the `data` extra is not installed.")
        elif not self.languages:
            lines.append("No prompt has enough letters.")
        else:
            shares = ", ".join(f"{code} {share:.1%}" for code, share in self.languages.items())
            lines.append(f"{shares} (of {self.num_detected:,} prompts).")
        lines += ["", "## Sources", "", "| file | bytes | SHA-256 |", "|---|---:|---|"]
        lines += [f"| `{one['path']}` | {one['bytes']:,} | `{one['sha256']}` |" for one in manifest["sources"]]
        if stages := manifest.get("stages"):
            lines += [
                "",
                "## Removed rows",
                "",
                f"{manifest['rows_in']:,} rows were read and {manifest['rows_out']:,} kept.",
                "",
            ]
            lines += ["| stage | removed | reasons |", "|---|---:|---|"]
            lines += [f"| `{one['kind']}` | {one['removed']:,} | {_counts(one['reasons'])} |" for one in stages]
        return printable("\n".join([*lines, ""]))


def _origin(manifest: dict[str, Any]) -> dict[str, Any]:
    stages = [
        {key: one[key] for key in ("kind", "options", "removed", "reasons")} for one in manifest.get("stages", ())
    ]
    return {"sources": manifest["sources"], **({"rows_read": manifest["rows_in"], "stages": stages} if stages else {})}


def _counts(counted: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counted.items()) or "-"


class CardMaker:
    """Collects the facts row by row. Call `card` once."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._num_rows = self._num_repeated = 0
        self._kinds: dict[str, Counter[str]] = {}
        self._lengths = {name: Lengths() for name in ("prompt", "answer", "solution")}
        self._seen = SeenTexts()
        self._samples: list[str] = []
        self._every = 1

    def add(self, row: Row) -> None:
        """Count a row."""
        if self._num_rows % self._every == 0:
            self._samples.append(row.prompt[:2_000])
            if len(self._samples) >= 2 * MAX_DETECTED:  # every second one from now on
                self._samples, self._every = self._samples[::2], 2 * self._every
        self._num_rows += 1
        for name, value in row.fields.items():
            known = name in self._kinds or len(self._kinds) < MAX_COLUMNS
            self._kinds.setdefault(name if known else "other columns", Counter())[_kind(value)] += 1
        for name, text in (("prompt", row.prompt), ("answer", row.answer), ("solution", row.solution)):
            if text:
                self._lengths[name].add(len(text))
        prompt = " ".join(row.prompt.casefold().split())
        self._num_repeated += self._seen.find_or_add(digest(prompt), "", b"") is not None

    def card(self) -> Card:
        """The card of all rows that were added."""
        self._seen.close()
        languages, num_detected = self._languages()
        return Card(
            self._num_rows,
            {name: dict(kinds.most_common()) for name, kinds in self._kinds.items()},
            {name: lengths.as_dict() for name, lengths in self._lengths.items()},
            languages, num_detected, self._num_repeated, self._columns,
        )  # fmt: skip

    def _languages(self) -> tuple[dict[str, float] | None, int]:
        try:
            detector = Detector(MIN_LETTERS)
        except UserError:
            return None, 0
        step = math.ceil(len(self._samples) / MAX_DETECTED) or 1
        found = Counter(language for text in self._samples[::step] if (language := detector.detect(text)[0]))
        total = found.total()
        return {code: round(count / total, 4) for code, count in found.most_common()}, total


def _kind(value: Any) -> str:
    names = {str: "text", bool: "true or false", int: "integer", float: "number", list: "list", dict: "object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
