"""Claims about the file that runs inside vLLM, without vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout.engine.vllm import arguments


def load_inside() -> Any:
    spec = importlib.util.spec_from_file_location("areal_like_vllm", arguments.INSIDE / f"{arguments.MODULE}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


inside = load_inside()


def test_both_sides_use_the_same_names() -> None:
    assert (inside.BACKEND, inside.KEY_VARIABLE) == (arguments.BACKEND, arguments.KEY_VARIABLE)


def test_a_folder_must_have_exactly_the_announced_tensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 tensors .* a has shape None, expected"):
        inside.check_folder(str(tmp_path), {"a": [2, 3]})
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    assert inside.check_folder(str(tmp_path), {"a": [2, 3]}) == [str(tmp_path / "model.safetensors")]
    with pytest.raises(ValueError, match=r"a has shape \[2, 3\], expected \[3, 2\]"):
        inside.check_folder(str(tmp_path), {"a": [3, 2]})
    with pytest.raises(ValueError, match=r"a has shape \[2, 3\], expected None"):
        inside.check_folder(str(tmp_path), {})


def test_every_route_wants_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(inside.KEY_VARIABLE, "secret")
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def ask(path: str, *headers: tuple[bytes, bytes]) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": path, "headers": list(headers)}
        await inside.RequireKey(app)(scope, None, send)
        return sent

    for headers in ((), ((b"authorization", b"Bearer other"),)):
        (start, _) = asyncio.run(ask("/pause", *headers))
        assert start["status"] == 401
    assert passed == []
    assert asyncio.run(ask("/pause", (b"authorization", b"Bearer secret"))) == []
    assert passed == ["/pause"]


def runner_of(num_tokens: list[int]) -> Any:
    """A model runner whose sampler draws one number for each row."""
    batch = SimpleNamespace(
        generators={row: torch.Generator() for row in range(len(num_tokens))},
        req_ids=[str(row) for row in range(len(num_tokens))],
    )
    requests = {
        str(row): SimpleNamespace(num_tokens=count, sampling_params=SimpleNamespace(seed=7), generator=None)
        for row, count in enumerate(num_tokens)
    }

    def forward() -> list[float]:
        return [float(torch.rand(1, generator=batch.generators[row])) for row in sorted(batch.generators)]

    sampler = SimpleNamespace(forward=forward, topk_topp_sampler=SimpleNamespace(forward=None))
    return SimpleNamespace(input_batch=batch, requests=requests, sampler=sampler)


def test_a_tokens_random_number_depends_on_seed_and_position_alone() -> None:
    runner = runner_of([5, 6, 5])
    inside.key_generators(runner)
    first = runner.sampler.forward()
    assert first[0] == first[2] != first[1]
    for request in runner.requests.values():
        request.num_tokens += 1
    second = runner.sampler.forward()
    assert second[0] == first[1]
    generator = runner.requests["0"].generator
    assert generator is runner.input_batch.generators[0]
    generator.set_offset(generator.get_offset() - 4)  # what vLLM does after a token that it discards


def test_log_probs_are_those_before_top_k_and_top_p() -> None:
    def cutting(logits: torch.Tensor, generators: Any, k: Any, p: Any) -> Any:
        logits.fill_(0.0)
        return "token", "cut"

    sampler = SimpleNamespace(forward=cutting)
    inside.report_before_cut(sampler)
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    token, logprobs = sampler.forward(logits.clone(), {}, torch.tensor([1]), None)
    assert token == "token"
    assert torch.equal(logprobs, logits.log_softmax(-1))
    assert sampler.forward(logits, {}, None, None) == ("token", "cut")


def test_a_runner_without_these_parts_is_said_so() -> None:
    worker = inside.WorkerExtension()
    worker.model_runner = SimpleNamespace()
    assert worker.arrange_sampling() == {"is_arranged": False}
    worker.model_runner = runner_of([1])
    assert worker.arrange_sampling() == {"is_arranged": True}
