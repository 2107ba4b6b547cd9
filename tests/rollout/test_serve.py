"""A policy on an address: the whole command with a real model, and what the process does with signals and mistakes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from areal_like.errors import EngineError, UserError
from areal_like.external.chat import CHAT, chat_choice
from areal_like.external.client import ModelClient
from areal_like.external.errors import ExternalStop
from areal_like.external.settings import ModelEndpointOptions
from areal_like.serve_files import ServeSpec
from rollout import serve as module
from rollout.serve import serve

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "3+8="}], "temperature": 0, "max_tokens": 6}


def order(folder: Path, **fields: Any) -> ServeSpec:
    default: dict[str, Any] = {
        "folder": str(folder), "model_dir": str(folder / "model"), "manifest": str(folder / "manifest.json"),
        "name": "m", "host": "127.0.0.1", "port": 0, "key": "k", "format": None, "temperature": 1.0,
        "max_new_tokens": 0, "max_context": 64, "num_slots": 1, "device": "cpu", "dtype": "float32", "num_threads": 1,
    }  # fmt: skip
    return ServeSpec(**{**default, **fields})


# ---------------------------------------------------------------- without a model


@pytest.mark.parametrize(("host", "said"), [("a" * 70, "cannot be resolved"), ("192.0.2.1", "cannot listen on")])
def test_an_address_that_cannot_be_had_is_a_user_error(host: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        asyncio.run(serve(order(tmp_path, host=host), print, asyncio.Event(), asyncio.Event()))


def test_a_port_that_another_server_has_is_a_user_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} on 127.0.0.1 is in use"):
            asyncio.run(serve(order(tmp_path, port=port), print, asyncio.Event(), asyncio.Event()))


def test_the_order_and_its_folder_are_gone_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    (path := folder / "order.json").write_bytes(msgspec.json.encode(order(folder)))
    seen: list[bool] = []

    async def refuse(*_: Any) -> None:
        seen.append(path.exists())
        raise UserError("cannot be loaded")

    monkeypatch.setattr(module, "serve", refuse)
    assert module.main(path) == 2
    assert (seen, folder.exists()) == ([False], False), "the order holds the key"


class Listening:
    """What an endpoint needs while answers are under way."""

    def __init__(self) -> None:
        self.is_closing, self.num_running, self.idle, self.secret = False, 1, asyncio.Event(), "k"
        self.broken, self.engine_error = asyncio.Event(), None


@pytest.mark.parametrize("how", ["idle", "cut", "late"])
def test_answers_under_way_end_or_are_cut(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.01 if how == "late" else 60.0)
    endpoint: Any = Listening()
    said: list[str] = []

    async def play() -> None:
        stop, cut = asyncio.Event(), asyncio.Event()
        with contextlib.closing(module._listener("127.0.0.1", 0)) as listener:
            answering = module._answer(order(tmp_path), endpoint, listener, said.append, stop, cut)
            task = asyncio.create_task(answering)
            stop.set()
            while not endpoint.is_closing:  # noqa: ASYNC110 - what is waited for sets no event
                await asyncio.sleep(0.001)
            if how != "late":
                assert not (await asyncio.wait({task}, timeout=0.05))[0], "an answer is under way"
                (endpoint.idle if how == "idle" else cut).set()
            await task

    monkeypatch.setattr(module, "application", lambda *_, **__: module.web.Application())
    asyncio.run(play())
    assert said[0].startswith("serving m at http://127.0.0.1:")
    assert said[1].startswith("waiting at most "), said
    assert "for 1 running answer " in said[1]


def test_a_server_whose_engine_fails_ends_with_status_1_and_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint: Any = Listening()
    monkeypatch.setattr(module, "application", lambda *_, **__: module.web.Application())

    async def play(given: ServeSpec, say: Any, stop: asyncio.Event, cut: asyncio.Event) -> None:
        endpoint.engine_error = EngineError("the engine thread died: RuntimeError: no memory")
        endpoint.broken.set()
        with contextlib.closing(module._listener("127.0.0.1", 0)) as listener:
            await module._answer(given, endpoint, listener, say, stop, cut)

    monkeypatch.setattr(module, "serve", play)
    (folder := tmp_path / "served").mkdir()
    (path := folder / "order.json").write_bytes(msgspec.json.encode(order(folder)))
    assert module.main(path) == 1
    said = capsys.readouterr().err
    assert said == "error: the engine thread died: RuntimeError: no memory; restart the server\n"
    assert endpoint.is_closing
    assert not folder.exists()


# ---------------------------------------------------------------- the whole command


def make_adapter(base: Path, folder: Path) -> None:
    """An adapter that changes the answers of a model."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, lora_alpha=400, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(folder)


def make_model(folder: Path) -> None:
    from trainer import export
    from trainer.model.model import make_model as made
    from trainer.model.tokenizers import build_tokenizer

    tokenizer = build_tokenizer("chat:tool_sum", None)
    tiny = {
        "model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32, "max_position_embeddings": 64,
    }  # fmt: skip
    folder.mkdir()
    export.write_model(made(tiny, tokenizer, seed=1), folder, dtype="float32")
    tokenizer.save_pretrained(str(folder))
    export.write_generation_config(folder, eos_token_id=tokenizer.eos_token_id, tokenizer=tokenizer)


@pytest.mark.e2e
def test_a_model_is_served_until_a_signal_and_nothing_is_left(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    make_adapter(tmp_path / "tiny", tmp_path / "sql")
    (scratch := tmp_path / "scratch").mkdir()
    command = [
        sys.executable,
        "-m",
        "controller",
        "serve",
        str(tmp_path / "tiny"),
        "--port",
        "0",
        "--adapter",
        f"sql={tmp_path / 'sql'}",
    ]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    environment.pop("AREAL_LIKE_API_KEY", None)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            names, _, address = server.stdout.readline().removeprefix("serving ").strip().partition(" at ")
            key = server.stdout.readline().removeprefix("key: ").strip()
            (folder,) = scratch.iterdir()
            assert key not in "".join(path.read_text() for path in folder.glob("*.json"))
            answers = asyncio.run(ask(address, key))
            said = asyncio.run(ask_as_external_model(address, key, tmp_path / "answers.jsonl"))
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()
    assert asyncio.run(ask_as_external_model("http://127.0.0.1:9", "", tmp_path / "answers.jsonl")) == said
    assert names == "tiny, sql"
    (first, status), (second, _), (_, stranger), (long, refused), (adapted, _), (_, unknown) = answers
    assert (status, stranger, refused, unknown) == (200, 401, 400, 404)
    assert adapted["choices"] != first["choices"], "the adapter changes the answer"
    assert first["choices"] == second["choices"], "greedy, whatever is asked next to it"
    assert 1 <= first["usage"]["completion_tokens"] <= 6
    assert long["error"]["code"] == "context_length_exceeded"
    assert not list(scratch.iterdir())


async def ask(address: str, key: str) -> list[tuple[Any, int]]:
    async with aiohttp.ClientSession() as client:

        async def post(body: Any, bearer: str) -> tuple[Any, int]:
            headers = {"Authorization": f"Bearer {bearer}"}
            async with client.post(f"{address}/v1/chat/completions", data=json.dumps(body), headers=headers) as found:
                return await found.json(), found.status

        long = {**ASK, "messages": [{"role": "user", "content": "3+" * 100}]}
        adapted, unknown = {**ASK, "model": "sql"}, {**ASK, "model": "other"}
        asked = (ASK, key), (ASK, key), (ASK, "x"), (long, key), (adapted, key), (unknown, key)
        return list(await asyncio.gather(*(post(body, bearer) for body, bearer in asked)))


async def ask_as_external_model(address: str, key: str, file: Path) -> str:
    """The answer to a client of external models; without a key from its records. A wrong key ends a run."""
    key_file = file.with_name("key")
    key_file.write_text(key or "none")

    def client(**options: Any) -> ModelClient:
        fields = {"base_url": f"{address}/v1", "model": "tiny", "records": str(file), **options}
        return ModelClient(ModelEndpointOptions.model_validate(fields), CHAT, "the test")

    def read(reply: Any) -> Any:
        return chat_choice(reply, "here")

    body = {key: ASK[key] for key in ("messages", "temperature", "max_tokens")}
    if not key:
        return (await client(record="replay").ask(body, read)).message.content or ""
    one = client(key_file=str(key_file), max_tokens_total=1000)
    said = (await one.ask(body, read)).message.content or ""
    assert one.counters()["tokens_out"] >= 1, "the server counts tokens"
    key_file.write_text("not-the-key")
    strangers = [client(record="write"), client(key_file=str(key_file), record="write")]
    for stranger in strangers:
        with pytest.raises(ExternalStop, match="rejected the key"):
            await stranger.ask(body, read)
    for made in (one, *strangers):
        await made.close()
    return said


def test_an_order_with_an_unknown_field_is_not_read() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `nope`"):
        msgspec.json.decode(b'{"nope": 1}', type=ServeSpec)
