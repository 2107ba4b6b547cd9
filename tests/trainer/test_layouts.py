"""Ranks in any layout train as one process: the same losses, gradients and weights.

Layouts: sequence groups, replicas (HSDP), split matrices, and combinations. Real processes over gloo; two and four of
them play the scenes, of 5 steps each.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from forked_jobs import JobServer
from rank_stage import Stage, saved_tensors, saved_weights
from safetensors.torch import load_file

from areal_like.weights.tensor_parts import part_files
from trainer.checkpoints.convert import stored_critic, stored_tensors

pytestmark = pytest.mark.e2e

STEPS = 5
LOSS_ATOL, WEIGHT_ATOL = 1e-6, 1e-5
"""In float32; only the order of sums differs from one process."""
OPTIMIZER = {"lr": 1e-4, "schedule": "constant", "warmup_steps": 2, "weight_decay": 0.01, "max_grad_norm": 0.5}
SCENES: dict[str, dict[str, Any]] = {
    "kl": {"loss": {"kl_coef": 0.1}},
    "sequence-loss": {"loss": {"kind": "gspo"}, "gradient_checkpointing": True, "mini_batches": 3},
    "critic": {
        "critic": {"optimizer": OPTIMIZER, "warmup_steps": 1},
        "advantage": {"kind": "gae", "options": {"gae_lambda": 0.9}},
    },
    "adapter": {"lora": {"rank": 3}, "loss": {"kl_coef": 0.1}},
    "versions": {"version_logprobs": {"keep": 3}, "lr_by_ess": {}},
}
MIXTURE: dict[str, Any] = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
    "num_key_value_heads": 2,
}  # fmt: skip
REPLICAS: dict[str, Any] = {"fsdp": {"replicas": 2}, "micro_batch_tokens": 20}
"""And several micro-batches for each update, over which replicas add their gradients only once."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {"sequence_parallel": 2}),
    "4": (4, {"sequence_parallel": 4}),
    "2x2": (4, {"sequence_parallel": 2}),
    "hsdp-2x2": (4, REPLICAS),
    "hsdp-2x2-shared": (4, {**REPLICAS, "sequence_parallel": 2}),
    "tp-2": (2, {"tensor_parallel": 2}),
    "tp-2-fsdp-2": (4, {"tensor_parallel": 2}),
    "tp-2-hsdp-2": (4, {**REPLICAS, "tensor_parallel": 2}),
}
"""Ranks, and their settings."""
RUNS = [("4", "sequence-loss"), ("2x2", "critic"), ("2x2", "adapter"), ("hsdp-2x2", "kl"),
        ("hsdp-2x2-shared", "versions"), ("tp-2", "kl"), ("tp-2-fsdp-2", "kl"), ("tp-2-hsdp-2", "kl")]  # fmt: skip
"""Every layout, and every scene on several ranks. Layout 2 has the mixture of experts below."""
THOROUGH_RUNS = [("2", "kl"), ("2", "sequence-loss"), ("4", "kl"), ("2x2", "kl"), ("2x2", "sequence-loss"),
                 ("2x2", "versions"), ("hsdp-2x2", "critic"), ("hsdp-2x2", "adapter"), ("tp-2", "critic"),
                 ("tp-2", "sequence-loss"), ("tp-2-fsdp-2", "versions")]  # fmt: skip
"""Other combinations of them."""
SAVED, RESUMED = 2, ("hsdp-2x2", "tp-2", "tp-2-fsdp-2")
"""A checkpoint of this version is continued from; layouts that continue from one process, and the reverse."""
FEWER = "tp-2"
"""Four ranks, as replicas, continue from this layout of two, whose parts have columns."""


def settings_of(name: str, **layout: Any) -> dict[str, Any]:
    split = {"backend": "fsdp", **layout} if layout else {}
    return {"optimizer": OPTIMIZER, "micro_batch_tokens": 61, **split, **SCENES[name]}


def scenes_of(stage: Stage, runs: list[tuple[str, str]], ranks: int) -> list[dict[str, Any]]:
    """Those of the runs that have so many ranks."""
    return [
        stage.scene(
            f"{layout}-{name}", ranks, settings_of(name, **LAYOUTS[layout][1]), until=STEPS, num_batches=STEPS,
            save_at=SAVED if layout in RESUMED and name == "kl" else None,
        )
        for layout, name in runs
        if LAYOUTS[layout][0] == ranks
    ]  # fmt: skip


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, made_model: Any, made_samples: Any, job_server: JobServer) -> Stage:
    """Grouped heads (4 query heads, 2 of keys and values) and a tied output layer; answers of 1 to 25 tokens."""
    batches = [made_samples([4, 3, 4], version=step, seed=step, max_answer=25) for step in range(STEPS)]
    made = Stage(tmp_path_factory.mktemp("shared"), made_model(tie_word_embeddings=True), batches, job_server)
    torch.set_num_threads(1)
    for name in SCENES:
        made.single(f"one-{name}", until=STEPS, **settings_of(name))
    made.single("one-start", until=SAVED, **settings_of("kl"))
    for ranks in (2, 4):
        scenes = scenes_of(made, RUNS, ranks)
        scenes += [
            made.scene(
                f"{layout}-from-one", ranks, settings_of("kl", **LAYOUTS[layout][1]), until=STEPS, num_batches=STEPS,
                resume_from=made.at("one-start", SAVED),
            )
            for layout in RESUMED
            if LAYOUTS[layout][0] == ranks
        ]  # fmt: skip
        if ranks == 4:
            scenes.append(
                made.scene(
                    "more-ranks", ranks, settings_of("kl", **REPLICAS), until=STEPS, num_batches=STEPS,
                    resume_from=made.at(f"{FEWER}-kl", SAVED),
                )
            )  # fmt: skip
        made.play(f"job-{ranks}", ranks, scenes)
    return made


@pytest.fixture(scope="module")
def other_runs(stage: Stage) -> Stage:
    for ranks in (2, 4):
        stage.play(f"other-job-{ranks}", ranks, scenes_of(stage, THOROUGH_RUNS, ranks))
    return stage


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_ranks_of_a_layout_train_as_one_process(layout: str, name: str, stage: Stage) -> None:
    assert_trained_as_one_process(layout, name, stage)


@pytest.mark.thorough("other_runs")
@pytest.mark.parametrize(("layout", "name"), THOROUGH_RUNS)
def test_ranks_of_a_layout_train_other_objectives_as_one_process(layout: str, name: str, other_runs: Stage) -> None:
    assert_trained_as_one_process(layout, name, other_runs)


def assert_trained_as_one_process(layout: str, name: str, stage: Stage) -> None:
    ours, single = stage.metrics(f"{layout}-{name}"), stage.single_metrics[f"one-{name}"]
    assert len(ours) == STEPS
    for step, (a, b) in enumerate(zip(ours, single, strict=True), 1):
        for key in ("loss", "entropy", "kl_reference", "kl_staleness", "value_loss", "explained_variance", "ess"):
            assert a.get(key) == pytest.approx(b.get(key), abs=LOSS_ATOL), f"{key} of step {step}"
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4), f"the gradient of step {step}"
        assert (a["tokens"], a["updates"]) == (b["tokens"], b["updates"])
    for kind in (stored_tensors, stored_critic) if name == "critic" else (stored_tensors,):
        expected, found = (saved_tensors(kind(stage.at(one, STEPS))) for one in (f"one-{name}", f"{layout}-{name}"))
        assert expected
        assert found.keys() == expected.keys()
        keys = [key for key in expected if not key.startswith(("exp_avg", "step"))]
        assert max(float((found[key] - expected[key]).abs().max()) for key in keys) < WEIGHT_ATOL


@pytest.mark.parametrize("layout", RESUMED)
def test_checkpoints_go_from_one_process_to_a_layout_and_back(layout: str, stage: Stage) -> None:
    torch.set_num_threads(1)
    back = stage.single(f"one-from-{layout}", stage.at(f"{layout}-kl", SAVED), until=STEPS, **settings_of("kl"))
    single = stage.single_metrics["one-kl"][SAVED:]
    for ours in (stage.metrics(f"{layout}-from-one"), back):
        for a, b in zip(ours, single, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=LOSS_ATOL)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    expected = stage.state("one-kl", STEPS)
    for name in (f"{layout}-from-one", f"one-from-{layout}"):
        found = stage.state(name, STEPS)
        assert found.keys() == expected.keys()
        assert max(float((found[key] - expected[key]).abs().max()) for key in expected) < WEIGHT_ATOL


def test_four_ranks_continue_from_the_parts_of_two_in_another_layout(stage: Stage) -> None:
    assert len(part_files(stage.at(f"{FEWER}-kl", SAVED))) == 2
    assert len(part_files(stage.at("more-ranks", STEPS))) == 4
    for a, b in zip(stage.metrics("more-ranks"), stage.single_metrics["one-kl"][SAVED:], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=LOSS_ATOL)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    expected, found = stage.state("one-kl", STEPS), stage.state("more-ranks", STEPS)
    assert found.keys() == expected.keys()
    assert max(float((found[key] - expected[key]).abs().max()) for key in expected) < WEIGHT_ATOL


@pytest.mark.parametrize("layout", RESUMED)
def test_a_layout_publishes_and_exports_the_weights_that_it_saves(layout: str, stage: Stage) -> None:
    saved = stage.state(f"{layout}-kl", STEPS)
    (published,) = (stage.folder / f"{layout}-kl" / "weights").glob("*.safetensors")
    for file in (published, stage.folder / f"{layout}-kl" / "final" / "model.safetensors"):
        tensors = load_file(file)
        assert tensors.keys() == {key for key in saved if "/" not in key}
        assert all(torch.equal(tensor, saved[name]) for name, tensor in tensors.items())


def test_gradients_are_clipped_in_some_steps_and_not_in_others(stage: Stage) -> None:
    limit = OPTIMIZER["max_grad_norm"]
    norms = [row["grad_norm"] for metrics in stage.single_metrics.values() for row in metrics]
    assert min(norms) < limit < max(norms)


def test_something_is_learned_so_that_equal_weights_mean_something(stage: Stage) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (stage.prepared, stage.at("one-kl", STEPS)))
    assert max(float((after[key] - before[key]).abs().max()) for key in before) > 10 * WEIGHT_ATOL


def with_routes(sample: Any) -> Any:
    """The sample with random recorded experts, two different ones for each token; some samples have none."""
    if sample.sample_index == 1:
        return sample
    rng = np.random.default_rng(sample.group_id * 100 + sample.sample_index)
    num = len(sample.trajectory) - 1
    routes = np.argsort(rng.random((num, 2, MIXTURE["num_experts"])), axis=-1)[..., :2].astype(np.uint8)
    return msgspec.structs.replace(sample, trajectory=msgspec.structs.replace(sample.trajectory, routed_experts=routes))


def test_mixture_of_experts_with_replayed_routes_trains_as_in_one_process(
    tmp_path: Any, made_model: Any, made_samples: Any, job_server: JobServer
) -> None:
    batches = [
        [with_routes(one) for one in made_samples([4, 3, 4], version=step, seed=step, max_answer=25)]
        for step in range(STEPS)
    ]
    stage = Stage(tmp_path, made_model("qwen3_moe", **MIXTURE), batches, job_server)
    settings = {"optimizer": OPTIMIZER, "micro_batch_tokens": 61, "router_replay": True}
    split = {"backend": "fsdp", "sequence_parallel": 2}
    single = stage.single("one", until=STEPS, **settings)
    chosen = stage.single("one-chosen", until=STEPS, **settings | {"router_replay": False})
    stage.play("job", 2, [stage.scene("two", 2, settings | split, until=STEPS, num_batches=STEPS)])
    for a, b in zip(stage.metrics("two"), single, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=LOSS_ATOL)
        assert a["replayed_share"] == b["replayed_share"] > 0.5
    assert abs(single[0]["entropy"] - chosen[0]["entropy"]) > 1e-3, "the routes make no difference"
    expected, found = (saved_weights(stage.at(name, STEPS)) for name in ("one", "two"))
    assert max(float((found[key] - expected[key]).abs().max()) for key in expected) < WEIGHT_ATOL
