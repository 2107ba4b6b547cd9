"""Another job or another command never overwrites the published figures of the delta benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import delta, folders, runs

pytestmark = pytest.mark.processes

MADE = "warm_start.sft.steps=200"


@pytest.mark.parametrize(
    "words", [MADE, "", f"configs/gsm8k_8b_8gpu.yaml {MADE}", f"{MADE} model.path=x", f"{MADE} --lrs 1e-5"]
)
def test_only_the_published_job_writes_the_published_result(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(config: str, dtype: str, rate: str, *_: Any) -> dict[str, Any]:
        sizes = {"full_bytes": 100, "median_bytes": 5, "min_bytes": 4, "max_bytes": 6, "share": 0.05}
        return {"dtype": dtype, "lr": float(rate), **sizes}

    monkeypatch.setattr(delta, "measure", measured)
    monkeypatch.setattr(folders, "RESULTS", tmp_path / "published")
    monkeypatch.setattr(runs, "show", lambda *_: None)
    published, own = tmp_path / "published" / "delta.json", tmp_path / "runs" / "delta.json"
    published.parent.mkdir()
    published.write_text(before := json.dumps({"command": f"python -m benchmarks.delta {MADE}"}))
    monkeypatch.setattr(sys, "argv", ["delta", *words.split(), "--runs-dir", str(own.parent)])
    delta.main()
    written = published if words == MADE else own
    assert json.loads(written.read_text())["rows"]
    assert (published.read_text() == before) == (words != MADE)
