"""The comparison of objectives: the lag is exact, gradients are those of the trainer, every variant is accepted."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import yaml

import benchmarks.objectives.__main__
from areal_like.trajectory import Trajectory
from areal_like.wire.messages import BatchSample
from benchmarks import folders, runs
from benchmarks.folders import REPOSITORY
from benchmarks.measured import Measured
from benchmarks.objectives import curves, gradients, quickstarts
from benchmarks.objectives.sampler import Sampler
from benchmarks.objectives.task import SMALLEST, TASKS, Rows
from benchmarks.objectives.training import Training
from benchmarks.objectives.variants import VARIANTS, WITHOUT_GRADIENTS, reference_of, settings_of
from benchmarks.panels import panels_of
from benchmarks.tables import TABLES
from controller.config.loading import load_config
from trainer.export import write_model
from trainer.model.model import make_model
from trainer.model.tokenizers import build_tokenizer
from trainer.objectives.registry import CORRECTIONS, OBJECTIVES, advantage_faults, loss_faults


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights that reads the task's tokens."""
    folder = tmp_path_factory.mktemp("model")
    init = yaml.safe_load((REPOSITORY / "configs" / "quickstart.yaml").read_text())["model"]["init"]
    small = {**init, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "head_dim": 8}
    tokenizer = build_tokenizer("characters:running_sum", None)
    write_model(make_model(small, tokenizer, seed=3), folder, dtype="float32")
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(autouse=True)
def guessed_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model is never right: half of its answers count as right, by their first token."""
    monkeypatch.setattr(Rows, "is_right", lambda self, row, answer, reason: bool(answer[0] % 2))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_valid_section(name: str) -> None:
    settings = settings_of(name)
    assert not list(loss_faults(settings.loss, has_versions=settings.version_logprobs is not None))
    for one in (settings, reference_of(name)):
        assert not list(advantage_faults(one.advantage, group_size=TASKS["short"].group_size))


def test_every_loss_and_correction_is_compared() -> None:
    losses = [settings_of(name).loss for name in VARIANTS]
    assert {loss.kind for loss in losses} == set(OBJECTIVES)
    left_out = set(CORRECTIONS) - {one.kind for loss in losses for one in loss.corrections}
    assert left_out == {"icepop", "balance_heuristic", "token_weight"}, "icepop is a mode of the weight"


def test_a_reference_has_the_objective_of_its_variant_and_nothing_against_staleness() -> None:
    loss = reference_of("reinforce_pp").loss
    assert (loss.kl_coef, loss.kl_in, loss.kl_estimator) == (0.001, "reward", "k1")
    assert reference_of("dr_grpo").loss.constant_divisor == 48
    assert [one.kind for one in reference_of("no_eos_mask").loss.corrections] == ["no_eos_mask"]
    for name in ("veto", "staleness_mask", "dual_clip", "kl_rejection"):
        assert reference_of(name) == reference_of("decoupled"), name


@pytest.mark.parametrize("lag", [0, 2])
def test_every_step_trains_on_samples_that_are_exactly_so_old(
    model: Path, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def step(self: Training, samples: list, version: int) -> dict[str, float]:
        seen.append((version, {int(stamp) for one in samples for stamp in one.trajectory.versions_T if stamp >= 0}))
        return self._step.run(self._step.prepare(samples, version))

    monkeypatch.setattr(Training, "step", step)
    measure = curves.measure(model, SMALLEST, 1, lag, "decoupled", lr=1e-3, num_steps=5, evals=1)
    found = asyncio.run(measure)
    assert seen == [(version, {max(0, version - lag)}) for version in range(5)]
    assert [step for step, _ in found["curve"]] == [5]
    assert 0 <= found["accuracy"] <= 1


def test_samples_of_a_version_have_the_log_probs_of_its_weights(model: Path, tmp_path: Path) -> None:
    training = Training(model, settings_of("decoupled", optimizer={"lr": 1e-2}), num_steps=9, groups=4)

    async def sampled() -> list[dict[str, float]]:
        found = []
        async with Sampler(model, SMALLEST, Rows(SMALLEST, 1), tmp_path / "weights", seed=1) as sampler:
            for version in range(3):
                await sampler.load(training.weights())
                found.append(training.step(await sampler.batch(version), version))
        return found

    for metrics in asyncio.run(sampled()):
        assert abs(metrics["kl_behaviour_proximal"]) < 1e-5
        assert metrics["ess"] == pytest.approx(1, abs=1e-4)


def test_prompts_and_demonstrations_begin_alike() -> None:
    rows = Rows(SMALLEST, 1)
    bos = rows.tokenizer.bos_token_id
    assert rows.prompt({"prompt": "1+2="}).tolist() == [bos, *rows.tokenizer.encode("1+2=", add_special_tokens=False)]


def test_an_answer_ends_at_the_end_of_sequence_token(model: Path, tmp_path: Path) -> None:
    async def batch() -> list[BatchSample]:
        async with Sampler(model, SMALLEST, Rows(SMALLEST, 1), tmp_path / "weights", seed=1) as sampler:
            await sampler.load(Training(model, settings_of("decoupled"), num_steps=9, groups=4).weights())
            return await sampler.batch(0)

    end = build_tokenizer("characters:running_sum", None).eos_token_id
    trajectories = [sample.trajectory for sample in asyncio.run(batch())]
    answers = [one.tokens_T[one.loss_mask_T] for one in trajectories]
    assert any(end in answer for answer in answers), "a random model samples the token"
    for trajectory, answer in zip(trajectories, answers, strict=True):
        assert end not in answer[:-1]
        assert (trajectory.finish_reason == "stop") == (answer[-1] == end)


def ended(sample: BatchSample) -> BatchSample:
    """As if its answer had ended before the token limit; a random model's seldom do."""
    trajectory: Trajectory = msgspec.structs.replace(sample.trajectory, finish_reason="stop")
    return msgspec.structs.replace(sample, trajectory=trajectory)


def test_gradients_are_kept_and_not_applied_and_agree_with_the_reference_on_its_own_data(
    model: Path, tmp_path: Path
) -> None:
    async def batch() -> list:
        async with Sampler(model, SMALLEST, Rows(SMALLEST, 1), tmp_path / "weights", seed=1) as sampler:
            await sampler.load(Training(model, settings_of("decoupled"), num_steps=9, groups=4).weights())
            return [ended(sample) if sample.sample_index % 2 else sample for sample in await sampler.batch(0)]

    samples = asyncio.run(batch())
    for name in VARIANTS:
        if name in WITHOUT_GRADIENTS:
            continue
        watched = Training(model, settings_of(name), num_steps=9, groups=4, is_watched=True)
        before = watched.weights()
        gradient = watched.gradient(samples, 0)
        assert all(torch.equal(value, before[key]) for key, value in watched.weights().items())
        reference = Training(model, reference_of(name), num_steps=9, groups=4, is_watched=True).gradient(samples, 0)
        found = gradients.likeness([gradient], reference)
        assert found["single"] == pytest.approx(1, abs=1e-6), name
        assert found["norm"] == pytest.approx(1, abs=1e-4), name


def test_likeness_against_numpy() -> None:
    rng = np.random.default_rng(0)
    vectors, reference = rng.normal(size=(3, 7)), rng.normal(size=7)
    found = gradients.likeness([torch.tensor(one) for one in vectors], torch.tensor(reference))
    cosine = [one @ reference / np.linalg.norm(one) / np.linalg.norm(reference) for one in vectors]
    mean = vectors.mean(0)
    assert found["single"] == pytest.approx(np.mean(cosine))
    assert found["mean"] == pytest.approx(mean @ reference / np.linalg.norm(mean) / np.linalg.norm(reference))
    assert found["norm"] == pytest.approx(np.linalg.norm(mean) / np.linalg.norm(reference))
    assert gradients.likeness([torch.zeros(7)], torch.tensor(reference).float())["single"] == 0


def test_lagged_gradients_have_a_row_for_each_variant_and_lag(model: Path) -> None:
    names = ["decoupled", "ppo", "exact_parts", "lr_by_ess"]
    extent = gradients.Extent((2,), 2, 2, lr=1e-2)
    found = asyncio.run(gradients.measure(model, SMALLEST, 1, [0, 2, 64], names, extent))
    places = [(row["variant"], row["lag"]) for row in found["rows"]]
    assert places == [(name, lag) for name in names[:-1] for lag in (0, 2)], "64 is older than the first version"
    assert all(-1 <= row["single"] <= 1 for row in found["rows"])
    by_place = dict(zip(places, found["rows"], strict=True))
    assert by_place["decoupled", 2] != by_place["ppo", 2]
    json.dumps(found)


def test_table_and_panels_show_each_variant_by_lag() -> None:
    pair, made = [0.5, 0.1], {"command": "python -m this", "date": "2026-01-02"}
    result = {
        "parts": {
            "gradients, short": {
                **made, "seeds": [1, 2], "lags": [0, 64],
                "summary": {"gspo": {lag: {"single": pair, "mean": pair, "norm": [2.0, None]} for lag in ("0", "64")}},
            },
            "curves, short": {
                **made, "seeds": [1, 2], "lags": [0, 64], "steps": 96,
                "tuned": {"gspo": "1e-4"}, "tried": {"gspo": {"1e-4": 0.75, "2e-4": 0.5}},
                "summary": {"gspo": {"0": [0.9, 0.2], "64": [None, None]}},
                "rows": [
                    {"variant": "gspo", "lag": lag, "seed": seed, "accuracy": accuracy}
                    for lag, seed, accuracy in ((0, 1, 0.8), (0, 2, 1.0), (64, 1, 0.5), (64, 2, 0.7))
                ],
            },
            "quickstart": {
                **made, "seeds": [1], "rows": [quickstart_row(job, 1) for job in ("gspo", "cispo")],
            },
            "quickstart, vespo": {
                **made, "seeds": [1, 2], "rows": [quickstart_row("vespo", seed) for seed in (1, 2)],
                "summary": {"vespo": {"before": [0.2, 0.0], "after": [0.95, 0.01]}},
            },
        }
    }  # fmt: skip
    text = TABLES["objectives"](result)
    assert "| `gspo` | 0.500 ± 0.100 | 0.500 ± 0.100 | 0.50 | 0.50 | 2.00 | 2.00 |" in text
    assert "| `gspo` | 1e-4 (1e-4: 0.75; 2e-4: 0.50) | 0.900 ± 0.200 | - | -0.300 ± 0.000 |" in text
    assert "| `cispo`, seed 1 | 0: 0.200, 90: 0.950 | clean |" in text
    assert "| `vespo`, 2 seeds | before: 0.200 ± 0.000, after: 0.950 ± 0.010 |  |" in text
    assert text.count("<small>`python -m this`, 2026-01-02.</small>") == 4
    panels = panels_of("objectives", result)
    assert [len(panel.series) for panel in panels] == [2, 1, 2, 2]
    assert (panels[0].places, panels[0].series[1].name) == (["gspo"], "lag 64")
    assert [series.name for series in panels[3].series] == ["seed 1", "seed 2"]


def quickstart_row(job: str, seed: int) -> dict[str, object]:
    return {"job": job, "seed": seed, "curve": [(0, 0.2), (90, 0.95)], "audit": "clean"}


@pytest.mark.parametrize(
    ("words", "part", "is_published"),
    [
        ("quickstart --seeds 1", "quickstart", True),
        ("quickstart --variants cispo", "quickstart, cispo", True),
        ("quickstart --variants cispo --seeds 1,2,3,4,5", "quickstart, cispo", True),
        ("quickstart --variants cispo --seeds 1,2", "quickstart, cispo", False),
    ],
)
def test_some_jobs_of_the_quickstart_are_a_published_part_of_their_own(
    words: str, part: str, is_published: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def job(measured: Measured, name: str, seed: int, *_: object) -> dict[str, object]:
        return quickstart_row(name, seed)

    published = tmp_path / "results" / "objectives.json"
    published.parent.mkdir()
    published.write_text('{"parts": {"curves, short": {}}}')
    monkeypatch.setattr(quickstarts, "_job", job)
    monkeypatch.setattr(folders, "RESULTS", published.parent)
    monkeypatch.setattr(runs, "show", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["objectives", *words.split(), "--runs-dir", str(tmp_path)])
    benchmarks.objectives.__main__.main()
    written = published if is_published else tmp_path / "objectives.json"
    parts = json.loads(written.read_text())["parts"]
    assert list(parts) == (["curves, short", part] if is_published else [part])
    assert parts[part]["summary"]["cispo"]["after"][0] == pytest.approx(0.95)
    if not is_published:
        assert list(json.loads(published.read_text())["parts"]) == ["curves, short"]


@pytest.mark.parametrize(
    ("words", "is_published"),
    [
        ("curves", True),
        ("curves --processes 1", True),
        ("curves --replace --seeds 1", True),
        ("curves --seeds 1", False),
        ("curves --lags 0,64", False),
        ("curves --variants all", False),
        ("curves --tune 1e-4", False),
        ("curves --steps 4", False),
    ],
)
def test_curves_are_published_with_the_defaults_alone(
    words: str, is_published: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    published = tmp_path / "results" / "objectives.json"
    published.parent.mkdir()
    main = benchmarks.objectives.__main__
    empty = {"task": "short", "lags": [], "summary": {}}
    monkeypatch.setattr(main, "measure_curves", lambda *_: empty)
    monkeypatch.setattr(main, "pool_of", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(folders, "RESULTS", published.parent)
    monkeypatch.setattr(runs, "show", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["objectives", *words.split(), "--runs-dir", str(tmp_path)])
    main.main()
    assert published.is_file() == is_published


@pytest.mark.parametrize("name", quickstarts.JOBS)
def test_every_job_is_a_valid_configuration(name: str) -> None:
    config = load_config(str(quickstarts.CONFIG), list(quickstarts.JOBS[name])).config
    assert config.num_steps == 70


def test_a_teacher_is_the_job_that_was_run_and_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []

    def train(config: str, settings: list[str], runs_dir: Path) -> dict[str, object]:
        started.append(settings)
        (folder := tmp_path / str(len(started))).mkdir()
        (folder / "metrics.jsonl").write_text('{"kind": "eval", "version": 90, "accuracy": 0.9}\n')
        return {"folder": str(folder), **dict.fromkeys(quickstarts.KEYS, 0)}

    monkeypatch.setattr(quickstarts, "train", train)
    monkeypatch.setattr("benchmarks.measured._commit", lambda: "1234abc")
    found = quickstarts.measure(Measured(None), ["decoupled_ppo", "distillation"], [3], tmp_path)
    assert [row["curve"] for row in found["rows"]] == [[(90, 0.9)], [(90, 0.9)]]
    assert len(started) == 2
    assert f"trainer.teacher.path={tmp_path / '1' / 'final'}" in started[1]
