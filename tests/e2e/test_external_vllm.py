"""A plain vLLM server, started as a user starts it, as a teacher and as a called model: log-probs of given tokens are
those of transformers, and sampled tokens come back as numbers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.transport.ports import unused_port
from rollout.model_settings import CalledModelSettings
from rollout.models.external import ExternalModel
from trainer.model.tokenizers import build_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

KEY = "sk-of-this-test"
FORKED = Path(__file__).parent / "forked_server"
"""In PYTHONPATH: a server starts in less processor time."""
START_S = 1500.0
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, str]]:
    """A tiny model, its tokenizer, and the address of a server of it."""
    root = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    tokenizer = build_tokenizer("characters:guess_number", None)
    config = AutoConfig.for_model("qwen3", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **SIZES)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(6.0)
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    port = unused_port()
    words = [
        "serve", str(root / "model"), "--served-model-name", "big", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "4", "--enforce-eager", "--block-size", "32",
        "--kv-cache-memory-bytes", str(64 << 20), "--generation-config", "vllm", "--api-key", KEY,
    ]  # fmt: skip
    variables = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    environment = os.environ | variables | {"PYTHONPATH": str(FORKED)}
    log = root / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            [vllm_python, "-m", "vllm.entrypoints.cli.main", *words], env=environment, cwd=root, stdout=file,
            stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", log)
        yield model, tokenizer, f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)


def _wait(server: Any, url: str, log: Path) -> None:
    give_up_s = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < give_up_s, log.read_text()[-3000:]
            time.sleep(0.5)


def external(address: str, file: Path, **fields: Any) -> ExternalModel:
    endpoint = {"base_url": address, "model": "big", "api": "tokens", "key_env": "VLLM_TEST_KEY", "records": str(file)}
    settings = {"name": "teacher", "endpoint": {**endpoint, "total_timeout_s": 300.0, **fields}}
    return ExternalModel(CalledModelSettings.model_validate(settings))


def test_log_probs_of_given_tokens_are_those_of_transformers(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, address = served
    monkeypatch.setenv("VLLM_TEST_KEY", KEY)
    tokens = np.random.default_rng(0).integers(3, len(tokenizer), 60)

    async def ask() -> tuple[list[float], dict[str, float]]:
        teacher = external(address, tmp_path / "a.jsonl", max_tokens_total=10_000)
        await teacher.start(tokenizer, is_teacher=True)
        found = await teacher.logprobs(tokens.tolist(), 20)
        await teacher.client.close()
        return found, teacher.counters()

    found, counters = asyncio.run(ask())
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0, :-1].float()
    said = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(tokens[1:, None]))[:, 0].numpy()
    assert len(found) == 40
    assert np.abs(np.asarray(found) - said[19:]).max() < 1e-4
    assert counters["tokens_in"] > 60


def test_sampled_tokens_come_back_as_numbers_with_their_log_probs(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, address = served
    monkeypatch.setenv("VLLM_TEST_KEY", KEY)
    from areal_like.external.chat import sampled_tokens, token_choice

    async def ask() -> Any:
        called = external(address, tmp_path / "a.jsonl")
        body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0.0, "logprobs": 1, "seed": 3}
        body |= {"return_token_ids": True, "skip_special_tokens": False, "stop_token_ids": []}
        found = await called.client.ask(body, lambda reply: sampled_tokens(token_choice(reply, "here"), "here"))
        await called.client.close()
        return found

    ids, logprobs = asyncio.run(ask())
    known = torch.tensor([5, 6, 7, *ids])
    with torch.inference_mode():
        said = torch.log_softmax(model(known[None], use_cache=False).logits[0].float(), -1)
    assert 1 <= len(ids) <= 12
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        assert token == int(said[2 + place].argmax())
        assert logprob == pytest.approx(float(said[2 + place, token]), abs=1e-4)
