"""A user's own job never overwrites the published figures of the delta benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import delta, runs


@pytest.mark.parametrize("config", ["configs/quickstart.yaml", "configs/gsm8k.yaml"])
def test_only_the_published_job_writes_the_published_result(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(config: str, dtype: str, rate: str, *_: Any) -> dict[str, Any]:
        sizes = {"full_bytes": 100, "median_bytes": 5, "min_bytes": 4, "max_bytes": 6, "share": 0.05}
        return {"dtype": dtype, "lr": float(rate), **sizes}

    monkeypatch.setattr(delta, "measure", measured)
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "published")
    monkeypatch.setattr(runs, "show", lambda *_: None)
    (tmp_path / "published").mkdir()
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(sys, "argv", ["delta", "--config", config, "--runs-dir", str(tmp_path / "runs")])
    delta.main()
    published, own = tmp_path / "published" / "delta.json", tmp_path / "runs" / "delta.json"
    written, untouched = (published, own) if config == delta.CONFIG else (own, published)
    assert len(json.loads(written.read_text())["rows"]) == 6
    assert not untouched.exists()
