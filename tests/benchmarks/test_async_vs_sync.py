"""What the comparisons make of the rows they measured, and which runs they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_like.errors import UserError
from benchmarks import async_vs_sync, interruption, steady
from benchmarks.contenders import APART, FULLER, Contender, Emulated, Own, Real
from benchmarks.measured import Measured
from benchmarks.runs import JobFailed
from benchmarks.steady import full_rate, late_share, refuse_distorted
from controller.config.loading import load_config


def row(name, seed, rate, place="here"):
    return {"place": place, "name": name, "seed": seed, **dict.fromkeys(async_vs_sync.KEPT, 0.5), "samples_per_s": rate}


def test_ratios_are_taken_within_a_seed():
    rows = [row("sync", 1, 10.0), row("async 4", 1, 20.0), row("sync", 2, 30.0), row("async 4", 2, 60.0)]
    lines = {line["name"]: line for line in async_vs_sync.summarise(rows)}
    assert lines["async 4"]["ratio"] == pytest.approx(2.0)
    assert lines["async 4"]["ratio_half_width_95"] == pytest.approx(0.0)


def test_on_emulated_devices_the_luck_of_lengths_is_left_out():
    """Half the samples a second of twice the length are the same work."""
    place = Emulated("h800", "1.5b", 8, 0.75, 3.0).label
    rows = [
        {**row("sync", 1, 2.0, place), "tokens_per_s": 10.0},
        {**row("async 4", 1, 1.0, place), "tokens_per_s": 10.0},
    ]
    assert async_vs_sync.summarise(rows)[1]["ratio"] == pytest.approx(1.0)


def test_more_than_the_busier_pool_can_do_is_not_available():
    rows = [row("sync", 1, 10.0), {**row("async 4", 1, 15.0), "bound_share": 0.75}]
    lines = {line["name"]: line for line in async_vs_sync.summarise(rows)}
    assert lines["async 4"]["ratio_at_most"] == pytest.approx(2.0)
    assert lines["sync"]["ratio_at_most"] is None


def test_neither_the_start_of_a_run_counts_nor_the_end_with_nothing_left_to_generate(tmp_path, monkeypatch):
    """At bound 2 the first two batches take short answers, the third what they left; the last two wait for nothing."""
    seconds = [1.0, 1.0, 9.0, *[4.0] * 5, 1.0, 1.0]
    walls = [sum(seconds[: number + 1]) for number in range(len(seconds))]
    steps = [{"wall_s": wall, "num_samples": 8, "num_sampled_tokens": 80} for wall in walls]
    config = SimpleNamespace(staleness=SimpleNamespace(bound=2), emulation=None)
    monkeypatch.setattr(steady.RunData, "load", lambda *_, **__: SimpleNamespace(steps=steps, pulses=[]))
    monkeypatch.setattr(steady, "load_config", lambda *_: SimpleNamespace(config=config))
    found = steady.figures(tmp_path)
    assert (found["steps_counted"], found["step_s"], found["samples_per_s"]) == (5, 4.0, 2.0)
    assert steady.figures(tmp_path, (6, 8))["steps_counted"] == 2
    config.staleness.bound = 0
    assert steady.figures(tmp_path)["steps_counted"] == 8


def test_a_window_of_few_pulses_takes_those_around_it() -> None:
    pulses = [{"wall_s": float(second)} for second in range(1, 8)]
    windows = [[pulse["wall_s"] for pulse in steady.pulses_of(pulses, *window)] for window in ((2.0, 5.0), (3.2, 4.5))]
    assert windows == [[2, 3, 4, 5], [3, 4, 5]]
    assert [pulse["wall_s"] for pulse in steady.pulses_of(pulses, 3.2, 3.4)] == [3, 4]
    assert steady.pulses_of(pulses[:1], 3.2, 3.4) == pulses[:1], "as many as there are"


@pytest.mark.processes
def test_all_contenders_count_the_same_steps(tmp_path, monkeypatch):
    """Those of the one that runs furthest ahead, whatever its own number of steps is."""
    asked = []

    def figures(folder, window):
        asked.append((window, calls[-1]))
        return {"samples_per_s": 1.0, "step_s": 1.0, "step_work": 1.0, "step_sampled": 1.0}

    def train(config, overrides, runs_dir):
        calls.append(int(next(one for one in reversed(overrides) if one.startswith("num_steps=")).split("=")[1]))
        return {"folder": str(tmp_path)}

    calls: list[int] = []
    monkeypatch.setattr(async_vs_sync, "train", train)
    monkeypatch.setattr(async_vs_sync, "figures", figures)
    monkeypatch.setattr(async_vs_sync, "alone", lambda _: {"trainer_token_s": 1.0, "rollout_token_s": 1.0})
    runner = async_vs_sync.Runner("configs/quickstart.yaml", ["num_steps=24"], tmp_path, None, Measured(None))
    runner.compare(Real(384, 2), [1], [1, 8], is_planning=False)
    assert {window for window, _ in asked if window is not None} == {(9, 24)}
    assert [steps for window, steps in asked if window is not None] == [24, 25, 25, 32]
    assert set(runner.tried) == {one.name for one in Real(384, 2).baselines()}


def test_too_few_steps_for_all_contenders_to_count_the_same_are_refused(tmp_path):
    contenders = Real(16, 2).contenders([1, 8], None)
    runner = async_vs_sync.Runner("configs/quickstart.yaml", ["num_steps=10"], tmp_path, None, Measured(None))
    with pytest.raises(UserError, match="of 10 steps 1 would count: at max_staleness 8 the first 9 take"):
        runner._window(contenders)
    assert runner._window(contenders[:2]) == (2, 10)


def test_what_trainer_and_engine_need_alone_is_reported_in_processor_time_by_token(tmp_path, monkeypatch):
    """Half of the trainer's tokens cost a forward pass alone, a third of a whole one."""
    steps = [
        {"step": number, "wall_s": 10.0 * number, "tokens": 100.0, "forward_only_share": 0.5} for number in range(1, 6)
    ]
    pulses = [
        {
            "version": version,
            "processes": {
                "trainer": {"role": "trainer", "counters": {"cpu_s": 3.0 + 2.0 * version, "tokens": 100.0 * version}},
                "rollout-0": {"role": "rollout", "counters": {"cpu_s": 9.0 + 1.0 * version, "tokens": 50.0 * version}},
            },
        }
        for version in range(6)
    ]
    data = SimpleNamespace(steps=steps, pulses=pulses)
    monkeypatch.setattr(steady.RunData, "load", lambda *_, **__: data)
    found = steady.alone(tmp_path)
    assert found == pytest.approx({"trainer_token_s": 0.02 / (2 / 3), "rollout_token_s": 0.02})
    data.pulses = pulses[:2]
    with pytest.raises(SystemExit, match="too short to measure"):
        steady.alone(tmp_path)


def test_the_share_of_what_is_possible_is_that_of_the_pool_with_more_work():
    row = {"step_work": 100.0, "step_sampled": 50.0, "step_s": 6.0}
    trainer, worker = (
        {"trainer_token_s": 0.05, "rollout_token_s": 9.0},
        {"trainer_token_s": 9.0, "rollout_token_s": 0.08},
    )
    found = Real(64, 2).bound(trainer, worker, row)
    assert found == pytest.approx({"trainer_alone_s": 5.0, "rollout_alone_s": 4.0, "bound_share": 5 / 6})
    slower = {"rollout_token_s": 0.11}
    assert Real(64, 2).bound(trainer, slower, row)["bound_share"] == pytest.approx(5.5 / 6)
    assert Real(64, 3).bound(trainer, slower, row)["rollout_alone_s"] == pytest.approx(2.75)


@pytest.mark.processes
def test_parts_measured_on_other_days_are_kept(tmp_path):
    path = tmp_path / "result.json"
    tried = {"whole": 2.0, "spread": "CUDA out of memory", "apart": 3.0}
    async_vs_sync.keep("real", [row("sync", 1, 1.0)], path, {})
    async_vs_sync.keep("8 h800, 7b", [row("sync", 1, 2.0)], path, {})
    async_vs_sync.keep("8 h800, 7b", [{**row("sync", 1, 3.0), "tuned": "apart"}], path, tried)
    parts = json.loads(path.read_text())["parts"]
    words = "Baseline: apart (samples/s over six steps: apart 3.00; whole 2.00; spread failed: CUDA out of memory)."
    assert words in path.with_suffix(".html").read_text()
    assert set(parts) == {"real", "8 h800, 7b"}
    assert parts["8 h800, 7b"]["rows"][0]["samples_per_s"] == 3.0


CANDIDATES = [Contender(name, "sync", (f"name={name}",)) for name in ("whole", "spread")]
OWN = Own("configs/quickstart.yaml", (), 2)


def tuned(monkeypatch, tmp_path, *fails, late_share=0.0, place=OWN):
    """The baseline of two candidates, of which the named ones' jobs fail."""

    def train(config, overrides, runs_dir):
        if any(f"name={name}" in overrides for name in fails):
            raise JobFailed("python -m controller train\nended with 1:\nTraceback\nCUDA out of memory\n")
        return {"folder": str(tmp_path)}

    monkeypatch.setattr(type(place), "baselines", lambda _: CANDIDATES)
    monkeypatch.setattr(async_vs_sync, "train", train)
    monkeypatch.setattr(async_vs_sync, "figures", lambda *_: {"samples_per_s": 1.0, "late_share": late_share})
    runner = async_vs_sync.Runner("configs/quickstart.yaml", [], tmp_path, None, Measured(None))
    name = runner._tuned(place, 1).name
    return name, runner.tried


@pytest.mark.processes
def test_a_baseline_that_cannot_run_is_left_out_with_its_reason(monkeypatch, tmp_path, capsys):
    name, tried = tuned(monkeypatch, tmp_path, "whole")
    assert name == "spread"
    assert tried == {"whole": "CUDA out of memory", "spread": 1.0}
    assert "tuning whole: failed, left out: CUDA out of memory\n" in capsys.readouterr().out


@pytest.mark.processes
def test_a_candidate_that_fails_where_all_can_run_is_the_end_and_no_slower_baseline(monkeypatch, tmp_path):
    with pytest.raises(JobFailed, match="CUDA out of memory"):
        tuned(monkeypatch, tmp_path, "whole", place=Real(16, 2))


@pytest.mark.processes
def test_no_baseline_that_runs_is_the_end(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=r"every candidate of the synchronous baseline failed"):
        tuned(monkeypatch, tmp_path, "whole", "spread")


@pytest.mark.processes
def test_a_distorted_candidate_still_ends_the_benchmark(monkeypatch, tmp_path):
    """Left out, it could leave a slower baseline to compare with."""
    with pytest.raises(SystemExit, match="too busy"):
        tuned(monkeypatch, tmp_path, late_share=0.06)


def test_run_that_a_busy_machine_distorted_is_refused():
    refuse_distorted({"late_share": 0.04}, Path("run"))
    with pytest.raises(SystemExit, match="too busy"):
        refuse_distorted({"late_share": 0.06}, Path("run"))


def test_lateness_counts_every_trainer_step_and_two_wake_ups_of_an_engine():
    counters = {
        "trainer": {"emulation_late_s": 1.0},
        "rollout-0": {"emulation_late_s": 2.0, "emulation_wakes": 100.0},
        "rollout-1": {"emulation_late_s": 0.0, "emulation_wakes": 100.0},
        "reward": {},
    }
    assert late_share(counters, 10, 100.0) == pytest.approx((1.0 + 2 * 0.01 * 10) / 100.0)


def test_synchronous_contenders_have_all_gpus_in_both_phases():
    place = Emulated("h800", "1.5b", 8, 0.75, 3.0)
    for baseline in place.baselines():
        config = load_config("emulated", list(baseline.overrides)).config
        assert config.mode == "sync"
        assert config.emulation.trainer_gpus == config.emulation.tp * config.rollout.num_workers == 8
    for contender in place.contenders([1, 4], (0.5, 2)):
        config = load_config("emulated", list(contender.overrides)).config
        assert config.emulation.trainer_gpus + config.rollout.num_workers * config.emulation.tp == 8


def test_a_gpu_has_as_many_groups_as_in_the_published_run():
    batches = {model: Emulated("h800", model, 16, 0.75, 3.0).batch() for model in ("1.5b", "7b", "3b")}
    assert batches == {"1.5b": ["groups_per_step=64"], "7b": ["groups_per_step=43"], "3b": []}


def test_the_baseline_does_not_recompute_what_it_knows():
    """Answers of a synchronous step are of the policy that trains on them."""
    made = [one for place in (Emulated("h800", "1.5b", 8, 0.75, 3.0), Real(16, 2)) for one in place.baselines()]
    assert {load_config("emulated", list(one.overrides)).config.trainer.loss.proximal for one in made} == {"behaviour"}
    measuring = [load_config("quickstart", list(one.overrides)).config for one, _ in Real(16, 2).alone()]
    assert {config.trainer.loss.proximal for config in measuring} == {"recompute"}, "what an asynchronous step costs"
    own, fuller = measuring
    assert fuller.groups_per_step == FULLER * own.groups_per_step
    assert fuller.rollout.engine.num_slots == own.rollout.engine.num_slots == own.groups_per_step * own.group_size


def test_real_contenders_consume_equal_samples():
    place = Real(16, 2)
    configs = [
        load_config("quickstart", list(one.overrides)).config
        for one in (*place.baselines(), *place.contenders([1, 4], None))
    ]
    assert {config.samples_per_step for config in configs} == {32}


def test_a_job_of_ones_own_keeps_its_batch_and_pools_but_for_the_baselines():
    own = Own("configs/gsm8k_8b_8gpu.yaml", ("rollout.num_workers=6", "trainer.backend=torch", "trainer.ranks=1"), 2)
    job = load_config(own.config, own.overrides).config
    for contender in own.contenders([1, 4], None):
        config = load_config(own.config, contender.overrides).config
        changed = {key for key in type(config).model_fields if getattr(config, key) != getattr(job, key)}
        assert changed <= {"mode", "staleness", "rollout"}, contender.name
        assert config.rollout.model_dump(exclude={"interruption"}) == job.rollout.model_dump(exclude={"interruption"})
    baselines = {one.name: one for one in own.baselines()}
    assert APART in baselines
    colocated = [load_config(own.config, one.overrides).config for name, one in baselines.items() if name != APART]
    assert [(c.is_colocated, c.mode, c.rollout.num_workers, c.trainer.ranks) for c in colocated] == [
        (True, "sync", 6 + job.trainer.ranks, job.trainer.ranks)
    ]


def test_a_job_on_cores_has_a_worker_a_core_as_a_baseline():
    baselines = Own("configs/quickstart.yaml", (), 3).baselines()
    assert [one.name for one in baselines] == [APART, "sync, a worker a core"]
    assert load_config("quickstart", baselines[1].overrides).config.rollout.num_workers == 3


def test_full_rate_grows_with_workers_and_falls_with_the_model():
    small, large = (load_config("emulated", [f"emulation.model={model}"]).config for model in ("1.5b", "7b"))
    twice = load_config("emulated", ["rollout.num_workers=12"]).config
    assert full_rate(twice) == pytest.approx(2 * full_rate(small))
    assert full_rate(large) < full_rate(small)


@pytest.mark.processes
def test_kinds_of_devices_are_kept_together(tmp_path):
    path = tmp_path / "interruption.json"
    for place, drain in (("a", 1.0), ("b", 2.0), ("a", 4.0)):
        figures = dict.fromkeys(interruption.KEPT, 0.5)
        rows = [
            {"place": place, "way": way, "seed": seed, **figures, "tokens_per_s": drain if way == "drain" else 8.0}
            for way in interruption.WAYS for seed in (1, 2)
        ]  # fmt: skip
        interruption.keep(place, rows, path)
    parts = json.loads(path.read_text())["parts"]
    assert {place: part["lines"][1]["ratio"] for place, part in parts.items()} == {"a": 2.0, "b": 4.0}
    page = path.with_suffix(".html").read_text()
    assert "<strong>a</strong>" in page
    assert "4.000 ± 0.000" in page


def test_ways_of_interruption_are_compared_with_drain_within_a_seed():
    rows = [
        {
            "place": "here",
            "way": way,
            "seed": seed,
            **dict.fromkeys(interruption.KEPT, 0.1),
            "tokens_per_s": rate * seed,
        }
        for seed in (1, 2)
        for way, rate in (("drain", 10.0), ("recompute", 12.0), ("keep_kv", 11.0))
    ]
    lines = {line["way"]: line for line in interruption.compare(rows)}
    assert lines["recompute"]["ratio"] == pytest.approx(1.2)
    assert lines["drain"]["ratio"] == 1.0
