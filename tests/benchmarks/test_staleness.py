"""benchmarks/staleness.py: what it makes of the rows it measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pictures, staleness, sweep, tables
from controller.report.data import RunData
from controller.run_folder.run_folder import RunFolder

BOUNDS = ["0", "4"]


def row(seed: int, bound: str, loss: str, accuracy: float, samples_per_s: float) -> dict[str, Any]:
    return {
        "seed": seed, "max_staleness": bound, "loss": loss, "accuracy_after": accuracy, "samples_per_s": samples_per_s,
        "staleness_mean": float(bound), "ess": 1.0,
    }  # fmt: skip


def rows(seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    found = []
    for seed in seeds:
        for bound in BOUNDS:
            slower = 1.0 if bound == "0" else 2.0
            found.append(row(seed, bound, "decoupled", 0.9, 100.0 * seed * slower))
            found.append(row(seed, bound, "naive", 0.9 - 0.01 * seed * float(bound), 100.0 * seed * slower))
    return found


def test_losses_and_throughput_are_compared_within_a_seed() -> None:
    result = staleness.compare(rows((1, 2, 3)), BOUNDS)
    assert result["minus_naive"]["decoupled"]["0"]["pairs"] == [0.0, 0.0, 0.0]
    assert result["minus_naive"]["decoupled"]["4"]["mean"] == pytest.approx(0.08)
    for loss in staleness.OWN_LOSSES:  # seeds differ in speed, ratios within a seed do not
        assert result["throughput_against_first_bound"][loss]["4"]["pairs"] == pytest.approx([2.0, 2.0, 2.0])


def test_one_seed_gives_no_interval_rather_than_an_infinite_one() -> None:
    result = staleness.compare(rows((1,)), BOUNDS)
    assert result["minus_naive"]["decoupled"]["4"]["half_width_95"] is None
    json.dumps(result, allow_nan=False)


def test_points_keep_the_lowest_and_the_highest_seed() -> None:
    point = staleness.compare(rows((1, 2, 3)), BOUNDS)["points"]["decoupled"]["0"]["samples_per_s"]
    assert point == {"mean": 200.0, "low": 100.0, "high": 300.0}


def test_monitors_are_means_over_steps_alone(tmp_path: Path) -> None:
    lines = [
        {"kind": kind, "step": n, "wall_s": n, "time_s": n, "ess": ess}
        for n, (kind, ess) in enumerate((("step", 1.0), ("eval", 9.0), ("step", 0.5)), 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = staleness.monitors(RunData.load(RunFolder(tmp_path), max_samples=1))
    assert found["ess"] == 0.75
    assert found["entropy"] is None


def test_a_sweep_has_a_line_per_value_and_no_number_where_nothing_was_measured() -> None:
    def job(value: str, seed: int, accuracy: float | None) -> dict[str, Any]:
        values = dict.fromkeys(sweep.SHOWN, 10.0 * seed)
        return {"key": "staleness.max_staleness", "value": value, "seed": seed, **values, "accuracy_after": accuracy}

    lines = sweep.summarise([job("0", 1, 0.5), job("8", 1, None), job("0", 2, 0.7), job("8", 2, 0.9)])
    assert [line["value"] for line in lines] == ["0", "8"]
    assert lines[0]["accuracy_after"] == {"mean": 0.6, "low": 0.5, "high": 0.7}
    assert lines[1]["accuracy_after"] is None
    assert "| 8 | - | 15.0 (10.0 to 20.0) |" in tables.TABLES["sweep"]({"lines": lines})


def test_plot_follows_the_theme_and_says_which_file_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source = tmp_path / "staleness.json"
    measured = rows((1, 2))
    result = {"bounds": BOUNDS, "seeds": [1, 2], "rows": measured, **staleness.compare(measured, BOUNDS)}
    source.write_text(json.dumps(result))
    text = staleness.plot(source, tmp_path / "pictures" / "staleness.svg").read_text()
    assert text.startswith("<svg")
    assert f'data-made-from="staleness.json {pictures.digest(source)}"' in text
    assert "var(--plot-ink)" in text
    assert pictures.INK not in text
    assert "{stroke-linejoin" not in text.replace(".plot *{stroke-linejoin", ""), "a style for the whole page"


def options(
    *overrides: str, tune: list[str] | None = None, config: str = "", quick: bool = False
) -> argparse.Namespace:
    return argparse.Namespace(overrides=list(overrides), tune=tune, config=config, quick=quick)


def test_a_learning_rate_is_tuned_or_given_and_never_replaced_in_silence() -> None:
    assert staleness.rates_of(options()) == staleness.RATES.split(",")
    assert staleness.rates_of(options(tune=["1e-5", "2e-5"])) == ["1e-5", "2e-5"]
    for changed in (options("trainer.optimizer.lr=2e-4"), options(config="mine.yaml"), options(quick=True)):
        assert staleness.rates_of(changed) == []
    with pytest.raises(SystemExit, match=r"either tuned or given"):
        staleness.rates_of(options("trainer.optimizer.lr=2e-4", tune=["1e-4", "2e-4"]))
