"""An adapter inside a model: peft's arithmetic, files that peft reads, targets, the base behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError
from trainer.adapter_files import AdapterFiles, BaseIdentity
from trainer.config import AdapterSettings
from trainer.export import named_tensors, write_model
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import token_logprobs
from trainer.model.lora import (
    LoraLinear,
    Merged,
    adapter_off,
    adapter_tensors,
    add_adapter,
    find_targets,
    is_adapters,
    merge_adapter,
    rounded,
)
from trainer.model.packed import PackedSequences

MakeModel = Callable[..., PreTrainedModel]
LENGTHS = (9, 5, 12)
BASE = BaseIdentity("base", "float32", {})


def adapted(model: PreTrainedModel, *, is_trained: bool = True, **settings: Any) -> PreTrainedModel:
    """With an adapter; as if it were trained where B is not 0."""
    add_adapter(model, AdapterSettings(**{"rank": 4, "alpha": 8.0, **settings}), seed=3)
    if is_trained:
        generator = torch.Generator().manual_seed(7)
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.lora_B.data.normal_(std=0.1, generator=generator)
    return model


def logprobs(model: PreTrainedModel, sequences: Callable[..., Any]) -> torch.Tensor:
    tokens, masks = sequences(LENGTHS)
    attach(model, AttentionChoice("sdpa", "test"))
    packed = PackedSequences.build(tokens, masks)
    found_N, _ = token_logprobs(model, packed, temperature=1.0, chunk_tokens=64, with_entropy=False)
    return found_N


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_an_adapter_computes_and_is_saved_as_in_peft(
    tmp_path: Path, tiny_model: MakeModel, sequences: Callable[..., Any], family: str
) -> None:
    peft = pytest.importorskip("peft")
    model = adapted(tiny_model(family))
    AdapterFiles.of(model, AdapterSettings(rank=4, alpha=8.0), BASE).write(tmp_path, named_tensors(model))
    theirs = peft.PeftModel.from_pretrained(tiny_model(family), str(tmp_path))
    tokens, masks = sequences(LENGTHS)
    expected = []
    for tokens_T, mask_T in zip(tokens, masks, strict=True):
        logits_TV = theirs(input_ids=torch.from_numpy(tokens_T).long()[None]).logits[0]
        logp_TV = torch.log_softmax(logits_TV.float(), -1)[:-1]
        expected.append(logp_TV.gather(-1, torch.from_numpy(tokens_T).long()[1:, None])[:, 0][mask_T[1:]])
    with torch.no_grad():
        ours_N = logprobs(model, sequences)
    torch.testing.assert_close(ours_N, torch.cat(expected).detach(), atol=1e-4, rtol=0)
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in Merged(named_tensors(model), 2.0).items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=0)


def test_a_step_of_the_adapter_is_pefts_step(tiny_model: MakeModel, sequences: Callable[..., Any]) -> None:
    peft = pytest.importorskip("peft")
    model, other = adapted(tiny_model()), tiny_model()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(other, config)
    pairs = {
        name: theirs.get_parameter(f"base_model.model.{name}.default.weight")
        for name, _ in model.named_parameters()
        if is_adapters(name)
    }
    with torch.no_grad():
        for name, parameter in pairs.items():
            parameter.copy_(model.get_parameter(name))
    assert {name for name, one in model.named_parameters() if one.requires_grad} == set(pairs)
    assert sum(one.requires_grad for one in theirs.parameters()) == len(pairs), "peft trains the same tensors"
    for one in (model, theirs):
        optimizer = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.01)
        (-logprobs(other if one is theirs else one, sequences).mean()).backward()
        optimizer.step()
    for name, parameter in pairs.items():
        torch.testing.assert_close(model.get_parameter(name).data, parameter.data, atol=1e-6, rtol=0)


def test_a_new_adapter_changes_nothing_and_is_a_function_of_its_seed(
    tiny_model: MakeModel, sequences: Callable[..., Any]
) -> None:
    with torch.no_grad():
        base_N, new_N = logprobs(tiny_model(), sequences), logprobs(adapted(tiny_model(), is_trained=False), sequences)
    torch.testing.assert_close(new_N, base_N, atol=0, rtol=0)
    first, second = (named_tensors(adapted(tiny_model(), is_trained=False)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = tiny_model()
    add_adapter(other, AdapterSettings(rank=4, alpha=8.0), seed=4)
    assert not torch.equal(named_tensors(other)[A_OF_UP], first[A_OF_UP])


A_OF_UP = "model.layers.0.mlp.up_proj.lora_A"


def first_weights(model: PreTrainedModel, **settings: Any) -> dict[str, torch.Tensor]:
    """A of every target before training."""
    tensors = named_tensors(adapted(model, is_trained=False, **settings))
    return {name: tensor for name, tensor in tensors.items() if name.endswith("lora_A")}


def test_a_begins_uniform_within_one_over_the_root_of_the_inputs_and_every_target_differs(
    tiny_model: MakeModel,
) -> None:
    found = first_weights(tiny_model(), rank=16)
    for name, first_RI in found.items():
        bound = first_RI.shape[1] ** -0.5
        assert -bound <= float(first_RI.min()) < -0.95 * bound, name
        assert 0.95 * bound < float(first_RI.max()) <= bound, name
    other_layer = found[A_OF_UP.replace("layers.0", "layers.1")]
    assert not torch.equal(other_layer, found[A_OF_UP])


def test_a_may_begin_normal_with_deviation_one_over_the_rank(tiny_model: MakeModel) -> None:
    values = torch.cat([first_RI.flatten() for first_RI in first_weights(tiny_model(), init="gaussian").values()])
    assert float(values.std()) == pytest.approx(1 / 4, rel=0.05)
    assert abs(float(values.mean())) < 0.02
    assert float(values.abs().max()) > 0.5, "no uniform one has this deviation and such values"


def test_merged_weights_compute_what_the_adapter_does_and_the_base_is_behind_it(
    tiny_model: MakeModel, sequences: Callable[..., Any]
) -> None:
    model, plain = adapted(tiny_model()), tiny_model()
    with torch.no_grad():
        adapted_N, base_N = logprobs(model, sequences), logprobs(plain, sequences)
        with adapter_off(model):
            torch.testing.assert_close(logprobs(model, sequences), base_N, atol=0, rtol=0)
        torch.testing.assert_close(logprobs(model, sequences), adapted_N, atol=0, rtol=0)
        plain.load_state_dict(dict(Merged(named_tensors(model), 2.0)))
        torch.testing.assert_close(logprobs(plain, sequences), adapted_N, atol=1e-4, rtol=0)
    assert float((adapted_N - base_N).abs().max()) > 0.05


def test_merged_weights_are_saved_as_a_model_that_loads(tmp_path: Path, tiny_model: MakeModel) -> None:
    model = adapted(tiny_model(tie_word_embeddings=True))
    merged = Merged(named_tensors(model), 2.0)
    write_model(model, tmp_path, dtype="float32", weights=merged)
    loaded = type(model).from_pretrained(str(tmp_path), dtype=torch.float32)
    saved = named_tensors(loaded)
    assert saved.keys() == set(merged)
    assert all(torch.equal(saved[name], tensor) for name, tensor in merged.items())


def test_targets_are_linear_modules_by_their_names_or_ends_of_names(tiny_model: MakeModel) -> None:
    def targets(*names: str) -> set[str]:
        model = adapted(tiny_model(), targets=names)
        return {name for name, module in model.named_modules() if isinstance(module, LoraLinear)}

    assert len(targets("all-linear")) == 2 * 7
    assert "lm_head" not in targets("all-linear")
    assert targets("q_proj", "layers.1.mlp.up_proj") == {
        "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("q_porj", "did you mean q_proj?"),
        ("embed_tokens", "the linear modules of the model are down_proj"),
        ("lm_head", "lm_head is the head"),
        ("proj", "no linear module proj"),
    ],
)
def test_a_target_that_is_not_there_is_one_sentence(tiny_model: MakeModel, target: str, words: str) -> None:
    with pytest.raises(UserError) as raised:
        adapted(tiny_model(), targets=("q_proj", target))
    assert words in str(raised.value)
    assert raised.value.where == "trainer.lora.targets"


def test_a_model_without_such_modules_says_that_there_are_none(tiny_model: MakeModel) -> None:
    model = tiny_model()
    for parent in [module for module in model.modules() if not isinstance(module, torch.nn.Linear)]:
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear) and child is not model.get_output_embeddings():
                setattr(parent, name, torch.nn.Identity())
    with pytest.raises(UserError, match="no linear module q_proj -> the linear modules of the model are none"):
        find_targets(model, ["q_proj"], where="here")
    with pytest.raises(UserError, match=r"here: lm_head is the head, .* -> remove this target, or use all-linear"):
        find_targets(model, ["lm_head"], where="here")


def test_a_target_is_a_whole_part_of_a_name_and_targets_are_in_the_models_order(tiny_model: MakeModel) -> None:
    found = find_targets(tiny_model(), ["up_proj", "self_attn.k_proj", "model.layers.0.self_attn.q_proj"], where="here")
    assert list(found) == [
        "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.up_proj",
        "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.up_proj",
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"no linear module attn\.k_proj"):
        find_targets(tiny_model(), ["attn.k_proj"], where="here")


def in_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).to(torch.float32)


@pytest.mark.parametrize("is_on", [True, False])
def test_rounded_computes_with_the_merged_weights_of_a_version_without_gradients(
    tiny_model: MakeModel, sequences: Callable[..., Any], is_on: bool
) -> None:
    model, plain = adapted(tiny_model()), tiny_model()
    before_N = logprobs(model, sequences)
    merged = Merged(named_tensors(model), 2.0) if is_on else named_tensors(plain)
    targets = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    plain.load_state_dict({name: in_bfloat16(one) if name in targets else one for name, one in merged.items()})
    with torch.no_grad():
        expected_N = logprobs(plain, sequences)
    with rounded(model, torch.bfloat16):
        if is_on:
            found_N = logprobs(model, sequences)
        else:
            with adapter_off(model):
                found_N = logprobs(model, sequences)
    assert torch.equal(found_N, expected_N)
    assert not found_N.requires_grad
    assert not torch.equal(found_N, before_N)
    assert torch.equal(logprobs(model, sequences), before_N), "afterwards it computes as before"


def test_rounding_to_float32_is_no_rounding(tiny_model: MakeModel, sequences: Callable[..., Any]) -> None:
    model = adapted(tiny_model())
    with rounded(model, torch.float32):
        found_N = logprobs(model, sequences)
    assert torch.equal(found_N, logprobs(model, sequences))
    assert found_N.requires_grad


def test_the_product_is_not_rounded_before_it_is_added_where_passes_compute_in_bfloat16(tiny_model: MakeModel) -> None:
    model = adapted(tiny_model())
    merged = Merged(named_tensors(model), 2.0)
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            with torch.autocast("cpu", torch.bfloat16):
                weight_OI = module._rounded_weight(torch.bfloat16)
            assert torch.equal(weight_OI, in_bfloat16(merged[f"{name}.weight"]))
            assert not weight_OI.requires_grad


def test_what_is_switched_for_a_while_is_switched_back_after_an_error(tiny_model: MakeModel) -> None:
    model = adapted(tiny_model())
    with pytest.raises(KeyError), adapter_off(model), rounded(model, torch.bfloat16):
        raise KeyError
    for module in model.modules():
        if isinstance(module, LoraLinear):
            assert module.is_adapted
            assert module.rounds_to is None


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_merged_model_is_a_plain_one_again_that_is_trained_whole(
    tiny_model: MakeModel, sequences: Callable[..., Any], family: str
) -> None:
    model, plain = adapted(tiny_model(family), targets=("q_proj", "down_proj")), tiny_model(family)
    expected = dict(Merged(named_tensors(model), 2.0))
    merge_adapter(model)
    assert {type(module) for module in model.modules()} == {type(module) for module in plain.modules()}
    tensors = named_tensors(model)
    assert tensors.keys() == expected.keys() == named_tensors(plain).keys()
    assert all(torch.equal(tensors[name], one) for name, one in expected.items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    plain.load_state_dict(tensors)
    assert torch.equal(logprobs(model, sequences), logprobs(plain, sequences))
    assert not any(hasattr(module, "lora_A") or hasattr(module, "rounds_to") for module in model.modules())


def test_merged_is_base_plus_scale_times_b_a_and_other_tensors_are_the_bases() -> None:
    generator = torch.Generator().manual_seed(2)
    tensors = {
        "q.weight": torch.randn(5, 3, generator=generator), "q.bias": torch.randn(5, generator=generator),
        "q.lora_A": torch.randn(2, 3, generator=generator), "q.lora_B": torch.randn(5, 2, generator=generator),
        "norm.weight": torch.randn(3, generator=generator),
    }  # fmt: skip
    merged = Merged(tensors, 0.5)
    assert len(merged) == 3
    assert list(merged) == ["q.weight", "q.bias", "norm.weight"]
    array = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    expected = array["q.weight"] + 0.5 * (array["q.lora_B"] @ array["q.lora_A"])
    torch.testing.assert_close(merged["q.weight"].double().numpy(), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(merged["q.bias"], tensors["q.bias"])
    assert torch.equal(merged["norm.weight"], tensors["norm.weight"])
    assert list(adapter_tensors(tensors)) == ["q.lora_A", "q.lora_B"]
