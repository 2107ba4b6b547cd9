"""An adapter inside a model: peft's arithmetic, files that peft reads, targets, the base behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError
from trainer.adapter_files import AdapterFiles, BaseIdentity, load_adapter
from trainer.config import AdapterSettings
from trainer.export import named_tensors, write_model
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import token_logprobs
from trainer.model.lora import LoraLinear, Merged, adapter_off, add_adapter, is_adapters
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
    gaussian = named_tensors(adapted(tiny_model(), is_trained=False, init="gaussian"))
    stds = [float(tensor.std()) for name, tensor in gaussian.items() if name.endswith("lora_A")]
    assert np.mean(stds) == pytest.approx(1 / 4, rel=0.1)


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
        ("embed_tokens", "its linear modules are down_proj"),
        ("lm_head", "lm_head is the head"),
        ("proj", "no linear module proj"),
    ],
)
def test_a_target_that_is_not_there_is_one_sentence(tiny_model: MakeModel, target: str, words: str) -> None:
    with pytest.raises(UserError) as raised:
        adapted(tiny_model(), targets=("q_proj", target))
    assert words in str(raised.value)
    assert raised.value.where == "trainer.lora.targets"


def test_an_adapter_of_another_rank_is_not_loaded(tmp_path: Path, tiny_model: MakeModel) -> None:
    model, settings = adapted(tiny_model(), targets=("q_proj",)), AdapterSettings(rank=4, alpha=8.0)
    AdapterFiles.of(model, settings, BASE).write(tmp_path, named_tensors(model))
    same = adapted(tiny_model(), targets=("q_proj",), is_trained=False)
    load_adapter(tmp_path, same, settings, BASE)
    saved, loaded = named_tensors(model), named_tensors(same)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    with pytest.raises(UserError, match="rank 4, targets q_proj"):
        load_adapter(tmp_path, adapted(tiny_model(), targets=("q_proj",), rank=2), settings, BASE)
    with pytest.raises(UserError, match="belongs to another base"):
        load_adapter(tmp_path, same, settings, BaseIdentity("base", "float32", {"w": 1}))
