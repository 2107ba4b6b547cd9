"""Ranks are one trainer: whatever backend and however many, the same losses, weights, checkpoints; and one end.

Real processes over gloo. One pair of processes plays all scenes of a backend family, one after the other.

Tolerance: sums are taken in another order, and AdamW divides by the root of the second moment, which for a gradient
near zero makes much of a rounding error. After STEPS steps of lr 1e-3 weights may differ by WEIGHT_ATOL at most.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
import torch
from forked_jobs import JobServer
from rank_stage import HALF, JOB, LIMIT_S, STEPS, Stage, saved_tensors, saved_weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_like.weights.tensor_parts import has_parts, part_name
from controller.runs.replay.tensors import compare_folders
from controller.wiring.preload import PRELOAD
from trainer.checkpoints import checkpoint
from trainer.checkpoints.convert import export_checkpoint, import_folder, stored_critic

pytestmark = pytest.mark.e2e
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

SILENT = (5, 6)
"""Groups without an advantage."""
LOSS_ATOL, WEIGHT_ATOL = 2e-5, 2e-4
CRITIC: dict[str, Any] = {
    "critic": {"optimizer": {"lr": 1e-3}, "warmup_steps": 1},
    "advantage": {"kind": "gae", "options": {"gae_lambda": 0.9}},
}  # fmt: skip
CRITIC_STEPS = 4
REFERENCE: dict[str, Any] = {"loss": {"kl_coef": 0.05}}
REFERENCE_STEPS = 3
LORA: dict[str, Any] = {"lora": {"rank": 3, "publish": "adapter"}, "loss": {"kl_coef": 0.05}}
LORA_STEPS = 4
VERSIONS: dict[str, Any] = {
    "version_logprobs": {"keep": 3},
    "loss": {
        "weight": {"mode": "off"},
        "corrections": [
            {"kind": "token_weight", "part": "mismatch", "options": {"max": 1.5}},
            {"kind": "balance_heuristic"},
            {"kind": "m2po", "part": "staleness"},
        ],
    },
}  # fmt: skip
VERSION_STEPS = 4
CORRECTIONS: dict[str, Any] = {
    "loss": {
        "corrections": [
            {"kind": "icepop", "options": {"low": 0.05, "high": 20.0}},
            {"kind": "veto", "options": {"min_ratio": 0.05}},
            {"kind": "geometric_mask", "options": {"low": 0.2, "high": 10.0}},
            {"kind": "staleness_weight"},
            {"kind": "opsm", "options": {"max_kl": 1.0}},
            {"kind": "m2po", "options": {"max_second_moment": 0.5}},
        ],
    },
}  # fmt: skip
CORRECTION_STEPS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    """All ranks of this file are forked from one process."""
    # The second brings torch's compiler, which ZeRO imports as it starts.
    backends = ["deepspeed", "deepspeed.runtime.zero.muon.original_muon"] if find_spec("deepspeed") else []
    made = JobServer([*PRELOAD, "torch.distributed.fsdp", *backends], JOB.parent)
    yield made
    made.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, made_model: Any, made_samples: Any, server: JobServer) -> Stage:
    batches = [
        [
            msgspec.structs.replace(one, reward=1.0) if one.group_id in SILENT else one
            for one in made_samples([4, 3, 4, 2, 4, 4, 4], version=step, seed=step)
        ]
        for step in range(STEPS)
    ]
    return Stage(tmp_path_factory.mktemp("ranks"), made_model(tie_word_embeddings=False), batches, server)


@pytest.fixture(scope="module")
def torch_metrics(stage: Stage) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    return stage.single("torch")


@pytest.fixture(scope="module")
def fsdp(stage: Stage, torch_metrics: Any) -> Stage:
    """Played by FSDP2 on two ranks."""
    fsdp = {"backend": "fsdp"}
    stage.play(
        "fsdp-job", 2,
        [
            stage.scene("fsdp", 2, fsdp, save_at=HALF, full_at=HALF - 1, is_damaged=True),
            stage.scene("fsdp-whole", 2, {**fsdp, "checkpoint": {"parts": "rank_0"}}, save_at=HALF, is_whole=True),
            stage.scene("fsdp-pieces", 2, {**fsdp, **REFERENCE, "bucket_mb": 0.001}, until=REFERENCE_STEPS),
            stage.scene("fsdp-auto", 2, {"backend": "auto"}, until=1),
            stage.scene("fsdp-wrong", 2, fsdp, is_mean_of_each_rank=True),
            stage.scene(
                "fsdp-options", 2,
                {**fsdp, "gradient_checkpointing": True, "fsdp": {"cpu_offload": True, "reshard_after_forward": False}},
                save_at=HALF, full_at=HALF - 1, full_on=1,
            ),
            stage.scene("fsdp-bfloat16", 2, {**fsdp, "precision": "bfloat16"}, until=2),
            stage.scene("fsdp-bad", 2, fsdp, until=2, bad_step=1),
            stage.scene("fsdp-from-torch", 2, fsdp, resume_from=stage.at("torch", HALF)),
            stage.scene("fsdp-corrections", 2, {**fsdp, **CORRECTIONS}, until=CORRECTION_STEPS),
            stage.scene("fsdp-critic", 2, {**fsdp, **CRITIC}, until=CRITIC_STEPS, save_at=2),
            stage.scene("fsdp-lora", 2, {**fsdp, **LORA}, until=LORA_STEPS, save_at=2),
            stage.scene(
                "fsdp-lora-options", 2,
                {**fsdp, **LORA, "fsdp": {"cpu_offload": True, "reshard_after_forward": False}}, until=LORA_STEPS,
            ),
        ],
    )  # fmt: skip
    return stage


@pytest.fixture(scope="module")
def zero(fsdp: Stage) -> Stage:
    """Played by DeepSpeed on two ranks."""
    scenes = [fsdp.scene(f"zero-{stage}", 2, zero_stage(stage), save_at=HALF) for stage in (1, 3)]
    third = {"backend": "deepspeed", "deepspeed": {"stage": 3, "param_persistence_threshold": 0}}
    scenes += [
        fsdp.scene("zero-3-from-fsdp", 2, third, resume_from=fsdp.at("fsdp", HALF)),
        fsdp.scene("fsdp-from-zero-3", 2, {"backend": "fsdp"}, resume_from=fsdp.at("zero-3", HALF)),
        fsdp.scene("zero-3-bad", 2, third, until=2, bad_step=1),
        fsdp.scene(
            "zero-3-critic", 2, {**third, **CRITIC}, until=CRITIC_STEPS, resume_from=fsdp.at("fsdp-critic", 2)
        ),
    ]  # fmt: skip
    fsdp.play("zero-job", 2, scenes)
    return fsdp


@pytest.fixture(scope="module")
def more_zero(zero: Stage) -> Stage:
    """Played by DeepSpeed on two ranks: its other stages and options."""
    scenes = [
        zero.scene("zero-2", 2, zero_stage(2), save_at=HALF),
        zero.scene("zero-1-from-zero-3", 2, zero_stage(1), resume_from=zero.at("zero-3", HALF)),
        zero.scene("zero-1-bad", 2, zero_stage(1), until=2, bad_step=1),
        zero.scene("zero-3-offloaded", 2, zero_stage(3, offload_optimizer=True, offload_param=True)),
        zero.scene("zero-1-critic", 2, {**zero_stage(1), **CRITIC}, until=CRITIC_STEPS),
    ]
    zero.play("more-zero-job", 2, scenes)
    return zero


def zero_stage(number: int, **options: Any) -> dict[str, Any]:
    """The settings of DeepSpeed's stage 1, 2 or 3."""
    return {"backend": "deepspeed", "deepspeed": {"stage": number, **options}}


MORE_ZERO = ("zero-2", "zero-1-from-zero-3", "zero-1-bad", "zero-3-offloaded", "zero-1-critic")


def zero_params(*names: str) -> list[Any]:
    """Parameters for scenes of DeepSpeed."""
    more = pytest.mark.thorough("more_zero")
    return [pytest.param(one, marks=[needs_deepspeed, *([more] if one in MORE_ZERO else [])]) for one in names]


def stage_of(name: str, request: pytest.FixtureRequest) -> Stage:
    """The fixture in which a scene is played."""
    is_zero = "zero" in name
    stage: Stage = request.getfixturevalue("more_zero" if name in MORE_ZERO else "zero" if is_zero else "fsdp")
    return stage


def assert_agree(stage: Stage, name: str, torch_metrics: list[dict[str, float]]) -> None:
    assert_steps_agree(stage.metrics(name), torch_metrics)
    assert_states_agree(stage, name)
    assert any(row["forward_only_share"] > 0 for row in stage.metrics(name)), "nothing silent was left out"


def assert_steps_agree(ours: list[dict[str, float]], torch_metrics: list[dict[str, float]]) -> None:
    theirs = torch_metrics[-len(ours) :]
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), STEPS + 1 - len(ours)):
        assert a["loss"] == pytest.approx(b["loss"], abs=LOSS_ATOL), f"the loss of step {step}"
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3), f"the gradient of step {step}"
        assert a["tokens"] == b["tokens"], f"the tokens of step {step}"


def assert_states_agree(stage: Stage, name: str) -> None:
    expected, found = stage.state("torch"), stage.state(name)
    assert found.keys() == expected.keys()
    worst = max(float((found[key] - expected[key]).abs().max()) for key in expected if "/" not in key)
    assert worst < WEIGHT_ATOL, worst
    steps = [key for key in expected if key.startswith("step/")]
    assert steps
    assert all(float(found[key]) == float(expected[key]) for key in steps)


def test_fsdp_on_two_ranks_trains_as_one_process_does(fsdp: Stage, torch_metrics: Any) -> None:
    assert_agree(fsdp, "fsdp", torch_metrics)


def test_ranks_that_read_their_parts_train_bit_for_bit_as_those_that_load_the_model_in_full(fsdp: Stage) -> None:
    for row, whole in zip(fsdp.metrics("fsdp"), fsdp.metrics("fsdp-whole"), strict=True):
        assert all(row[key] == whole[key] for key in ("loss", "grad_norm", "tokens"))
    for version in (HALF, STEPS):
        found, expected = fsdp.state("fsdp", version), fsdp.state("fsdp-whole", version)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    log = fsdp.log("fsdp-job", 1)
    assert log.count("cannot be read in parts, so every rank loads the full model") == 1, "the rank that reports it"


def test_a_sharded_reference_gives_the_divergence_of_a_whole_one(fsdp: Stage) -> None:
    """And the model moves in pieces of a thousand bytes."""
    torch.set_num_threads(1)
    alone = fsdp.single("torch-reference", until=REFERENCE_STEPS, **REFERENCE)
    for a, b in zip(fsdp.metrics("fsdp-pieces"), alone, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=LOSS_ATOL)
        assert a["kl_reference"] == pytest.approx(b["kl_reference"], abs=LOSS_ATOL)
    assert alone[-1]["kl_reference"] > 0
    saved = fsdp.state("fsdp-pieces", REFERENCE_STEPS)
    (published,) = (fsdp.folder / "fsdp-pieces" / "weights").glob("*.safetensors")
    for folder in (published, fsdp.folder / "fsdp-pieces" / "final" / "model.safetensors"):
        assert all(torch.equal(tensor, saved[name]) for name, tensor in load_file(folder).items())


def test_corrections_on_two_ranks_are_those_of_one_process(fsdp: Stage) -> None:
    """m2po's threshold is found by sums over the ranks."""
    torch.set_num_threads(1)
    alone = fsdp.single("torch-corrections", until=CORRECTION_STEPS, **CORRECTIONS)
    shares = [f"{name}_masked_share" for name in ("icepop", "veto", "geometric_mask", "opsm", "m2po")]
    assert all(0 < alone[0][name] < 1 for name in shares), alone[0]
    for a, b in zip(fsdp.metrics("fsdp-corrections"), alone, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=LOSS_ATOL)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        for name in (*shares, "staleness_weight_mean"):
            assert a[name] == pytest.approx(b[name], rel=1e-6), name


@pytest.mark.parametrize("name", ["fsdp", "fsdp-options"], ids=["rank 0", "rank 1"])
def test_a_full_disk_costs_that_checkpoint_and_the_next_one_is_written(name: str, fsdp: Stage) -> None:
    log = fsdp.log("fsdp-job", 0)
    assert f"refused: could not write {fsdp.at(name, HALF - 1)}: the disk is full; the previous contents" in log
    assert not fsdp.at(name, HALF - 1).exists()
    assert not list(fsdp.at(name, HALF).parent.glob(".*"))
    checkpoint.verify(fsdp.at(name, HALF))


def test_each_rank_wrote_its_part_and_the_other_way_is_still_there(fsdp: Stage) -> None:
    """fsdp-whole sends its parts to rank 0, whose folder is the model's; the two are equal (see above)."""
    parts = [part_name(rank, 2) for rank in range(2)]
    sizes = [(fsdp.at("fsdp", HALF) / name).stat().st_size for name in parts]
    assert max(sizes) < 1.2 * min(sizes)
    assert not (fsdp.at("fsdp", HALF) / "model.safetensors").exists()
    assert json.loads((fsdp.at("fsdp", HALF) / "manifest.json").read_text())["files"].keys() >= set(parts)
    assert not has_parts(fsdp.at("fsdp-whole", HALF))
    model = AutoModelForCausalLM.from_pretrained(fsdp.at("fsdp-whole", HALF)).state_dict()
    assert all(torch.equal(tensor, model[name]) for name, tensor in saved_weights(fsdp.at("fsdp", HALF)).items())
    different, digests = compare_folders(fsdp.at("fsdp-whole", HALF), fsdp.at("fsdp", HALF))
    assert different is None
    assert len(digests) > 3 * len(model)


@pytest.fixture(scope="module")
def critic_metrics(stage: Stage) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    return stage.single("torch-critic", until=CRITIC_STEPS, **CRITIC)


@pytest.mark.parametrize("name", ["fsdp-critic", *zero_params("zero-1-critic", "zero-3-critic")])
def test_critic_trains_on_two_ranks_as_in_one_process(name: str, critic_metrics: Any, request: Any) -> None:
    """Also where it goes on from the checkpoint of another backend."""
    stage = stage_of(name, request)
    ours = stage.metrics(name)
    for a, b in zip(ours, critic_metrics[-len(ours) :], strict=True):
        for key in ("loss", "value_loss", "value_mean", "explained_variance", "advantage_abs_mean"):
            assert a[key] == pytest.approx(b[key], abs=2e-4), key
        assert a["critic_grad_norm"] == pytest.approx(b["critic_grad_norm"], rel=5e-3)
        assert a["updates"] == b["updates"]
    expected, found = (saved_tensors(stored_critic(stage.at(one, CRITIC_STEPS))) for one in ("torch-critic", name))
    assert found.keys() == expected.keys()
    worst = max(float((found[key] - expected[key]).abs().max()) for key in expected if key.startswith("weight/"))
    assert worst < WEIGHT_ATOL, worst


@pytest.fixture(scope="module")
def lora_metrics(stage: Stage) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    return stage.single("torch-lora", until=LORA_STEPS, **LORA)


@pytest.mark.parametrize("name", ["fsdp-lora", "fsdp-lora-options"])
def test_adapter_trains_on_two_ranks_as_in_one_process(name: str, fsdp: Stage, lora_metrics: Any) -> None:
    for a, b in zip(fsdp.metrics(name), lora_metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=LOSS_ATOL)
        assert a["kl_reference"] == pytest.approx(b["kl_reference"], abs=LOSS_ATOL)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    expected, found = (load_file(fsdp.at(one, LORA_STEPS) / checkpoint.ADAPTER) for one in ("torch-lora", name))
    assert found.keys() == expected.keys()
    assert max(float((found[key] - expected[key]).abs().max()) for key in expected) < WEIGHT_ATOL
    (published,) = (fsdp.folder / name / "weights").glob("*.safetensors")
    sent = load_file(published)
    assert sent.keys() == found.keys()
    assert all(torch.equal(sent[key], found[key]) for key in found)


def test_adapter_of_two_ranks_goes_on_in_one_process(fsdp: Stage, lora_metrics: Any) -> None:
    back = fsdp.single("torch-lora-from-fsdp", fsdp.at("fsdp-lora", 2), until=LORA_STEPS, **LORA)
    for a, b in zip(back, lora_metrics[2:], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=LOSS_ATOL)


@pytest.fixture(scope="module")
def versions(stage: Stage) -> Stage:
    """Played with log-probs under the versions that sampled, on two ranks and in one process."""
    torch.set_num_threads(1)
    backends: dict[str, dict[str, Any]] = {
        "fsdp": {"backend": "fsdp"},
        "fsdp-offloaded": {"backend": "fsdp", "fsdp": {"cpu_offload": True}},
    }
    if find_spec("deepspeed") is not None:
        backends["zero-2"] = {"backend": "deepspeed", "deepspeed": {"stage": 2}}
    stage.play(
        "versions-job", 2,
        [stage.scene(f"{name}-versions", 2, one | VERSIONS, until=VERSION_STEPS) for name, one in backends.items()],
    )  # fmt: skip
    return stage


@pytest.fixture(scope="module")
def version_metrics(stage: Stage) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    return stage.single("torch-versions", until=VERSION_STEPS, **VERSIONS)


@pytest.mark.parametrize("name", ["fsdp", "fsdp-offloaded", pytest.param("zero-2", marks=needs_deepspeed)])
def test_versions_are_recalled_on_two_ranks_as_in_one_process(name: str, versions: Stage, version_metrics: Any) -> None:
    for step, (a, b) in enumerate(zip(versions.metrics(f"{name}-versions"), version_metrics, strict=True), 1):
        for key in ("loss", "kl_mismatch", "kl_staleness", "balance_heuristic_mean", "m2po_staleness_masked_share"):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=LOSS_ATOL), f"{key} of step {step}"
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        assert a["versions_held"] == min(step, 3)
        assert a["version_missing_share"] == 0.0
        assert (a["kl_staleness"] > 0) == (step > 1)


def test_offload_checkpointed_activations_and_kept_parameters_change_nothing(fsdp: Stage, torch_metrics: Any) -> None:
    assert_agree(fsdp, "fsdp-options", torch_metrics)


def test_a_mean_per_rank_instead_of_the_global_one_is_distinguished(fsdp: Stage, torch_metrics: Any) -> None:
    with pytest.raises(AssertionError, match="the loss of step"):
        assert_agree(fsdp, "fsdp-wrong", torch_metrics)


def test_mixed_precision_keeps_float32_weights_and_stays_close(fsdp: Stage, torch_metrics: Any) -> None:
    state = fsdp.state("fsdp-bfloat16", 2)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    first = fsdp.metrics("fsdp-bfloat16")[0]
    assert first["loss"] == pytest.approx(torch_metrics[0]["loss"], abs=0.02)
    assert first["grad_norm"] == pytest.approx(torch_metrics[0]["grad_norm"], rel=0.1)


def test_auto_says_what_it_chose_and_why(fsdp: Stage) -> None:
    setup = json.loads((fsdp.folder / "fsdp-auto" / "result.json").read_text())["setup"]
    assert setup["backend"] == "fsdp"
    assert setup["backend_reason"].startswith("auto: 2 ranks, ")
    assert setup["ranks"] == 2


def test_published_and_exported_weights_are_the_gathered_ones(fsdp: Stage) -> None:
    final = AutoModelForCausalLM.from_pretrained(fsdp.folder / "fsdp" / "final")
    (published,) = (fsdp.folder / "fsdp" / "weights").glob("*.safetensors")
    sent, saved = load_file(published), fsdp.state("fsdp")
    for name, parameter in final.named_parameters():
        assert torch.equal(parameter, sent[name])
        assert torch.equal(parameter, saved[name])


@pytest.mark.parametrize("name", ["fsdp-bad", *zero_params("zero-1-bad", "zero-3-bad")])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(name: str, request: Any) -> None:
    stage = stage_of(name, request)
    bad, good = stage.metrics(name)
    assert bad["skipped_updates"] == 1
    assert good["skipped_updates"] == 0
    assert all(torch.isfinite(tensor).all() for tensor in stage.state(name, 2).values())


def test_a_checkpoint_of_one_process_goes_on_with_fsdp_and_back(fsdp: Stage, torch_metrics: Any) -> None:
    assert_agree(fsdp, "fsdp-from-torch", torch_metrics)
    back = fsdp.single("torch-from-fsdp", fsdp.at("fsdp", HALF))
    assert len(back) == STEPS - HALF
    assert_steps_agree(back, torch_metrics)
    assert_states_agree(fsdp, "torch-from-fsdp")


@pytest.mark.parametrize("name", zero_params("zero-1", "zero-2", "zero-3", "zero-3-offloaded"))
def test_deepspeed_on_two_ranks_trains_as_one_process_does(name: str, request: Any, torch_metrics: Any) -> None:
    assert_agree(stage_of(name, request), name, torch_metrics)


@pytest.mark.parametrize("name", zero_params("zero-3-from-fsdp", "zero-1-from-zero-3", "fsdp-from-zero-3"))
def test_any_backend_goes_on_from_the_checkpoint_of_another(name: str, request: Any, torch_metrics: Any) -> None:
    assert_agree(stage_of(name, request), name, torch_metrics)


@needs_deepspeed
def test_a_checkpoint_of_deepspeed_goes_on_in_one_process(zero: Stage, torch_metrics: Any) -> None:
    back = zero.single("torch-from-zero", zero.at("zero-3", HALF))
    assert len(back) == STEPS - HALF
    assert_steps_agree(back, torch_metrics)
    assert_states_agree(zero, "torch-from-zero")


@pytest.mark.thorough
def test_three_ranks_of_uneven_shards_agree_too(stage: Stage, torch_metrics: Any) -> None:
    stage.play("three-job", 3, [stage.scene("three", 3, {"backend": "fsdp"})])
    assert_agree(stage, "three", torch_metrics)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, made_model: Any, made_samples: Any, server: JobServer) -> Stage:
    """Batches of few samples, odd ones among them: fewer than ranks times mini-batches, and down to one."""
    sizes = ([3], [2, 3], [1], [3, 3, 1], [1, 2])
    batches = [made_samples(sizes[step % len(sizes)], version=step, seed=step) for step in range(STEPS)]
    return Stage(tmp_path_factory.mktemp("few"), made_model(tie_word_embeddings=False), batches, server)


@pytest.fixture(scope="module")
def few_metrics(few: Stage) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    return few.single("torch")


@pytest.mark.parametrize(
    ("name", "ranks", "backend"),
    [
        pytest.param("fsdp", 2, {"backend": "fsdp"}, marks=pytest.mark.thorough("few")),
        ("fsdp-3", 3, {"backend": "fsdp"}),
        pytest.param("zero-1-3", 3, zero_stage(1), marks=[needs_deepspeed, pytest.mark.thorough("few")]),
        pytest.param("zero-3-2", 2, zero_stage(3), marks=needs_deepspeed),
    ],
)
def test_any_number_of_samples_trains_on_any_number_of_ranks(
    name: str, ranks: int, backend: dict[str, Any], few: Stage, few_metrics: Any
) -> None:
    few.play(f"{name}-job", ranks, [few.scene(name, ranks, backend)])
    assert {row["sequences"] for row in few_metrics} == {1.0, 3.0, 5.0, 7.0}
    assert_steps_agree(few.metrics(name), few_metrics)
    assert_states_agree(few, name)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_at_once(victim: int, stage: Stage) -> None:
    name = f"killed-{victim}"
    processes = stage.start(name, 2, [stage.scene(name, 2, {"backend": "fsdp"}, until=10**6)])
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while "step 2" not in stage.log(name, 0):
            assert time.monotonic() < deadline_s, stage.log(name, 0)
            assert processes[0].poll() is None, stage.log(name, 0)
            time.sleep(0.05)
        processes[victim].send_signal(signal.SIGKILL)
        survivor = processes[1 - victim]
        assert survivor.wait(300.0) == 1  # far below rank_timeout_s
        assert "RankLost: the other ranks of the trainer were lost" in stage.log(name, 1 - victim)
    finally:
        for process in processes:
            process.kill()
            process.wait()


OTHER_VICTIMS = [("load", 0), ("publish", 1), ("save", 0), ("report", 1), ("export", 0)]
"""save: in the middle of a rank's part. report: all parts are complete, and rank 0 does not know it. seal: it does."""


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        ("load", 1), ("publish", 0), ("save", 1), ("seal", 0), ("export", 1),
        *(pytest.param(*one, marks=pytest.mark.thorough) for one in OTHER_VICTIMS),
    ],
)  # fmt: skip
def test_a_rank_killed_in_any_phase_ends_the_other_and_leaves_what_was_complete(
    phase: str, victim: int, stage: Stage
) -> None:
    name = f"{phase}-{victim}"
    scene = stage.scene(name, 2, {"backend": "fsdp"}, until=2, save_at=1, victim=victim, phase=phase)
    processes = stage.start(name, 2, [scene])
    try:
        assert [process.wait(LIMIT_S) for process in processes][1 - victim] == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert f"killed in {phase}" in stage.log(name, victim)
    assert "RankLost: the other ranks of the trainer were lost" in stage.log(name, 1 - victim)
    run_dir = stage.folder / name
    checkpoint.repair(run_dir)
    found = checkpoint.all_checkpoints(run_dir)
    assert [version for version, _ in found] == {"load": [], "export": [1, 2]}.get(phase, [1])
    for _, folder in found:
        checkpoint.verify(folder)
    assert not (run_dir / "final").exists()
    assert not [path for path in run_dir.rglob("*") if path.name.endswith(".partial")] or phase == "export"
    if phase in ("save", "seal"):
        goes_on = stage.scene(f"{name}-on", 2, {"backend": "fsdp"}, until=2, resume_from=found[-1][1])
        stage.play(f"{name}-on", 2, [goes_on])
        assert len(stage.metrics(f"{name}-on")) == 1


def assert_exports_exactly(stage: Stage, name: str) -> None:
    """Checkpoint to Hugging Face folder, to checkpoint, and to a folder again: the same bits each time."""
    out = stage.folder / f"{name}-exported"
    assert export_checkpoint(stage.at(name, STEPS), out / "hf") == "float32"
    import_folder(out / "hf", out / "ours")
    export_checkpoint(out / "ours", out / "again")
    saved = saved_weights(stage.at(name, STEPS))
    final = AutoModelForCausalLM.from_pretrained(out / "again").state_dict()
    for folder in ("hf", "ours", "again"):
        found = load_file(out / folder / "model.safetensors")
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[key], saved[key]) for key in saved)
    assert all(torch.equal(final[key], saved[key]) for key in saved)


@pytest.mark.parametrize("name", ["torch", "fsdp", *zero_params("zero-1", "zero-2", "zero-3")])
def test_checkpoint_of_every_backend_is_exported_and_imported_bit_for_bit(name: str, request: Any) -> None:
    assert_exports_exactly(stage_of(name, request), name)
