"""Claims about the options of the vLLM engine, its command line, and its environment."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from rollout.config import EngineSettings, VLLMSettings
from rollout.engine.descriptor import EngineJob, ServingDemand
from rollout.engine.server.environment import Argument
from rollout.engine.vllm.arguments import Launch, extra_words
from rollout.engine.vllm.descriptor import VLLM
from rollout.engine.vllm.environment import ENVIRONMENT

TABLE = {"max-num-batched-tokens": Argument(True, False), "enable-log-requests": Argument(False, False)}
KEY = "rollout.engine.vllm"


def settings(device: str = "cpu", **vllm: Any) -> EngineSettings:
    return EngineSettings(kind="vllm", device=device, num_slots=4, max_context=100, vllm=VLLMSettings(**vllm))


def job(device: str = "cpu", dtype: Any = "float32", **vllm: Any) -> EngineJob:
    return EngineJob(
        settings(device, **vllm), num_workers=2, interruption="recompute", model_dtype=dtype,
        startup_timeout_s=60.0, is_colocated=False,
    )  # fmt: skip


def launch(device: str = "cpu", extra: tuple[str, ...] = (), **vllm: Any) -> Launch:
    return Launch(VENV, settings(device, **vllm), "float32", 100, 1 << 26, 1, extra)


VENV: Any = "/env/bin/python"


@pytest.mark.parametrize(
    ("job", "key"),
    [
        (job(memory_fraction=0.5), "memory_fraction"),
        (job(tp_size=2), "tp_size"),
        (job("cuda", probe=True), "probe"),
        (job(dtype="bfloat16", probe=True), "probe"),
    ],
)
def test_options_that_do_nothing_here_are_refused(job: EngineJob, key: str) -> None:
    (problem,) = VLLM.setting_problems(job)
    assert problem.keys[0] == f"{KEY}.{key}"
    assert problem.remedy


@pytest.mark.parametrize("job", [job(probe=True), job("cuda", memory_fraction=0.5, tp_size=2), job("cuda")])
def test_options_that_fit_are_accepted(job: EngineJob) -> None:
    assert list(VLLM.setting_problems(job)) == []


def test_models_that_vllm_cannot_run_here_are_refused() -> None:
    narrow = {"model_type": "qwen3", "hidden_size": 32, "num_attention_heads": 4}
    (problem,) = VLLM.model_problems(job(), narrow)
    assert "the model has head size 8" in problem.what
    assert list(VLLM.model_problems(job("cuda"), narrow)) == []
    assert list(VLLM.model_problems(job(), narrow | {"head_dim": 64})) == []
    (problem,) = VLLM.model_problems(job(), {"model_type": "mixtral", "num_local_experts": 8})
    assert "mixture-of-experts models of type mixtral are not supported with vLLM" in problem.what
    moe = {"model_type": "qwen3_moe", "num_experts": 8, "head_dim": 64}
    assert list(VLLM.model_problems(job(), moe)) == []
    (problem,) = VLLM.model_problems(job(probe=True), moe)
    assert problem.keys[0] == f"{KEY}.probe"


@pytest.mark.parametrize(
    ("tp_size", "heads", "key_heads", "remedy"),
    [
        (2, 32, 8, None), (8, 32, 8, None), (8, 16, 2, None), (16, 32, 8, None), (2, 32, None, None),
        (3, 32, 8, "set tp_size to one of: 1, 2, 4, 8"), (8, 32, 3, "set tp_size to one of: 1"),
        (4, 14, 2, "set tp_size to one of: 1, 2"),
    ],
)  # fmt: skip
def test_heads_must_be_divisible_among_the_gpus(tp_size: int, heads: int, key_heads: Any, remedy: str | None) -> None:
    model = {"model_type": "qwen3", "num_attention_heads": heads, "head_dim": 128, "num_key_value_heads": key_heads}
    found = list(VLLM.model_problems(job("cuda", tp_size=tp_size), model))
    assert [problem.remedy for problem in found] == ([] if remedy is None else [remedy])
    assert list(VLLM.model_problems(job("cuda"), model)) == []


def test_the_size_of_tensor_parallelism_is_passed_to_the_server_with_as_many_gpus() -> None:
    command = launch("cuda:2", tp_size=2).command(Path("/model"), 0, port=1, seed=0)
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    assert launch("cuda:2", tp_size=2).variables(Path("/tmp"), "k")["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_what_it_cannot_do_is_refused_by_its_descriptor() -> None:
    (group,) = VLLM.group_problems(job(), None)
    (shared,) = VLLM.colocation_problems(job())
    assert (group.what, shared.what) == (
        "vLLM cannot join a process group",
        "placement: colocated requires an engine that can release its memory, but vLLM cannot",
    )


def test_ports_and_devices_follow_the_settings() -> None:
    assert VLLM.server_ports(job(port=8000)) == (f"{KEY}.port", [8000, 8001])
    assert VLLM.devices_per_worker(settings(tp_size=4)) == 4
    assert VLLM.settings_for_devices(2) == {f"{KEY}.tp_size": "2"}


def test_memory_on_a_gpu_is_the_fraction_and_on_a_cpu_every_slot() -> None:
    demand = ServingDemand(weights_bytes=1000.0, cache_token_bytes=2.0, device_bytes=10_000.0)
    on_gpu = VLLM.memory(job("cuda", memory_fraction=0.5), demand)
    assert on_gpu.parts == {"weights": 1000.0, "KV cache": 4000.0, "activations, graphs": 5000.0}
    assert VLLM.memory(job(), demand).parts == {"weights": 1000.0, "KV cache": 2.0 * 4 * 100}
    first, config = next(VLLM.memory_settings(job("cuda")))
    assert (first, config.vllm.tp_size) == (f"{KEY}.tp_size: 2", 2)


def test_the_command_line_names_versions_and_what_our_file_registers(tmp_path: Any) -> None:
    words = launch().command(tmp_path, -1, port=8000, seed=2**40 + 5)
    pairs = dict(itertools.pairwise(words))
    assert words[:5] == [VENV, "-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path)]
    assert (pairs["--load-format"], pairs["--seed"], pairs["--host"]) == ("dummy", "5", "127.0.0.1")
    assert (pairs["--max-model-len"], pairs["--max-num-seqs"]) == ("100", "4")
    assert (pairs["--middleware"], pairs["--weight-transfer-config"]) == (
        "areal_like_vllm.RequireKey",
        '{"backend": "areal_like"}',
    )
    assert {"--enforce-eager", "--kv-cache-memory-bytes"} <= set(words)
    later = launch("cuda:2", memory_fraction=0.5).command(tmp_path, 7, port=8000, seed=1)
    assert dict(itertools.pairwise(later))["--load-format"] == "auto"
    assert "--gpu-memory-utilization" in later
    assert not {"--enforce-eager", "--kv-cache-memory-bytes"} & set(later)


def test_a_users_argument_takes_the_place_of_ours(tmp_path: Any) -> None:
    words = launch(extra=("--block-size", "64")).command(tmp_path, 0, port=1, seed=1)
    assert words.count("--block-size") == 1
    assert words[words.index("--block-size") + 1] == "64"


def test_the_environment_has_the_key_our_file_and_the_users_path(tmp_path: Any) -> None:
    variables = launch(environment={"PYTHONPATH": "/mine", "X": "1"}).variables(tmp_path, "secret")
    first, second = variables["PYTHONPATH"].split(":")
    assert first.endswith("rollout/engine/vllm/inside")
    assert (second, variables["X"], variables["AREAL_LIKE_VLLM_KEY"]) == ("/mine", "1", "secret")
    assert variables["TMPDIR"] == str(tmp_path)


@pytest.mark.parametrize(
    ("visible", "wanted"), [(None, "2,3"), ("4,5,6,7", "6,7"), ("GPU-a, GPU-b, GPU-c, GPU-d", "GPU-c,GPU-d")]
)
def test_a_servers_gpus_are_counted_among_those_that_its_worker_sees(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, wanted: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launch("cuda:2", tp_size=2).variables(tmp_path, "secret")["CUDA_VISIBLE_DEVICES"] == wanted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": "half"}, "`dtype` is reserved for areal_like, or is not supported"),
        ({"enable-lora": True}, "`enable-lora` is reserved for areal_like, or is not supported"),
        ({"max-num-batched-token": 3}, "vLLM 0.32.0 has no argument `max-num-batched-token` -> did you mean"),
        ({"enable_log_requests": 3}, "`enable_log_requests` does not accept a value"),
    ],
)
def test_arguments_that_this_version_lacks_or_we_set_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        extra_words(settings(arguments=given), TABLE)


def test_arguments_become_words() -> None:
    given = {"max_num_batched_tokens": 4096, "enable-log-requests": True}
    assert extra_words(settings(arguments=given), TABLE) == [
        "--max-num-batched-tokens", "4096", "--enable-log-requests"
    ]  # fmt: skip


@pytest.mark.processes
def test_the_environment_is_asked_for_its_version_and_arguments(fake_vllm: Any) -> None:
    assert ENVIRONMENT.check_version(fake_vllm.python)["vllm"] == "0.32.0+cpu"
    assert ENVIRONMENT.argument_table(fake_vllm.python, is_cpu=True)["max-num-batched-tokens"].takes_value
    with pytest.raises(UserError, match=r"vLLM 0\.31\.0 is installed .* 0\.32\.0 is required"):
        ENVIRONMENT.check_version(fake_vllm.environment("0.31.0"))
    with pytest.raises(UserError, match=r"no Python interpreter .*make vllm-cpu"):
        ENVIRONMENT.find_python(str(fake_vllm.root / "nothing"))
