"""benchmarks/simulator.py and what it stands on: the fit, the assumptions about published runs, the result file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_like.emulation.machines import MODELS
from areal_like.emulation.roofline import Efficiencies, Roofline
from benchmarks import published as paper
from benchmarks import simulated_jobs, simulator
from benchmarks.fit_box import at_bound
from benchmarks.folders import RESULTS
from benchmarks.measured import Measured
from benchmarks.simulated_runs import SpeedJob, predicted_emulated, speed
from benchmarks.tables import TABLES
from controller.config.loading import load_config


def test_least_squares_finds_the_numbers_that_made_the_data_and_stays_in_the_box() -> None:
    low, high = np.log([0.1, 0.1]), np.log([10.0, 10.0])

    def errors(point: np.ndarray) -> np.ndarray:
        a, b = np.exp(point)
        return np.log([a + b, a + 3 * b, 2 * a + b]) - np.log([2 + 0.5, 2 + 1.5, 4 + 0.5])

    assert np.exp(simulator.least_squares(errors, np.zeros(2), low, high)) == pytest.approx([2.0, 0.5], rel=0.02)
    boxed = simulator.least_squares(errors, np.zeros(2), low, np.log([1.5, 10.0]))
    assert np.exp(boxed)[0] == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("task", ["math", "code"])
def test_answers_have_the_mean_that_was_reported_after_the_cut(task: str) -> None:
    lengths = paper.answers(task)
    assert lengths.mean_length() == pytest.approx(paper.MEAN_TOKENS[task], rel=0.03)
    assert lengths.mean > paper.MEAN_TOKENS[task]
    shorter = paper.answers(task, cap=8000)
    assert (shorter.mean, shorter.cap) == (lengths.mean, 8000)


def test_the_trainers_rate_takes_the_time_that_the_authors_count_gives() -> None:
    lengths = paper.answers("math")
    drawn = np.concatenate(lengths.draw_groups(np.random.default_rng(0), 16, 512)).tolist()
    reached = Efficiencies(train_mfu=paper.train_mfu("7b", lengths), step_overhead_s=0.0)
    costs = Roofline(paper.GPU, MODELS["7b"], 1, 48, reached)
    theirs_s = 4 * paper.their_forward_flops("7b", drawn) / (48 * paper.TFLOPS["7b"] * 1e12)
    assert costs.compute_s(costs.forward_flops(drawn), 4.0) == pytest.approx(theirs_s, rel=1e-6)
    assert 0.2 < reached.train_mfu < paper.TFLOPS["7b"] * 1e12 / paper.GPU.flops  # they count more for the same pass


def test_their_count_is_that_of_a_sequence_written_out() -> None:
    hidden, inner, vocabulary, layers, length = 1536, 8960, 151_936, 28, 1000
    products = 4 * hidden * hidden + 3 * hidden * inner  # weights of a layer, without grouped queries
    expected = layers * (2 * length * products + 4 * length**2 * hidden) + 4 * length * vocabulary * hidden
    assert paper.their_forward_flops("1.5b", [length]) == pytest.approx(expected)


def test_both_modes_have_the_same_pools_and_differ_by_recomputed_logprobs() -> None:
    lengths = paper.answers("code")
    sync, asynchronous = (paper.world("32b", 384, lengths, Efficiencies(), eta=eta, steps=2) for eta in (0, 4))
    for world in (sync, asynchronous):
        assert isinstance(world.costs, Roofline)
        assert (world.costs.trainer_gpus, world.costs.tp, len(world._replicas)) == (96, 8, 36)
    assert (sync.costs.is_recomputing_logprobs, asynchronous.costs.is_recomputing_logprobs) == (False, True)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("model", "gpus"), [("1.5b", 128), ("1.5b", 256), ("7b", 192), ("7b", 512), ("32b", 384)])
def test_a_batch_of_groups_is_generated_at_once_at_most(model: str, gpus: int) -> None:
    world = paper.world(model, gpus, paper.answers("math"), Efficiencies(), eta=8, steps=2)
    assert sum(world._capacities) == paper.PROMPTS
    assert max(world._capacities) - min(world._capacities) <= 1


@pytest.mark.processes
def test_parts_are_kept_together(tmp_path: Path) -> None:
    path = tmp_path / "simulator.json"
    simulator.keep("runs", {"rows": [run_row("first")]}, "make runs", path)
    simulator.keep("speed", {"rows": []}, "make speed", path)
    simulator.keep("runs", {"rows": [run_row("second")]}, "make runs again", path)
    parts = json.loads(path.read_text())["parts"]
    assert (parts["runs"]["rows"], parts["speed"]["rows"]) == ([run_row("second")], [])
    assert parts["runs"]["machine"]["cores"] > 0
    assert json.loads(path.read_text())["command"] == "make runs again; make speed"
    assert "second (<code>sync</code>, bound 0)" in path.with_suffix(".html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", "paper,rnus"], "'rnus' is none of paper, batching, runs, speed"),
        (["--runs", "no-such-run", "b"], "no-such-run is not the folder of a run"),
    ],
)
def test_mistakes_are_reported_in_a_sentence_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setattr("sys.argv", ["simulator", *arguments])
    monkeypatch.setattr(simulator, "predict_paper", lambda tell: pytest.fail("it ran"))
    with pytest.raises(SystemExit, match=words):
        simulator.main()


def test_costs_of_a_single_run_predict_nothing_and_leave_what_was_published(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(Path("configs/quickstart.yaml").read_text())
    with pytest.raises(SystemExit, match="specify a different run to predict"):
        simulator.checked(["runs"], [[tmp_path]])


@pytest.mark.parametrize("config", ["emulated", "quickstart"])
def test_runs_that_measured_nothing_are_reported_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    (tmp_path / "config.yaml").write_text(Path(f"configs/{config}.yaml").read_text())
    monkeypatch.setattr("sys.argv", ["simulator", "--runs", str(tmp_path), str(tmp_path)])
    with pytest.raises(SystemExit, match="a rate needs 3 steps, but this run has 0"):
        simulator.main()


def test_costs_of_other_threads_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sync` has all cores in each phase, the others one thread a process."""
    monkeypatch.setattr("controller.wiring.process_specs.num_cores", lambda: 2)
    text = Path("configs/quickstart.yaml").read_text()
    sync = text.replace("mode: async", "mode: sync").replace("max_staleness: 2", "max_staleness: 0")
    for name, config in (("asynchronous", text), ("synchronous", sync)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(config)
    arguments = ["simulator", "--runs", str(tmp_path / "asynchronous"), str(tmp_path / "synchronous")]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr("benchmarks.simulated_runs.figures", lambda folder: {"samples_per_s": 1.0})
    with pytest.raises(SystemExit, match=r"had 1 and 1 threads, but with `mode: sync` the number is 2 and 2"):
        simulator.main()


@pytest.mark.parametrize("job", [job for jobs in simulated_jobs.GROUPS for job in jobs], ids=lambda job: job.name)
def test_the_own_jobs_are_configs_that_load(job: simulated_jobs.Started) -> None:
    config = load_config(job.config, job.overrides).config
    assert (config.emulation is not None) == (job in simulated_jobs.EMULATED)
    assert config.num_steps >= 16


@pytest.mark.processes
def test_own_jobs_are_run_and_predicted_group_by_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, compared = [], []

    def train(config: str, overrides: Sequence[str], runs_dir: Path) -> dict[str, Any]:
        started.append((config, *overrides))
        return {"folder": str(runs_dir / f"run-{len(started)}")}

    def compare(folders: Sequence[Path], names: Sequence[str]) -> list[dict[str, Any]]:
        compared.append([folder.name for folder in folders])
        return [{"run": name} for name in names[1:]]

    monkeypatch.setattr(simulated_jobs, "train", train)
    monkeypatch.setattr(simulated_jobs, "compare", compare)
    groups = ((simulated_jobs.A_CORE_EACH[0], simulated_jobs.A_CORE_EACH[1]), simulated_jobs.EMULATED[:1])
    rows = simulated_jobs.rows(tmp_path, Measured(tmp_path / "rows.jsonl"), groups)
    assert compared == [["run-1", "run-2"], ["run-3"]]
    assert [row["run"] for row in rows] == ["async 2, seed 2"]
    again = simulated_jobs.rows(tmp_path, Measured(tmp_path / "rows.jsonl", is_going_on=True), groups)
    assert again == rows
    assert len(started) == 3


def test_the_fits_error_is_that_of_the_rows_shown() -> None:
    rows = [{"sync_error": 0.1}, {"sync_error": -0.1}]
    assert simulator.fit_error(rows) == pytest.approx(0.1, rel=0.01)


def test_a_fitted_number_on_the_edge_of_the_box_is_named_and_one_inside_is_not() -> None:
    inside = {"decode_floor_s": 0.0169, "bandwidth": 0.465, "step_overhead_s": 1.1, "train_mfu": 1.0}
    assert at_bound(inside) == []
    assert at_bound({**inside, "step_overhead_s": 1.0}) == ["step_overhead_s"]
    assert at_bound({**inside, "decode_floor_s": 0.05, "bandwidth": 0.999}) == ["decode_floor_s", "bandwidth"]
    assert np.exp(simulator.LOW) == pytest.approx([5e-4, 0.05, 1.0])
    assert np.exp(simulator.HIGH) == pytest.approx([5e-2, 1.0, 300.0])


def test_a_fit_on_the_edge_says_so_in_the_result_and_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edge = Efficiencies(decode_floor_s=0.01, bandwidth=0.4, step_overhead_s=1.0)
    monkeypatch.setattr(simulator, "fit", lambda *_, **__: edge)
    monkeypatch.setattr(simulator, "table_1", lambda *_, **__: result()["table_1"])
    for name in ("table_2", "figure_4", "figure_6b"):
        monkeypatch.setattr(simulator, name, lambda *_, **__: [])
    assert simulator.predict_paper(lambda _: None)["at_bound"] == ["step_overhead_s"]
    assert "bandwidth 0.4, step_overhead_s 1 (at a bound of the fit's box)" in capsys.readouterr().out


def test_the_table_says_which_fitted_numbers_are_the_boxes_limits() -> None:
    paper_part = {**result(), "at_bound": ["step_overhead_s"]}
    words = "`step_overhead_s` is at a bound of its box (1 to 300)"
    assert words in TABLES["simulator"]({"parts": {"paper": paper_part}})
    published = json.loads(RESULTS.joinpath("simulator.json").read_text())
    count = TABLES["simulator"](published).count("is at a bound")
    assert count == len(at_bound(published["parts"]["paper"]["efficiencies"]))
    assert "is at a bound" not in TABLES["simulator"]({"parts": {"paper": {**paper_part, "at_bound": []}}})


def run_row(name: str) -> dict[str, Any]:
    return {"run": name, "mode": "sync", "max_staleness": 0, "devices": "real", "calibrated_on": "x",
            "predicted": 9.0, "measured": 10.0, "error": -0.1}  # fmt: skip


def result() -> dict[str, Any]:
    hours = {"predicted_sync_h": 40.0, "sync_h": 41.0, "sync_error": -0.02, "predicted_async_h": 15.0, "async_h": 14.8,
             "async_error": 0.01, "predicted_ratio": 2.67, "reported_ratio": 2.77, "ratio_error": -0.04}  # fmt: skip
    part = {"efficiencies": {"decode_floor_s": 0.01, "bandwidth": 0.4, "step_overhead_s": 30.0}, "fit_error": 0.1,
            "at_bound": [], "table_1": [{"model": "1.5b", **hours}, {"model": "7b", **hours}]}  # fmt: skip
    gains = {"predicted": 100.0, "reported": 90.0, "predicted_gain": 2.0, "reported_gain": 1.9, "error": 0.05}
    to_sync = {"predicted_to_sync": 2.0, "reported_to_sync": 2.1}
    return {
        **part, "command": "c", "date": "d",
        "table_2": [{"eta": eta, **gains, **to_sync} for eta in (0, 1, None)],
        "figure_4": [{"model": model, "context": 32_768, "gpus": gpus, **gains}
                     for model in ("1.5b", "7b", "32b") for gpus in (256, 512)],
        "figure_6b": [{"model": "7b", "predicted_without": 80.0, "reported_without": 70.0, **gains}],
    }  # fmt: skip


def test_the_picture_shows_a_result_file(tmp_path: Path) -> None:
    source = tmp_path / "simulator.json"
    source.write_text(json.dumps({"parts": {"paper": result()}}))
    picture = simulator.plot(source, tmp_path / "simulator.svg")
    assert picture is not None
    text = picture.read_text()
    assert "hours of Table 1" in text
    assert "1.5b sync: 40.0 h, 41.0" in text


def test_the_simulation_of_a_job_is_timed() -> None:
    (row,) = speed([SpeedJob(16, "7b", 1, 8, 3)])
    assert (row["workers"], row["steps"], row["samples"]) == (12, 3, 384)
    assert row["wall_s"] > 0


def test_an_emulated_job_is_predicted_in_emulated_seconds() -> None:
    shared = ["num_steps=4", "groups_per_step=4", "rollout.num_workers=2", "rollout.routing.migration=false"]
    slow, fast = (
        load_config("configs/emulated.yaml", [*shared, f"emulation.speedup={speedup}"]).config for speedup in (5, 50)
    )
    assert predicted_emulated(slow) == pytest.approx(predicted_emulated(fast))


def test_published_rows_are_the_papers() -> None:
    assert [round(row.sync_h / row.async_h, 2) for row in paper.TABLE_1] == [2.77, 2.27, 2.23, 1.64]
    assert paper.TABLE_2[4] / paper.TABLE_2[0] == pytest.approx(41.0 / 14.8, rel=0.001)
