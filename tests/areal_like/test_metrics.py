"""Claims about the JSON-lines log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from areal_like.metrics import JsonlLog, read_jsonl


def test_records_come_back_with_numpy_numbers_and_without_nan(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "new" / "metrics.jsonl")
    log.append({"step": np.int64(1), "loss": np.float32(0.5), "bad": float("nan"), "histogram": np.arange(3)})
    assert read_jsonl(tmp_path / "new" / "metrics.jsonl") == [
        {"step": 1, "loss": 0.5, "bad": None, "histogram": [0, 1, 2]}
    ]


def test_line_cut_by_a_crash_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"lo')
    assert read_jsonl(path) == [{"step": 1}]
    log = JsonlLog(path)
    log.append({"step": 3})
    log.close()
    assert read_jsonl(path) == [{"step": 1}, {"step": 3}]


def test_no_file_means_no_records(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_refused_write_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = JsonlLog(tmp_path / "metrics.jsonl")
    log.close()
    log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115  (a device on which every write fails)
    with pytest.raises(OSError, match="No space left") as refusal:
        log.append({"kind": "step"})
    assert refusal.value.filename == str(tmp_path / "metrics.jsonl")
    log.close()
