"""benchmarks/paired.py: what it makes of the rows it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import page, paired


def row(seed: int, side: str) -> dict[str, object]:
    return {"seed": seed, "side": side, "accuracy_after": 0.5, "samples_per_s": 8.0 * seed, "tokens_per_s": 100.0}


def test_one_seed_has_means_and_no_interval_in_file_terminal_and_page(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    result = paired.compare([row(1, "sync"), row(1, "async")], ("sync", "async"))
    path = tmp_path / "modes.json"
    path.write_text(json.dumps({"command": "python -m benchmarks.modes --seeds 1", **result}, allow_nan=False))
    assert result["against"]["async"]["throughput_ratio"] == (1.0, None)
    paired.print_table(result)
    assert "samples/s x 1.00 ± - (paired" in capsys.readouterr().out
    assert "8 ± -</td>" in page.publish("modes", path).read_text()


def test_two_seeds_have_an_interval() -> None:
    rows = [row(seed, side) for seed in (1, 2) for side in ("sync", "async")]
    mean, half = paired.compare(rows, ("sync", "async"))["sides"]["sync"]["samples_per_s"]
    assert mean == 12.0
    assert half == pytest.approx(50.84)
