"""`areal-like samples RUN`: prints prompts, answers and rewards as text, JSON Lines or an HTML page.

Reading is in sample_rows.py, layout in sample_text.py and sample_page.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from areal_like.encryption.run_key import encrypted_root
from areal_like.errors import UserError
from controller.run_folder.owner_host import whereabouts_if_known
from controller.run_folder.run_folder import RunFolder, is_from_files
from controller.runs.sample_rows import Choice, Found, Sample, read_samples

Format = Literal["text", "jsonl", "html"]
DEFAULT_LIMIT = {"text": 20, "jsonl": 200, "html": 200}


def samples(
    folder: RunFolder,
    choice: Choice,
    *,
    format: Format = "text",
    out: str = "",
    is_full: bool = False,
    console: Console | None = None,
) -> int:
    """Show samples; return the exit status, 0. Raises UserError.

    out: a file; "-" or "" is standard output, but a page without `out` is written to <run>/samples.html.
    """
    if is_from_files(whereabouts_if_known(folder).state):
        what = "the run trains from files, so it generates no samples"
        raise UserError(
            what, where=str(folder.root), remedy=f"run areal-like report {folder.root} to see what the model learns"
        )
    target = Path(out) if out not in ("", "-") else folder.root if format == "html" and not out else None
    if target is not None and encrypted_root(target) is not None:
        what = "the file contains texts of the run in the clear, and the run is encrypted"
        raise UserError(what, where=str(target), remedy="choose a file outside of it with --out FILE")
    found = read_samples(folder, choice)
    for problem in found.problems:
        print(f"note: {problem}", file=sys.stderr)
    if not found.samples:
        print(f"note: no sample matches ({choice.words()}); {_stock(found)}", file=sys.stderr)
    if format == "html":
        from controller.runs.sample_page import sample_page

        page = sample_page(folder, choice, found, is_full=is_full)
        _deliver(page, out or str(folder.root / "samples.html"), "samples")
    elif format == "jsonl":
        _deliver("".join(f"{line}\n" for line in as_lines(found.samples)), out, "samples")
    else:
        _as_text(folder, choice, found, out, is_full, console)
    return 0


def _as_text(folder: RunFolder, choice: Choice, found: Found, out: str, is_full: bool, console: Console | None) -> None:
    from controller.runs.sample_text import print_samples

    if out in ("", "-"):
        print_samples(folder, choice, found, console or Console(highlight=False, markup=False), is_full=is_full)
        return
    with _opened(Path(out)) as file:
        to_file = Console(file=file, highlight=False, markup=False, width=120)
        print_samples(folder, choice, found, to_file, is_full=is_full)
    print(f"samples: {out}")


def as_lines(samples: list[Sample]) -> Iterator[str]:
    """One JSON object per sample, with complete texts."""
    for sample in samples:
        row: dict[str, Any] = {"id": sample.name, **dataclasses.asdict(sample)}
        row["pieces"] = [{"version": version, "text": text} for version, text in sample.pieces]
        row["remarks"] = sample.remarks()
        yield json.dumps(row, ensure_ascii=False)


def _stock(found: Found) -> str:
    if found.num_stored:
        return f"the ledger contains {found.num_stored:,} finished samples"
    return "the ledger does not contain any finished samples yet"


def _deliver(text: str, out: str, what: str) -> None:
    if out in ("", "-"):
        sys.stdout.write(text)
        return
    with _opened(Path(out)) as file:
        file.write(text)
    print(f"{what}: {out}")


def _opened(path: Path) -> Any:
    try:
        return path.open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(
            f"the file cannot be written ({error.strerror})",
            where=str(path),
            remedy="choose a different file with --out FILE",
        ) from error
