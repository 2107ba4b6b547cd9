"""What files say of declared models before a run starts: missing folders, other tokenizers, too few tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from made_adapter import UP, adapter_in
from valid_config import make

from areal_like.errors import UserError
from controller.config.run_config import RunConfig
from controller.preflight.called_models import check_tokenizers, problems_of, silent_endpoints, vocabulary_of

VOCAB = {"<eos>": 0, "a": 1, "b": 2}


def folder(place: Path, *, vocab: Any = None, vocab_size: int = 3, positions: int = 64) -> Path:
    """A model as far as files say."""
    place.mkdir()
    config = {"model_type": "qwen3", "vocab_size": vocab_size, "max_position_embeddings": positions}
    (place / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (place / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    (place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": VOCAB if vocab is None else vocab}}))
    return place


def config(policy: Path, *models: dict[str, Any], max_context: int = 32) -> RunConfig:
    rollout = {"workflow": "my:Own", "models": models, "engine": {"max_context": max_context}}
    return make(model__path=str(policy), model__init=None, model__tokenizer="from_model", rollout=rollout)


def said(made: RunConfig) -> list[str]:
    return [
        str(problem) for problem in problems_of(made, json.loads(Path(str(made.model.path), "config.json").read_text()))
    ]


def test_a_model_with_the_policys_tokenizer_is_fine_also_where_its_vocabulary_is_padded(tmp_path: Path) -> None:
    policy, judge = folder(tmp_path / "policy"), folder(tmp_path / "judge", vocab_size=8)
    assert said(config(policy, {"name": "judge", "path": str(judge)}, {"name": "start", "source": "start"})) == []


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            {"vocab": {**VOCAB, "b": 3, "c": 2}, "vocab_size": 4},
            "differs from the policy's at token 2 ('b')",
        ),
        ({"vocab": [["<eos>", 0.0], ["a", -1.0]]}, "differs from the policy's at token 2 ('b')"),
        ({"vocab_size": 2}, "has a vocabulary of 2 tokens, but the policy's tokenizer has a token with the id 2"),
    ],
)
def test_a_model_with_another_tokenizer_or_vocabulary_is_refused(
    tmp_path: Path, made: dict[str, Any], words: str
) -> None:
    policy, judge = folder(tmp_path / "policy"), folder(tmp_path / "judge", **made)
    (problem,) = said(config(policy, {"name": "judge", "path": str(judge)}))
    assert problem.startswith("rollout.models.0.path: ")
    assert words in problem


def with_weights(place: Path, shape: list[int]) -> Path:
    """Give a model one linear module, by its header."""
    end = math.prod(shape)
    header = json.dumps({f"{UP}.weight": {"dtype": "U8", "shape": shape, "data_offsets": [0, end]}}).encode()
    (place / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * end)
    return place


def test_adapters_must_exist_be_of_a_supported_kind_and_fit_their_base(tmp_path: Path) -> None:
    policy, judge = with_weights(folder(tmp_path / "policy"), [6, 4]), with_weights(folder(tmp_path / "judge"), [6, 5])
    plain = {"name": "plain", "adapter": str(adapter_in(tmp_path / "plain"))}
    dora = {"name": "dora", "source": "start", "adapter": str(adapter_in(tmp_path / "dora", use_dora=True))}
    wrong = {"name": "wrong", "path": str(judge), "adapter": plain["adapter"]}
    other = adapter_in(tmp_path / "other", modules={UP.replace("up", "gap"): (4, 6)})
    assert said(config(policy, plain)) == []
    found = said(
        config(
            policy, plain, dora, wrong, {**plain, "name": "none", "adapter": "none"}, {**plain, "adapter": str(other)}
        )
    )
    assert found == [
        f"rollout.models.1.adapter: {tmp_path / 'dora' / 'adapter_config.json'}: use_dora is true, which is not"
        " supported -> merge the adapter into its base model with peft, and use the merged model",
        f"rollout.models.2.adapter: {tmp_path / 'plain'}: the adapter was trained on a base model in which {UP} has "
        "6 x 4 weights, but here it has 6 x 5 -> use the model that the adapter was trained on",
        "rollout.models.3.adapter: none: no such folder -> specify the folder of an adapter in peft's format",
        f"rollout.models.4.adapter: {other}: the base model has no linear module model.layers.0.mlp.gap_proj -> the "
        f"most similar module is {UP}",
    ]


def test_the_modules_of_a_model_that_is_made_are_known(tmp_path: Path) -> None:
    def of(modules: dict[str, tuple[int, int]], name: str) -> list[str]:
        models = [{"name": "sql", "adapter": str(adapter_in(tmp_path / name, modules=modules)), "max_context": 32}]
        return [str(problem) for problem in problems_of(make(rollout={"workflow": "my:Own", "models": models}), None)]

    assert of({UP: (4, 6)}, "good") == []
    (problem,) = of({"model.layers.99.mlp.up_proj": (4, 6)}, "bad")
    assert problem.startswith("rollout.models.0.adapter: ")
    assert "the base model has no linear module model.layers.99.mlp.up_proj" in problem


def test_a_teacher_needs_the_policys_tokenizer_and_context(tmp_path: Path) -> None:
    policy = folder(tmp_path / "policy")

    def with_teacher(name: str, **made: Any) -> list[str]:
        trainer = {"teacher": {"path": str(folder(tmp_path / name, **made))}, "advantage": {"kind": "distillation"}}
        keys = {"model__path": str(policy), "model__init": None, "model__tokenizer": "from_model"}
        return said(make(**keys, trainer=trainer, rollout={"engine": {"max_context": 32}}))

    assert with_teacher("same") == []
    (problem,) = with_teacher("other", vocab={**VOCAB, "b": 3, "c": 2}, vocab_size=4)
    assert problem.startswith("trainer.teacher.path: ")
    assert "differs from the policy's at" in problem
    (problem,) = with_teacher("short", positions=16)
    assert problem.startswith("rollout.engine.max_context")
    assert "teacher: " in problem


def test_a_folder_that_is_missing_or_on_the_hub_is_refused(tmp_path: Path) -> None:
    policy = folder(tmp_path / "policy")
    (tmp_path / "judge").mkdir()
    for path, words in (
        (tmp_path / "judgee", f"no such folder -> did you mean {tmp_path / 'judge'}?"),
        (tmp_path / "judge", "the folder is empty"),
        ("some/where", "some/where is not on this machine -> download the model, and specify its folder"),
    ):
        found = said(config(policy, {"name": "judge", "path": str(path)}))
        assert any(one.startswith("rollout.models.0.path: ") and words in one for one in found), (path, found)


def test_a_context_beyond_a_models_positions_is_refused_under_its_own_key(tmp_path: Path) -> None:
    policy, judge = folder(tmp_path / "policy"), folder(tmp_path / "judge", positions=20)
    (problem,) = said(config(policy, {"name": "judge", "path": str(judge)}))
    assert problem.startswith("rollout.models.0.max_context: ")
    assert said(config(policy, {"name": "judge", "path": str(judge), "max_context": 20})) == []


def test_a_tokenizer_made_in_code_is_compared_once_the_model_is_prepared(tmp_path: Path) -> None:
    prepared, judge = folder(tmp_path / "prepared"), folder(tmp_path / "judge", vocab={"<eos>": 0, "x": 1})
    models = [{"name": "judge", "path": str(judge), "max_context": 32}]
    given = make(rollout={"workflow": "my:Own", "models": models})
    assert list(problems_of(given, None)) == []
    with pytest.raises(UserError, match="differs from the policy's at token 1") as caught:
        check_tokenizers(given, prepared)
    assert caught.value.where == "rollout.models.0.path"


def test_a_vocabulary_has_added_tokens_and_is_unknown_without_a_file(tmp_path: Path) -> None:
    place = folder(tmp_path / "model")
    added = [{"id": 3, "content": "<|im_end|>"}]
    (place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": VOCAB}, "added_tokens": added}))
    assert vocabulary_of(place) == {**VOCAB, "<|im_end|>": 3}
    (place / "tokenizer.json").write_text("[")
    assert vocabulary_of(place) is vocabulary_of(None) is vocabulary_of(tmp_path) is None


def external(**fields: Any) -> dict[str, Any]:
    return {"name": "helper", "endpoint": {"base_url": "http://127.0.0.1:9/v1", "model": "m", **fields}}


def test_an_external_model_needs_its_key_and_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    policy = folder(tmp_path / "policy")
    assert said(config(policy, external())) == []
    (problem,) = said(config(policy, external(key_env="NO_SUCH_KEY")))
    assert problem.startswith("rollout.models.0.endpoint.key_env: environment variable NO_SUCH_KEY contains no key")
    (problem,) = said(config(policy, external(record="replay", key_env="NO_SUCH_KEY")))
    assert problem.startswith("rollout.models.0.endpoint.records: no file of recorded answers is set")


def test_an_endpoint_at_which_nothing_listens_is_named_unless_its_answers_are_replayed(tmp_path: Path) -> None:
    policy = folder(tmp_path / "policy")
    (problem,) = map(str, silent_endpoints(config(policy, external())))
    assert problem.startswith("rollout.models.0.endpoint.base_url: cannot connect to 127.0.0.1:9")
    assert not list(silent_endpoints(config(policy, external(record="replay", records="x"))))
