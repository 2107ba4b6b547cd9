"""OpenLineage events of a run have its data as inputs and its models as outputs, in the published form."""

from __future__ import annotations

import datetime
import json
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from controller.config.run_config import OpenLineageSettings
from controller.data.origins import DATA_FILE
from controller.telemetry.openlineage_sink import FILE, PATH, OpenLineageSink

SOURCES = [
    {"key": "data.train", "kind": "path", "files": [
        {"name": "clean/rows.jsonl", "path": "/d/clean/rows.jsonl", "bytes": 9, "sha256": "a" * 64,
         "set": {"manifest": "/d/clean/manifest.json", "sha256": "b" * 64, "stages": [],
                 "sources": [{"name": "/d/raw.jsonl", "bytes": 12, "sha256": "c" * 64}]}},
    ]},
    {"key": "data.eval", "kind": "dataset", "name": "openai/gsm8k"},
]  # fmt: skip
START = {"kind": "start", "time_s": 1_700_000_000.0, "name": "mine", "run_id": "run-1", "folder": "x", "config": {}}
SAVED = {"kind": "checkpoint", "time_s": 1_700_000_010.0, "version": 4, "path": "/runs/mine/checkpoints/step_000004"}
END = {"kind": "end", "time_s": 1_700_000_020.0, "status": "completed", "reason": "4 steps done"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / DATA_FILE).write_text(json.dumps({"sources": SOURCES}))
    return tmp_path


def sent(folder: Path, *rows: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    sink = OpenLineageSink(OpenLineageSettings(**settings), folder)
    for row in rows:
        assert row["kind"] in sink.kinds
        sink.write(row)
    sink.close()
    path = Path(settings.get("file") or folder / FILE)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_of_a_run_link_its_files_to_its_checkpoints_and_its_final_model(folder: Path) -> None:
    (folder / "final").mkdir()
    cleaned, start, saved, end = sent(folder, START, SAVED, END, namespace="team")
    assert [one["eventType"] for one in (cleaned, start, saved, end)] == ["COMPLETE", "START", "RUNNING", "COMPLETE"]
    assert cleaned["job"] == {"namespace": "team", "name": "data clean"}
    assert [one["name"] for one in cleaned["inputs"]] == ["/d/raw.jsonl"]
    assert [one["name"] for one in cleaned["outputs"]] == ["/d/clean/rows.jsonl"]
    for event in (start, saved, end):
        assert event["job"] == {"namespace": "team", "name": "mine"}
        assert [(one["namespace"], one["name"]) for one in event["inputs"]] == [
            ("file", "/d/clean/rows.jsonl"), ("huggingface", "openai/gsm8k")
        ]  # fmt: skip
        assert event["inputs"][0]["facets"]["version"]["datasetVersion"] == "a" * 64
    assert start["outputs"] == []
    assert [one["facets"]["version"]["datasetVersion"] for one in saved["outputs"]] == ["version 4"]
    assert [Path(one["name"]).name for one in end["outputs"]] == ["step_000004", "final"]


def test_every_event_has_the_required_fields_of_the_schema(folder: Path) -> None:
    events = sent(folder, START, SAVED, {**END, "status": "failed", "reason": "out of memory\nmore"})
    for event in events:
        uuid.UUID(event["run"]["runId"])
        datetime.datetime.fromisoformat(event["eventTime"])
        assert event["schemaURL"].startswith("https://openlineage.io/spec/2-")
        assert event["producer"].startswith("https://")
        for data in (*event["inputs"], *event["outputs"]):
            assert {"namespace", "name"} <= data.keys()
            assert all({"_producer", "_schemaURL"} <= facet.keys() for facet in data["facets"].values())
    assert len({event["run"]["runId"] for event in events[1:]}) == 1
    assert (events[-1]["eventType"], events[-1]["run"]["facets"]["errorMessage"]["message"]) == (
        "FAIL",
        "out of memory",
    )


def test_a_stopped_run_aborts_and_a_resumed_one_has_the_same_id(folder: Path) -> None:
    first = sent(folder, START, {**END, "status": "stopped"})
    both = sent(folder, START, END)
    assert [one["eventType"] for one in both[1:]] == ["START", "ABORT", "COMPLETE", "START", "COMPLETE"]
    assert first[1]["run"]["runId"] == both[-1]["run"]["runId"]


class Api(BaseHTTPRequestHandler):
    status = 201

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))  # type: ignore[attr-defined]
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Api)
    server.seen, server.status = [], 201
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_events_are_posted_with_the_key_and_a_refusal_is_an_error_of_the_sink(
    folder: Path, api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINEAGE_KEY", "a-secret-key\n")
    url = f"http://127.0.0.1:{api.server_port}/"
    sink = OpenLineageSink(OpenLineageSettings(url=url, key_env="LINEAGE_KEY"), folder)
    sink.write(START)
    assert [(path, key) for path, key, _ in api.seen] == [(PATH, "Bearer a-secret-key")] * 2
    assert "a-secret-key" not in json.dumps([body for *_, body in api.seen])
    assert not (folder / FILE).exists()
    api.status = 503
    with pytest.raises(OSError, match="status 503"):
        sink.write(END)
    api.status, num_seen = 302, len(api.seen)
    with pytest.raises(OSError, match="status 302"):
        sink.write(END)
    assert len(api.seen) == num_seen + 1, "a redirect is not followed: the key is for this server alone"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "marquez:5000"}, "must be an address"), ({"url": "http://a:b@m"}, "must not contain a key"),
        ({"url": "http://m?key=1"}, "must not contain a key"), ({"url": "http://m", "file": "x"}, "mutually exclusive"),
        ({"key_env": "K"}, "no effect without `url`"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OpenLineageSettings(**settings)


def test_a_missing_key_and_a_folder_that_is_no_folder_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = OpenLineageSettings(url="http://m", key_env="A_KEY")
    with pytest.raises(UserError, match="A_KEY is not set"):
        OpenLineageSink(settings, folder)
    monkeypatch.setenv("A_KEY", "a-secret\nX-Other: 1")
    with pytest.raises(UserError, match="A_KEY contains control or non-ASCII characters") as error:
        OpenLineageSink(settings, folder)
    assert "a-secret" not in str(error.value)
    with pytest.raises(UserError, match="cannot be written"):
        OpenLineageSink(OpenLineageSettings(file=str(folder / DATA_FILE / "x")), folder)
