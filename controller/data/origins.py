"""Where rows come from: files with their hashes, and the manifest of a set that was cleaned (docs/cleaning.md).

`data.json` of a run is written when it starts. The rows themselves are not repeated in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from controller.config.data_settings import TrainSource, eval_key
from controller.config.run_config import DataSource, RunConfig
from controller.data.live import live_files
from controller.data.sources import find_files

DATA_FILE = "data.json"
FORMAT = 1
ROWS, MANIFEST, ORIGINS = "rows.jsonl", "manifest.json", "origins.jsonl"
"""Files of a set that was cleaned: rows, what was done, and file and line of each row before."""
MAX_DEPTH = 8
"""Sets that were made from each other are followed so far."""
_PLACE = re.compile(r"(?P<name>.*?)(?::| entry | row )(?P<number>\d+)", re.DOTALL)


def record_data(config: RunConfig, root: Path) -> None:
    """Write data.json into the folder of a run that starts. Raises UserError (a file cannot be read), OSError."""
    record = {"format": FORMAT, "sources": [_source(key, source) for key, source in sources_of(config).items()]}
    (root / DATA_FILE).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_record(root: Path) -> dict[str, Any]:
    """data.json of a run; `sources` is empty for a run of an earlier version. Raises UserError if it is damaged."""
    path = root / DATA_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        sources = [dict(one) for one in record["sources"]]
        for one in sources:
            texts = [one["key"], *(file[name] for file in one.get("files", ()) for name in ("name", "path"))]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("a source has an invalid key, name or path")
        return {"sources": sources}
    except FileNotFoundError:
        return {"sources": []}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"the file cannot be read ({error})", where=str(path), remedy="restore the file from a backup"
        ) from error


def sources_of(config: RunConfig) -> dict[str, DataSource]:
    """Every source of rows by its key in the configuration."""
    found: dict[str, DataSource] = {"data.train": config.data.train}
    found |= {f"data.mix.{number}": source for number, source in enumerate(config.data.mix)}
    for name, source in config.data.eval_sources.items():
        found[eval_key(name, config.data)] = source
    if config.warm_start is not None:
        found["warm_start.data"] = config.warm_start.data
    return found


def _source(key: str, source: DataSource) -> dict[str, Any]:
    if source.path is None:
        return {"key": key, "kind": source.kind, "name": source.dataset or source.generator}
    path = Path(source.path).expanduser()
    is_live = isinstance(source, TrainSource) and source.follow and path.is_dir()
    files = live_files(path) if is_live else find_files(source.path, key)
    return {"key": key, "kind": "path", "files": [describe_file(path) for path in files]}


def describe_file(path: Path, depth: int = 0) -> dict[str, Any]:
    """Name, absolute path, size and SHA-256 of a file; `set`, if a manifest next to it is that of the file.

    Raises UserError.
    """
    try:
        with path.open("rb") as file:
            digest, size = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
    except OSError as error:
        raise UserError(f"the file cannot be read ({error.strerror})", where=str(path)) from error
    found: dict[str, Any] = {"name": str(path), "path": str(path.absolute()), "bytes": size, "sha256": digest}
    if depth < MAX_DEPTH and (manifest := _manifest(path, digest)) is not None:
        found["set"] = _described_set(path.absolute().parent, manifest, depth)
    return found


def _manifest(path: Path, digest: str) -> dict[str, Any] | None:
    """The manifest next to a file; None if there is none, or it is of other rows."""
    try:
        manifest = json.loads((path.parent / MANIFEST).read_text(encoding="utf-8"))
        is_own = path.name == ROWS and manifest["files"][ROWS]["sha256"] == digest
        return dict(manifest) if is_own and isinstance(manifest["sources"], list) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _described_set(folder: Path, manifest: Mapping[str, Any], depth: int) -> dict[str, Any]:
    stages = [
        {"kind": one.get("kind"), "options": one.get("options"), "removed": one.get("removed")}
        for one in manifest.get("stages", ()) if isinstance(one, dict)
    ]  # fmt: skip
    sources = []
    for one in manifest["sources"]:
        known = {"name": str(one.get("path")), "bytes": one.get("bytes"), "sha256": one.get("sha256")}
        path = Path(known["name"])
        if depth + 1 < MAX_DEPTH and path.name == ROWS and path.is_file():
            now = describe_file(path, depth + 1)
            known |= {"set": now["set"]} if "set" in now and now["sha256"] == known["sha256"] else {}
        sources.append(known)
    described = {
        "manifest": str(folder / MANIFEST), "sha256": hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest(),
        "rows_in": manifest.get("rows_in"), "rows_out": manifest.get("rows_out"), "stages": stages, "sources": sources,
    }  # fmt: skip
    origins = manifest["files"].get(ORIGINS)
    return described | ({"origins": origins.get("sha256")} if isinstance(origins, dict) else {})


# ---------------------------------------------------------------- places


def split_place(where: str) -> tuple[str, int] | None:
    """File and number of a row's location (`rows.jsonl:12`, `rows.parquet row 3`); None if it is none."""
    found = _PLACE.fullmatch(where)
    return (found["name"], int(found["number"])) if found else None


class Origins:
    """File and line of the rows of cleaned sets before they were cleaned; each file of origins is read once."""

    def __init__(self) -> None:
        self._known: dict[str, Sequence[str] | str] = {}

    def chain(self, where: str, described: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """The places of a row before each cleaning, newest first, and why the chain ends too early, else an empty text.

        described: what data.json has of the row's file. Each place has `where` and the file's `sha256`.
        """
        found: list[dict[str, Any]] = []
        for _ in range(MAX_DEPTH):
            made, place = described.get("set"), split_place(where)
            if made is None or place is None:
                return found, ""
            lines = self._lines(made)
            if isinstance(lines, str):
                return found, lines
            if not 0 < place[1] <= len(lines):
                return found, f"{made['manifest']}: its {ORIGINS} has no line {place[1]}"
            where = lines[place[1] - 1]
            name = (split_place(where) or (where, 0))[0]
            described = next((one for one in made["sources"] if one["name"] == name), {})
            found.append({"where": where, "file": name, "sha256": described.get("sha256")})
        return found, ""

    def _lines(self, made: Mapping[str, Any]) -> Sequence[str] | str:
        """`where` of each row, or why they are not known."""
        key = str(made["manifest"])
        if key not in self._known:
            self._known[key] = _read_origins(Path(key).parent / ORIGINS, made.get("origins"))
        return self._known[key]


def _read_origins(path: Path, expected: str | None) -> list[str] | str:
    if expected is None:
        return f"{path.parent} was written by an earlier version of areal_like, which did not record the original lines"
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != expected:
            return f"{path} has changed since"
        return [str(json.loads(line)) for line in content.splitlines()]
    except (OSError, ValueError) as error:
        return f"{path} cannot be read ({getattr(error, 'strerror', None) or error})"
