"""Claims about the settings of the rollout engine, and about an environment of SGLang's that is not as it should be."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from controller.config.loading import build
from controller.config.run_config import RunConfig
from controller.config.validation.run import cross_check
from controller.preflight import preflight
from trainer.config import CorrectionSettings


def make(engine: dict[str, Any], **rollout: Any) -> RunConfig:
    qwen = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    return RunConfig.model_validate(
        {
            "model": {"init": qwen, "tokenizer": "bytes"},
            "data": {"train": {"generator": "running_sum", "limit": 50}},
            "eval": {"every_steps": 0},
            "rollout": {"engine": engine, **rollout},
        }
    )


def said(config: RunConfig) -> str:
    return "; ".join(map(str, cross_check(config)))


def environment(root: Path, version: str) -> Path:
    """An interpreter that says which SGLang it has, and knows one argument of its launcher."""
    python = root / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/bin/sh
if [ -n "$3" ]; then
    echo '{{"enable-metrics": {{"takes_value": false, "takes_many": false, "choices": []}}}}' > "$3"
else
    echo '{{"sglang": "{version}", "torch": "2.13.0"}}'
fi
"""
    )
    python.chmod(0o755)
    return python


def test_settings_of_an_engine_that_is_not_used_are_a_mistake() -> None:
    assert "rollout.engine.kind: sglang" in said(make({"sglang": {"tp_size": 2}}))
    assert said(make({"kind": "sglang", "sglang": {"tp_size": 2}})) == ""


def emulated(*, emulation: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    given = make({"kind": "embedded"}).model_dump(mode="json", exclude_unset=True)
    return RunConfig.model_validate({**given, **sections, "emulation": emulation or {}})


def test_settings_of_emulated_devices_alone_are_valid() -> None:
    assert said(emulated()) == ""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (emulated(trainer={"loss": {"kl_coef": 0.1}}), "emulated devices cannot run a reference model"),
        (emulated(trainer={"ranks": 2}), "a single process emulates all GPUs of the trainer"),
        (
            emulated(sampling={"forced_lengths": "length"}),
            "forced answer lengths have no effect on emulated devices",
        ),
        (emulated(rollout={"engine": {"kind": "sglang"}}), "the engine sglang cannot be emulated"),
        (emulated(emulation={"gpu": "h9000"}), "emulation.gpu"),
        (emulated(emulation={"model": "1.7z"}), "emulation.model"),
    ],
)
def test_what_cannot_be_emulated_is_refused_by_its_key(config: RunConfig, words: str) -> None:
    assert words in said(config)


def test_a_gpu_or_model_that_is_not_known_is_refused_with_those_that_are() -> None:
    for changes in ({"gpu": "h9000"}, {"model": "1.7z"}):
        (problem,) = cross_check(emulated(emulation=changes))
        assert problem.remedy


def test_every_worker_needs_its_own_server_to_attach_to() -> None:
    one = {"kind": "sglang", "sglang": {"attach": ["http://127.0.0.1:30000"]}}
    assert said(make(one)) == ""
    assert "lists 1 server for 2 workers" in said(make(one, num_workers=2))
    assert "`30000` is not a valid URL" in said(make({"kind": "sglang", "sglang": {"attach": ["30000"]}}))


@pytest.mark.parametrize(
    ("tp_size", "trainer", "devices"),
    [
        (1, "cuda:0", "cuda:1 cuda:2"),
        (2, "cuda:0", "cuda:1 cuda:3"),
        (2, "cuda:3", "cuda:0 cuda:4"),
        (2, "cpu", "cuda:0 cuda:2"),
    ],
)
def test_workers_with_several_gpus_each_leave_out_the_trainers(tp_size: int, trainer: str, devices: str) -> None:
    config = make({"kind": "sglang", "device": "cuda", "sglang": {"tp_size": tp_size}}, num_workers=2)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"device": trainer})})
    assert " ".join(config.rollout_devices) == devices


@pytest.mark.processes
def test_validate_says_what_is_wrong_with_the_environment(tmp_path: Path) -> None:
    def absent(**engine: Any) -> str:
        found = preflight.look(make({"kind": "sglang", **engine}), "validate")
        assert found.problems == []
        return "; ".join(map(str, found.absent))

    assert "no Python interpreter" in absent(python=str(tmp_path / "nothing"))
    assert absent(python=str(environment(tmp_path / "good", "0.5.23"))) == ""
    other = absent(python=str(environment(tmp_path / "other", "0.5.9")))
    assert "rollout.engine.python: SGLang 0.5.9 is installed" in other
    assert "0.5.23 is required" in other


@pytest.mark.processes
def test_an_argument_that_version_does_not_know_is_a_problem_before_the_launch(tmp_path: Path) -> None:
    python = str(environment(tmp_path / "good", "0.5.23"))
    given = {"kind": "sglang", "python": python, "sglang": {"arguments": {"enable-metric": True}}}
    (problem,) = preflight.look(make(given), "validate").problems
    assert "no argument `enable-metric`" in str(problem)
    assert "did you mean enable-metrics?" in str(problem)


CUDA = {"kind": "sglang", "device": "cuda", "dtype": "bfloat16"}
NEEDS_CUDA: list[dict[str, Any]] = [
    {"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"deterministic": True}, {"release_idle_s": 5},
]  # fmt: skip


@pytest.mark.parametrize("option", NEEDS_CUDA, ids=lambda option: next(iter(option)))
def test_options_of_gpus_are_accepted_for_cuda_and_refused_for_cpus_in_one_sentence(option: dict[str, Any]) -> None:
    assert said(make({**CUDA, "sglang": option})) == ""
    (problem,) = cross_check(make({**CUDA, "device": "cpu", "sglang": option}))
    assert f"rollout.engine.sglang.{next(iter(option))}" in str(problem)
    assert "needs CUDA" in str(problem)


def changed(config: RunConfig, **loss: Any) -> RunConfig:
    new = config.trainer.loss.model_copy(update=loss)
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"loss": new})})


def test_a_rounded_engine_needs_bfloat16_a_known_model_and_the_correction_weight() -> None:
    fp8 = {**CUDA, "sglang": {"quantization": "fp8"}}
    assert "can only quantise bfloat16 weights, but the engine's dtype is float32" in said(
        make({**fp8, "dtype": "float32"})
    )
    config = make(fp8)
    llama = config.model_copy(
        update={"model": config.model.model_copy(update={"init": {**(config.model.init or {}), "model_type": "llama"}})}
    )
    assert "cannot load new versions into a quantised model of type llama" in said(llama)
    carries = "does not correct for the rounding differences"
    assert carries in said(changed(config, proximal="behaviour"))
    off = config.trainer.loss.weight.model_copy(update={"mode": "off"})
    assert carries in said(changed(config, weight=off))
    assert carries in said(changed(make({**CUDA, "sglang": {"kv_cache_dtype": "fp8_e5m2"}}), weight=off))
    assert carries not in said(changed(make(CUDA), weight=off))
    own_ratio = {"kind": "dppo", "proximal": "behaviour", "weight": off}
    assert carries not in said(changed(config, **own_ratio)), "its ratio counts from the policy that sampled"
    of_sequences = (CorrectionSettings(kind="sequence_weight"),)
    assert carries not in said(changed(config, weight=off, corrections=of_sequences))
    assert carries in said(changed(config, weight=off, corrections=(CorrectionSettings(kind="icepop"),)))


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (["model.layers.0", "down_proj"], ""),
        (["q_proj", "k_proj", "v_proj"], ""),
        (["model.layers.1.self_attn.q_proj"], "add model.layers.1.self_attn.k_proj, model.layers.1.self_attn.v_proj"),
        (["gate_proj"], "SGLang fuses gate_proj, up_proj into one layer"),
        (["a,b"], "cannot be a part of a module's name"),
    ],
)
def test_layers_left_unquantised_are_whole_ones(layers: list[str], words: str) -> None:
    problems = said(make({**CUDA, "sglang": {"quantization": "fp8", "unquantized_layers": layers}}))
    assert (words in problems) if words else problems == ""


def test_exceptions_from_nothing_and_experts_of_a_dense_model_are_mistakes() -> None:
    assert "nothing is quantised" in said(make({**CUDA, "sglang": {"unquantized_layers": ["down_proj"]}}))
    assert "model type qwen3 has no experts" in said(make({**CUDA, "sglang": {"routed_experts": True}}))


def test_checksums_are_for_one_process_on_a_cpu() -> None:
    assert said(make({"kind": "sglang", "sglang": {"checksums": True}})) == ""
    assert "can only be computed on a GPU" in said(make({**CUDA, "sglang": {"checksums": True}}))
    assert "not for shards" in said(make({"kind": "sglang", "sglang": {"checksums": True, "tp_size": 2}}))


def test_what_says_how_a_server_is_launched_is_nothing_for_one_that_runs() -> None:
    attach = ["http://127.0.0.1:30000"]
    assert "the servers in attach are already running" in said(
        make({"kind": "sglang", "sglang": {"attach": attach, "port": 30000}})
    )
    assert "the servers in attach are already running" in said(
        make({"kind": "sglang", "sglang": {"attach": attach, "checksums": True}})
    )


@pytest.mark.processes
def test_a_port_that_is_taken_is_said_before_the_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        python = str(environment(tmp_path / "good", "0.5.23"))
        config = make({"kind": "sglang", "python": python, "sglang": {"port": port - 1}}, num_workers=2)
        (problem,) = preflight.look(config, "validate").absent
    assert f"cannot listen on 127.0.0.1:{port} (" in str(problem)
    assert "rollout.engine.sglang.port" in str(problem)


def test_an_engine_that_does_not_exist_is_one_problem_with_the_nearest_name_and_the_others_follow() -> None:
    data = make({"kind": "embedded"}).model_dump(mode="json", exclude_unset=True)
    data["rollout"]["engine"] = {"kind": "sglnag", "sglang": {"tp_size": 2}}
    _, problems = build({**data, "group_size": 1})
    assert [problem.keys[0] for problem in problems] == ["rollout.engine.kind", "group_size"]
    assert str(problems[0]) == "rollout.engine.kind: no engine `sglnag` -> did you mean sglang?"


def test_options_are_for_engines_without_a_section() -> None:
    assert "the embedded engine has no options, but these are set: speed" in said(make({"options": {"speed": 2}}))
