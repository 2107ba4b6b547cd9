"""Sends OpenLineage events of a run: its data sets as inputs, its checkpoints and final model as outputs.

Events follow the published schema (https://openlineage.io/spec/2-0-2/OpenLineage.json, RunEvent) as plain JSON: START,
RUNNING with each checkpoint, and COMPLETE, FAIL or ABORT. A data set that `areal-like data clean` wrote has an event of
its own, which links it to the files it was made from. They go to a file with one event a line, or to an HTTP address
(`POST URL/api/v1/lineage`, as Marquez and DataHub accept them). Queues are in sinks.py.
"""

from __future__ import annotations

import datetime
import json
import os
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like import __version__
from areal_like.errors import UserError
from controller.config.run_config import OpenLineageSettings
from controller.data.origins import read_record

SCHEMA = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
VERSION_FACET = (
    "https://openlineage.io/spec/facets/1-0-1/DatasetVersionDatasetFacet.json#/$defs/DatasetVersionDatasetFacet"
)
ERROR_FACET = "https://openlineage.io/spec/facets/1-0-1/ErrorMessageRunFacet.json#/$defs/ErrorMessageRunFacet"
PRODUCER = f"https://pypi.org/project/areal-like/{__version__}"
PATH = "/api/v1/lineage"
FILE = "openlineage.jsonl"
TIMEOUT_S = 10.0
KEY = "metrics.openlineage"
TYPES = {"completed": "COMPLETE", "finished": "COMPLETE", "stopped": "ABORT", "failed": "FAIL"}
"""Type of the last event by the status of the run."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes an error of a redirect: urllib would send the key to any host, and the event as an empty GET."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request."""


_OPENER = urllib.request.build_opener(_NoRedirect)


class OpenLineageSink:
    """Sends events. A run that is resumed has the same run id, and starts with another START."""

    name = "openlineage"
    kinds = frozenset({"start", "checkpoint", "end"})

    def __init__(self, settings: OpenLineageSettings, folder: Path) -> None:
        """folder: of the run. Raises UserError: the key is missing, or the file cannot be written."""
        self._namespace, self._folder, self._url = settings.namespace, folder, settings.url
        self._key = ""
        if settings.key_env is not None:
            self._key = os.environ.get(settings.key_env, "").strip()  # a file with a key often ends with a line break
            if not self._key:
                what = f"the environment variable {settings.key_env} is not set"
                raise UserError(
                    what, where=f"{KEY}.key_env", remedy=f"set {settings.key_env} to the API key, or remove key_env"
                )
            if not (self._key.isascii() and self._key.isprintable()):
                what = (
                    f"the value of the environment variable {settings.key_env} contains control or non-ASCII characters"
                )
                raise UserError(
                    what, where=f"{KEY}.key_env", remedy=f"set {settings.key_env} to the API key, without other text"
                )
        self._path = Path(settings.file).expanduser() if settings.file else folder / FILE
        if self._url is None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.open("a").close()
            except OSError as error:
                what = f"{self._path} cannot be written ({error.strerror})"
                raise UserError(what, where=f"{KEY}.file", remedy="choose a different file") from error
        self._run: dict[str, Any] = {}
        self._job: dict[str, Any] = {}
        self._inputs: list[dict[str, Any]] = []
        self._outputs: list[dict[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        """Send the event of a row. Raises OSError (also of HTTP)."""
        time_s = float(record.get("time_s", 0.0))
        if record["kind"] == "start":
            sources = read_record(self._folder)["sources"]
            self._run = {"runId": _uuid(str(record["run_id"]))}
            self._job = {"namespace": self._namespace, "name": str(record["name"])}
            self._inputs = [one for source in sources for one in _datasets(source)]
            for event in _cleaning_events(sources, self._namespace, time_s):
                self._send(event)
            self._send(self._event("START", time_s, []))
        elif record["kind"] == "checkpoint" and self._run:
            made = _dataset(str(Path(str(record["path"])).absolute()), f"version {record['version']}")
            self._outputs.append(made)
            self._send(self._event("RUNNING", time_s, [made]))
        elif record["kind"] == "end" and self._run:
            final = self._folder / "final"
            outputs = [*self._outputs, *([_dataset(str(final.absolute()), "")] if final.is_dir() else [])]
            kind = TYPES.get(str(record.get("status")), "ABORT")
            if kind == "FAIL":
                facet = {"message": str(record.get("reason", "")).partition("\n")[0], "programmingLanguage": "Python"}
                self._run["facets"] = {"errorMessage": _facet(ERROR_FACET, facet)}
            self._send(self._event(kind, time_s, outputs))

    def close(self) -> None:
        """Nothing is left to write."""

    def _event(self, kind: str, time_s: float, outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return _event(kind, time_s, self._run, self._job, self._inputs, outputs)

    def _send(self, event: Mapping[str, Any]) -> None:
        body = json.dumps(event).encode()
        if self._url is None:
            with self._path.open("ab") as file:
                file.write(body + b"\n")
            return
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        request = urllib.request.Request(f"{self._url.rstrip('/')}{PATH}", body, headers, method="POST")
        try:
            _OPENER.open(request, timeout=TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            with error:
                raise OSError(f"the server returned HTTP status {error.code}") from None


def _cleaning_events(sources: Sequence[Mapping[str, Any]], namespace: str, time_s: float) -> list[dict[str, Any]]:
    """One event for each data set that was cleaned: from its files to its rows."""
    found = []
    for source in sources:
        for file in source.get("files", ()):
            made = file.get("set")
            if made is None:
                continue
            run = {"runId": _uuid(str(made["sha256"]))}
            job = {"namespace": namespace, "name": "data clean"}
            inputs = [_dataset(str(Path(one["name"]).absolute()), one.get("sha256")) for one in made["sources"]]
            found.append(_event("COMPLETE", time_s, run, job, inputs, [_dataset(file["path"], file["sha256"])]))
    return found


def _datasets(source: Mapping[str, Any]) -> list[dict[str, Any]]:
    if source.get("kind") == "path":
        return [_dataset(file["path"], file["sha256"]) for file in source.get("files", ())]
    namespace = "huggingface" if source.get("kind") == "dataset" else "generator"
    return [{"namespace": namespace, "name": str(source.get("name")), "facets": {}}]


def _dataset(path: str, version: str | None) -> dict[str, Any]:
    facets = {"version": _facet(VERSION_FACET, {"datasetVersion": version})} if version else {}
    return {"namespace": "file", "name": path, "facets": facets}


def _facet(schema: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"_producer": PRODUCER, "_schemaURL": schema, **fields}


def _event(
    kind: str, time_s: float, run: Mapping[str, Any], job: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]],
    outputs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    when = datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat(timespec="milliseconds")
    return {
        "eventType": kind, "eventTime": when, "run": dict(run), "job": dict(job), "inputs": list(inputs),
        "outputs": list(outputs), "producer": PRODUCER, "schemaURL": SCHEMA,
    }  # fmt: skip


def _uuid(text: str) -> str:
    """Run ids of OpenLineage are UUIDs: the same one for the same run."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"areal-like:{text}"))
