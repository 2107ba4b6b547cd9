"""A policy that is an adapter: what is trained, published, saved and resumed, and engines that leave it out."""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import UserError
from areal_like.trajectory import Segment, Trajectory
from areal_like.weights.adapter import peft_name
from areal_like.weights.delta import digest
from areal_like.weights.weight_store import describe, open_payload
from areal_like.wire.messages import BatchSample, Sampling
from rollout.config import EngineSettings
from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.port import GenerationRequest
from rollout.weights.merging import MergingReceiver
from trainer.adapter import PolicyAdapter, _check_names, check_kind, kept, weight_parts
from trainer.backends.choice import choose_backend
from trainer.checkpoints.adapter_export import export_adapter
from trainer.config import LoraSettings
from trainer.export import cast, named_tensors, write_model
from trainer.host_copy import whole_part
from trainer.model.lora import Merged, adapter_off, is_adapters
from trainer.model.model import load_causal_lm
from trainer.model.packed import PackedSequences
from trainer.training import Training
from trainer.weights.publish import tensor_bytes

RANK, SCALE = 4, 2.0
LORA = {"rank": RANK, "alpha": RANK * SCALE}


def opened(prepared: Path, *, lora: dict[str, Any] | None = LORA, **changes: Any) -> Training:
    run_dir = prepared.parent / "run"
    settings = {"device": "cpu", "optimizer": {"lr": 0.02}, "lora": lora, **changes.pop("settings", {})}
    facts: dict[str, Any] = {
        "role": "trainer", "name": "trainer", "run_id": "t", "run_dir": str(run_dir), "hub_address": "tcp://127.0.0.1:1",
        "parent_pid": os.getpid(), "seed": 1, "model": ModelSettings(path=str(prepared)),
        "sampling": SamplingSettings(), "staleness": StalenessSettings(), "groups_per_step": 3, "group_size": 4,
        "num_steps": 5, "weight_dir": str(run_dir / "weights"), "settings": settings,
    }  # fmt: skip
    training = Training(ProcessSpec(**{**facts, **changes}))
    training.open()
    return training


def sampled_by(model: PreTrainedModel, training: Training, samples: list[BatchSample]) -> list[BatchSample]:
    """The samples with the log-probs of an engine that computes with `model`, all of the present version."""
    found = []
    for sample in samples:
        old = sample.trajectory
        packed = PackedSequences.build([old.tokens_T], [old.loss_mask_T])
        with torch.no_grad():
            logits_TV = model(input_ids=packed.tokens_T[None]).logits[0]
            logp_TV = torch.log_softmax(logits_TV, -1)
        logprobs_T, versions_T = old.logprobs_T.copy(), old.versions_T.copy()
        logprobs_T[old.loss_mask_T] = logp_TV[packed.sources_N, packed.targets_N].numpy()
        versions_T[old.loss_mask_T] = training.version
        changed: Trajectory = msgspec.structs.replace(old, logprobs_T=logprobs_T, versions_T=versions_T)
        found.append(msgspec.structs.replace(sample, trajectory=changed))
    return found


def up_to_date(prepared: Path, training: Training) -> PreTrainedModel:
    """An engine's model, with the present version."""
    engine = load_causal_lm(prepared)
    engine.load_state_dict(dict(Merged(named_tensors(training.model), SCALE)))
    return engine


@pytest.fixture
def step(make_samples: Callable[..., list[BatchSample]], prepared: Path) -> Callable[..., dict[str, float]]:
    """Do one step on answers of an engine that has what was published; or the base; or `engine`."""

    def run(training: Training, engine: PreTrainedModel | None = None) -> dict[str, float]:
        if engine is None:
            engine = up_to_date(prepared, training)
        number = training.version + 1
        samples = sampled_by(engine, training, make_samples([4, 4, 4], version=0, seed=number))
        return training.run(training.prepare(samples, number))

    return run


def published(training: Training) -> Any:
    written = training.publish()()
    return open_payload(written.path)


def as_tensor(payload: memoryview, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.float32).view(shape)


def test_only_the_adapter_is_trained_and_the_version_is_base_plus_adapter(
    prepared: Path, step: Callable[..., dict[str, float]]
) -> None:
    training, base = opened(prepared), named_tensors(load_causal_lm(prepared))
    for _ in range(2):
        metrics = step(training)
    assert metrics["grad_norm"] > 0
    weights = named_tensors(training.model)
    assert all(torch.equal(weights[name], tensor) for name, tensor in base.items())
    manifest, payload = published(training)
    assert {entry.name for entry in manifest.tensors} == base.keys()
    merged = Merged(weights, SCALE)
    for entry in manifest.tensors:
        assert torch.equal(as_tensor(payload[entry.name], entry.shape), merged[entry.name])
    assert any(not torch.equal(merged[name], tensor) for name, tensor in base.items())
    assert manifest.adapter is not None
    assert manifest.adapter.lone is None
    recorded = json.loads((prepared.parent / "run" / "trainer.json").read_text())
    num_adapter = sum(tensor.numel() for name, tensor in weights.items() if is_adapters(name))
    assert recorded["parameters_trained"] == num_adapter < recorded["parameters"] / 2


def test_with_publish_adapter_only_a_and_b_travel(prepared: Path, step: Callable[..., dict[str, float]]) -> None:
    training = opened(prepared, lora={**LORA, "publish": "adapter"})
    step(training)
    manifest, payload = published(training)
    weights = {name: tensor for name, tensor in named_tensors(training.model).items() if is_adapters(name)}
    assert {e.name for e in manifest.tensors} == {f"base_model.model.{name}.weight" for name in weights}
    for entry in manifest.tensors:
        own = weights[entry.name.removeprefix("base_model.model.").removesuffix(".weight")]
        assert torch.equal(as_tensor(payload[entry.name], entry.shape), own)
    lone = manifest.adapter.lone
    assert (lone.scale, lone.dtype) == (SCALE, "float32")
    assert lone.base.keys() == named_tensors(load_causal_lm(prepared)).keys()


def test_a_checkpoint_holds_the_adapter_alone_and_resumes_bit_for_bit(
    prepared: Path, step: Callable[..., dict[str, float]]
) -> None:
    training = opened(prepared)
    step(training)
    folder = training.save()().folder
    assert not (folder / "model.safetensors").exists()
    own = {name for name in named_tensors(training.model) if is_adapters(name)}
    moments = load_file(folder / "optimizer.safetensors")
    assert {name.partition("/")[2] for name in moments if name.startswith("exp_avg/")} == own
    resumed = opened(prepared, resume_from=str(folder))
    for one in (training, resumed):
        step(one)
    first, second = named_tensors(training.model), named_tensors(resumed.model)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_checkpoint_is_not_resumed_on_another_base_or_without_an_adapter(
    prepared: Path, step: Callable[..., dict[str, float]], tiny_model: Callable[..., PreTrainedModel]
) -> None:
    training = opened(prepared)
    step(training)
    folder = str(training.save()().folder)
    with pytest.raises(UserError, match=r"contains an adapter, but trainer\.lora is not set"):
        opened(prepared, lora=None, resume_from=folder)
    with pytest.raises(UserError, match="has a different rank"):
        opened(prepared, lora={**LORA, "rank": 2}, resume_from=folder)
    with pytest.raises(UserError, match=r"has alpha 8, but trainer\.lora\.alpha is 16 -> set trainer\.lora\.alpha=8"):
        opened(prepared, lora={**LORA, "alpha": 16.0}, resume_from=folder)
    write_model(tiny_model(seed=1), prepared, dtype="float32")
    with pytest.raises(UserError, match="not trained on the base model"):
        opened(prepared, resume_from=folder)
    plain = opened(prepared, lora=None)
    with pytest.raises(UserError, match="contains a full model"):
        opened(prepared, resume_from=str(plain.save()().folder))


def test_the_reference_is_the_base_and_no_second_model(
    prepared: Path, step: Callable[..., dict[str, float]], make_samples: Callable[..., list[BatchSample]]
) -> None:
    training = opened(prepared, settings={"loss": {"kl_coef": 0.1}})
    assert training._step.reference is None
    assert step(training)["kl_reference"] == pytest.approx(0.0, abs=1e-7), "the first step starts from the base"
    batch = training.prepare(make_samples([2], version=0), 2).mini_batches[0][0]
    reference_N = training._step._reference_logprobs(batch)
    with torch.no_grad(), adapter_off(training.model):
        expected_N, _ = training.policy.logprobs(batch.packed, with_entropy=False)
    torch.testing.assert_close(reference_N, expected_N, atol=0, rtol=0)
    assert step(training)["kl_reference"] > 1e-4


def test_the_engines_routes_are_not_replayed_in_the_reference(
    prepared: Path, make_samples: Callable[..., list[BatchSample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = opened(prepared, settings={"loss": {"kl_coef": 0.1}})
    batch = training.prepare(make_samples([2], version=0), 1).mini_batches[0][0]
    packed = replace(batch.packed, routes_TLK=torch.zeros(batch.packed.num_tokens, 2, 2, dtype=torch.int32))
    seen: list[bool] = []

    def logprobs(packed: PackedSequences, *, with_entropy: bool) -> tuple[torch.Tensor, None]:
        seen.append(packed.routes_TLK is None)
        return torch.zeros(packed.num_predictions), None

    monkeypatch.setattr(training.policy, "logprobs", logprobs)
    training._step._reference_logprobs(replace(batch, packed=packed))
    training._step._logprobs(replace(batch, packed=packed), with_entropy=False)
    assert seen == [True, False]


def test_the_exported_model_is_merged(prepared: Path, step: Callable[..., dict[str, float]]) -> None:
    training = opened(prepared)
    step(training)
    exported = named_tensors(load_causal_lm(training.export()))
    merged = Merged(named_tensors(training.model), SCALE)
    assert exported.keys() == set(merged)
    assert all(torch.equal(exported[name], tensor) for name, tensor in merged.items())


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_checkpoint_is_exported_merged_or_as_an_adapter(
    prepared: Path, step: Callable[..., dict[str, float]], tmp_path: Path, dtype: str | None
) -> None:
    training = opened(prepared)
    step(training)
    folder = training.save()().folder
    assert export_adapter(folder, tmp_path / "merged", form="merged", dtype=dtype) == (dtype or "float32")
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    merged, kind = Merged(named_tensors(training.model), SCALE), torch.bfloat16 if dtype else torch.float32
    assert saved.keys() == set(merged)
    for name, tensor in saved.items():
        assert tensor.dtype == kind
        torch.testing.assert_close(tensor.float(), merged[name].to(kind).float(), atol=1e-6, rtol=0.01 if dtype else 0)
    load_causal_lm(tmp_path / "merged")
    export_adapter(folder, tmp_path / "adapter", form="adapter", dtype=dtype)
    assert (tmp_path / "adapter" / "adapter_config.json").read_text() == (folder / "adapter_config.json").read_text()
    alone = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    own = {name: tensor for name, tensor in named_tensors(training.model).items() if is_adapters(name)}
    assert alone.keys() == {f"base_model.model.{name}.weight" for name in own}
    assert all(torch.equal(alone[f"base_model.model.{name}.weight"], one.to(kind)) for name, one in own.items())


def test_an_adapter_is_not_merged_into_another_base(
    prepared: Path, step: Callable[..., dict[str, float]], tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    training = opened(prepared)
    folder = training.save()().folder
    write_model(tiny_model(seed=1), prepared, dtype="float32")
    with pytest.raises(UserError, match="this model is not the base model that the adapter was trained on"):
        export_adapter(folder, tmp_path / "out", form="merged")
    prepared.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"no longer exists.*--lora adapter"):
        export_adapter(folder, tmp_path / "out", form="merged")
    assert not (tmp_path / "out").exists()


def test_an_adapter_alone_needs_a_base_that_workers_can_read_by_name(prepared: Path) -> None:
    tensors = load_file(prepared / "model.safetensors")
    torch.save(tensors, prepared / "pytorch_model.bin")
    (prepared / "model.safetensors").unlink()
    opened(prepared)
    with pytest.raises(UserError, match=r"publish: workers cannot merge .* do not contain .* -> publish: merged"):
        opened(prepared, lora={**LORA, "publish": "adapter"})


def test_a_base_whose_files_have_other_names_is_not_said_to_be_another_model(prepared: Path, tmp_path: Path) -> None:
    folder = opened(prepared).save()().folder
    tensors = load_file(prepared / "model.safetensors")
    tensors["renamed"] = tensors.pop("model.norm.weight")
    save_file(tensors, prepared / "model.safetensors")
    with pytest.raises(UserError, match=r"do not contain model\.norm\.weight.*converts.*--lora adapter"):
        export_adapter(folder, tmp_path / "out", form="merged")


# ---------------------------------------------------------------- engines


class _Files:
    """A receiver of versions whose location is their manifest."""

    async def receive(self, place: str, deadline_s: float) -> Path:
        return Path(place)

    async def run(self) -> None: ...

    def forget(self) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_an_engines_logprobs_are_those_of_transformers_with_peft(
    prepared: Path, step: Callable[..., dict[str, float]], tmp_path: Path, publish: str
) -> None:
    peft = pytest.importorskip("peft")
    training = opened(prepared, lora={**LORA, "publish": publish})
    for _ in range(2):
        step(training)
    theirs = peft.PeftModel.from_pretrained(load_causal_lm(prepared), str(training.save()().folder))
    files: Any = _Files()
    receiver = MergingReceiver(files, prepared, [tmp_path / "local"])

    async def answers() -> list[tuple[np.ndarray, Segment]]:
        engine = EmbeddedEngine(
            prepared, EngineSettings(device="cpu", num_slots=4, max_context=64), dtype="float32", num_threads=1
        )
        await engine.start()
        try:
            await engine.load_version(await receiver.receive(str(training.publish()().path), 5.0), "recompute")
            found = []
            for number in range(4):
                prompt_P = np.arange(3 + number, 8 + number, dtype=np.int32)
                request = GenerationRequest(
                    request_id=number, prompt_P=prompt_P, prefix=Segment.empty(), seed=number,
                    sampling=Sampling(max_new_tokens=12, ignore_eos=True),
                )  # fmt: skip
                found.append((prompt_P, (await engine.generate(request)).segment))
            return found
        finally:
            await engine.close()
            await receiver.close()

    for prompt_P, segment in asyncio.run(answers()):
        tokens = torch.from_numpy(np.concatenate([prompt_P, segment.tokens_R]).astype(np.int64))[None]
        with torch.no_grad():
            logp_TV = torch.log_softmax(theirs(input_ids=tokens).logits[0].float(), -1)
            base_TV = torch.log_softmax(load_causal_lm(prepared)(input_ids=tokens).logits[0].float(), -1)
        places = tokens[0, len(prompt_P) :, None]
        expected_R, base_R = (
            one[len(prompt_P) - 1 : -1].gather(-1, places)[:, 0].numpy() for one in (logp_TV, base_TV)
        )
        np.testing.assert_allclose(segment.logprobs_R, expected_R, atol=1e-4)
        assert np.abs(base_R - expected_R).max() > 0.01, "the adapter matters"


def test_an_engine_that_uses_the_adapter_agrees_with_the_trainer(
    prepared: Path, step: Callable[..., dict[str, float]]
) -> None:
    training = opened(prepared)
    metrics = [step(training) for _ in range(3)]
    assert all(one["adapter_error_nats"] < 1e-4 for one in metrics)
    assert metrics[0]["adapter_effect_nats"] == 0
    assert metrics[2]["adapter_effect_nats"] > metrics[1]["adapter_effect_nats"] > 1e-3


def test_an_engine_that_ignores_the_adapter_ends_the_run_with_a_sentence(
    prepared: Path, step: Callable[..., dict[str, float]]
) -> None:
    training, base = opened(prepared), load_causal_lm(prepared)
    step(training, base)
    before = {name: tensor.clone() for name, tensor in named_tensors(training.model).items()}
    with pytest.raises(UserError, match=r"samples with the base model instead of version 1: the log-probs"):
        step(training, base)
    assert all(torch.equal(before[name], tensor) for name, tensor in named_tensors(training.model).items())


def test_an_engine_that_is_stuck_at_an_older_adapter_ends_the_run(
    prepared: Path, step: Callable[..., dict[str, float]]
) -> None:
    training, stuck = opened(prepared), load_causal_lm(prepared)
    step(training)
    stuck.load_state_dict(dict(Merged(named_tensors(training.model), SCALE)))
    step(training, stuck)

    with pytest.raises(UserError, match="the engine samples with version 1 instead of version 2: the log-probs"):
        [step(training, stuck) for _ in range(2)]


def test_an_engine_that_computes_with_fewer_bits_ends_nothing(
    prepared: Path, step: Callable[..., dict[str, float]], tiny_model: Callable[..., PreTrainedModel]
) -> None:
    training = opened(prepared)
    metrics = [step(training, tiny_model(seed=1)) for _ in range(3)]  # far from every version, as noise is
    assert metrics[2]["adapter_error_nats"] > 0.2


def in_bfloat16(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}


def test_an_adapter_that_rounding_to_bfloat16_removes_from_the_version_ends_nothing(
    prepared: Path, make_samples: Callable[..., list[BatchSample]], tiny_model: Callable[..., PreTrainedModel]
) -> None:
    model = tiny_model()
    model.load_state_dict(in_bfloat16(model.state_dict()))
    write_model(model, prepared, dtype="float32")
    settings = ModelSettings(path=str(prepared), dtype="bfloat16")
    training = opened(prepared, model=settings, settings={"optimizer": {"lr": 1e-5}})
    engine = load_causal_lm(prepared)
    for number in range(1, 5):
        engine.load_state_dict(in_bfloat16(Merged(named_tensors(training.model), SCALE)))
        samples = sampled_by(engine, training, make_samples([4, 4, 4], version=0, seed=number))
        metrics = training.run(training.prepare(samples, number))
        assert metrics["adapter_error_nats"] < 1e-5, "compared with what the engine was given"


def test_an_engine_that_ignores_an_adapter_in_bfloat16_ends_the_run(
    prepared: Path, step: Callable[..., dict[str, float]]
) -> None:
    training = opened(prepared, model=ModelSettings(path=str(prepared), dtype="bfloat16"))
    base = load_causal_lm(prepared)
    base.load_state_dict(in_bfloat16(base.state_dict()))
    step(training, base)
    with pytest.raises(UserError, match="samples with the base model instead of"):
        step(training, base)


def test_a_critic_counts_whole_where_a_backend_is_chosen(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[tuple[int, int]] = []

    def choose(settings: Any, num_parameters: int, device: torch.device, *, num_frozen: int) -> Any:
        counts.append((num_parameters, num_frozen))
        return choose_backend(settings, num_parameters, device, num_frozen=num_frozen)

    monkeypatch.setattr("trainer.training.choose_backend", choose)
    training = opened(prepared, settings={"critic": {}, "advantage": {"kind": "gae"}})
    num_base = load_causal_lm(prepared).num_parameters()
    num_adapter = sum(tensor.numel() for name, tensor in named_tensors(training.model).items() if is_adapters(name))
    assert counts == [(num_adapter + num_base, num_base)]


def test_answers_of_an_older_version_are_compared_with_that_version(
    prepared: Path, step: Callable[..., dict[str, float]], make_samples: Callable[..., list[BatchSample]]
) -> None:
    training = opened(prepared)
    step(training)
    engine = up_to_date(prepared, training)
    late = sampled_by(engine, training, make_samples([4, 4, 4], version=0, seed=9))
    step(training)
    present = {name: tensor.clone() for name, tensor in named_tensors(training.model).items()}
    check = training._adapter_check
    assert check is not None
    metrics = check.look(training.prepare(late, 3))
    assert metrics["adapter_error_nats"] < 1e-4
    assert all(torch.equal(present[name], tensor) for name, tensor in named_tensors(training.model).items())


def test_only_tokens_up_to_the_first_change_of_version_are_compared(
    prepared: Path, step: Callable[..., dict[str, float]], make_samples: Callable[..., list[BatchSample]]
) -> None:
    training = opened(prepared)
    step(training)
    engine = up_to_date(prepared, training)
    samples = sampled_by(engine, training, make_samples([4, 4, 4], version=0, seed=9, max_answer=8))
    for sample in samples:
        where = np.flatnonzero(sample.trajectory.loss_mask_T)[1:]
        sample.trajectory.versions_T[where] = 2
        sample.trajectory.logprobs_T[where] = -9.0
    step(training)
    check = training._adapter_check
    assert check is not None
    assert check.look(training.prepare(samples, 3))["adapter_error_nats"] < 1e-4


# ---------------------------------------------------------------- parts and identities, without training


def test_a_checkpoint_keeps_the_adapter_and_all_of_adamws_state_and_a_copy_for_engines_the_adapter_alone() -> None:
    keys = ["weight/up.weight", "weight/up.lora_A", "exp_avg/up.lora_A", "step/up.lora_A", "weight/up.lora_B"]
    parts = [whole_part(key, torch.zeros(1)) for key in keys]
    assert [part.key for part in kept(parts)] == keys[1:]
    assert [part.key for part in weight_parts(parts)] == [keys[1], keys[4]]


def test_a_checkpoint_of_the_other_kind_is_refused_with_what_to_do(tmp_path: Path) -> None:
    settings = LoraSettings()
    check_kind(tmp_path, None)
    with pytest.raises(UserError) as raised:
        check_kind(tmp_path, settings)
    assert str(raised.value) == (
        f"{tmp_path}: trainer.lora is set, but the checkpoint contains a full model -> set lora: null, or start a new "
        "run"
    )
    (tmp_path / "adapter_model.safetensors").touch()
    check_kind(tmp_path, settings)
    with pytest.raises(UserError) as raised:
        check_kind(tmp_path, None)
    assert str(raised.value) == (
        f"{tmp_path}: the checkpoint contains an adapter, but trainer.lora is not set -> set trainer.lora as in the "
        "original run"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_says_which_base_and_adapter_it_is_made_of(
    prepared: Path, tiny_model: Callable[..., PreTrainedModel], dtype: Any
) -> None:
    facts: Any = {"model": ModelSettings(path=str(prepared), dtype=dtype), "seed": 1, "resume_from": None}
    base = named_tensors(tiny_model())
    whole = {name: tensor_bytes(cast(one, dtype)) for name, one in base.items()}
    notes, payloads = {}, {}
    for publish in ("merged", "adapter"):
        model, settings = tiny_model(), LoraSettings(**LORA, publish=publish)
        adapter = PolicyAdapter.add(model, settings, SimpleNamespace(**facts))  # type: ignore[arg-type]
        tensors = named_tensors(model)
        assert [adapter.is_published(name) for name in ("q.weight", "q.lora_A")] == [publish == "merged", True]
        for name, tensor in tensors.items():
            if name.endswith("lora_B"):
                tensor.fill_(0.01)
        payloads[publish], notes[publish] = adapter.version_of(tensors)
        assert notes[publish].base_digest == digest(describe("disk", 0, "base", whole))
        exact = {peft_name(name): tensor_bytes(one) for name, one in tensors.items() if is_adapters(name)}
        assert notes[publish].adapter_digest == digest(describe("disk", 0, "adapter", exact))
        for one in tensors.values():
            one.zero_()  # a version is a copy
    assert notes["merged"].lone is None
    lone = notes["adapter"].lone
    assert lone is not None
    assert (lone.scale, lone.dtype) == (SCALE, dtype)
    assert lone.base == {name: zlib.crc32(one.data) for name, one in whole.items()}
    assert {one.dtype for one in payloads["adapter"].values()} == {"float32"}
    assert payloads["adapter"].keys() == exact.keys()
    assert {one.dtype for one in payloads["merged"].values()} == {dtype}
    assert payloads["merged"].keys() == whole.keys()
    changed = {name for name, one in payloads["merged"].items() if one.data != whole[name].data}
    assert changed == {f"{name.rpartition('.')[0]}.weight" for name in tensors if name.endswith("lora_A")}


def test_a_file_that_lacks_a_tensor_is_named_where_workers_are_to_merge(prepared: Path) -> None:
    _check_names(prepared, ["model.norm.weight"])
    with pytest.raises(UserError) as raised:
        _check_names(prepared, ["model.norm.weight", "z.weight", "a.weight"])
    assert str(raised.value) == (
        "trainer.lora.publish: workers cannot merge the adapter, because the safetensors files of the model do not "
        "contain a.weight -> publish: merged"
    )
