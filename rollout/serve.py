"""`python -m rollout.serve SPEC`: serves a policy at an address, for `areal-like serve`.

Requests are handled in agent/endpoint.py, HTTP in agent/listener.py. The controller prepares the model before.

SPEC is a `ServeSpec` (areal_like/serve_files.py), in the folder that it names, which is removed at the end. The first
signal (Ctrl-C, SIGTERM) lets running answers finish, for at most GRACE_S; a second one cancels them.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from areal_like import quick_exit
from areal_like.config import TraceSettings
from areal_like.errors import EngineError, UserError, first_line
from areal_like.process import FAILED, ORDERLY, report_end
from areal_like.safety import SafetyFilter, SafetyStage
from areal_like.serve_files import ServeSpec
from areal_like.trace import Tracer
from areal_like.wire.messages import Sampling
from rollout.agent.endpoint import Endpoint
from rollout.agent.listener import application, bound_socket, runner_of
from rollout.answers import chat_of
from rollout.config import EngineSettings
from rollout.engine.embedded import EmbeddedEngine
from rollout.tokens import PromptTokens, load_tokenizer, stop_ids

GRACE_S = 10.0
ENDING = (signal.SIGINT, signal.SIGTERM)
WRONG_KEY = (
    "the API key is not valid for this server; use the key that the server printed when it started, or the key in its "
    "AREAL_LIKE_API_KEY"
)
Say = Callable[[str], None]


async def serve(order: ServeSpec, say: Say, stop: asyncio.Event, cut: asyncio.Event) -> None:
    """Answer until `stop`.

    Args:
        order: the policy to serve, and the address. say: called with the address and the key, once requests are
            answered. stop: set to refuse further requests. cut: set to cancel running answers as well.

    Raises:
        UserError: the address is not available, or the model cannot be served.
        EngineError: the engine has failed. Clients have received status 500.
    """
    listener = _listener(order.host, order.port)  # before the model is loaded, which takes longer
    try:
        model_dir = Path(order.model_dir)
        tokens = _tokens(order, model_dir)
        chat, no_tools = chat_of(tokens, name=order.format, where="--format")
        if order.format is not None and no_tools:
            raise UserError(no_tools)
        engine = _engine(order, model_dir)
        try:
            await engine.start()
            await engine.load_version(Path(order.manifest), "recompute")
            tokens.limit_context(engine.capabilities.max_context)
            sampling = Sampling(temperature=order.temperature, max_new_tokens=order.max_new_tokens)
            endpoint = Endpoint(
                engine, tokens, chat, sampling=sampling, key=order.key, no_tools=no_tools, models=_models(order),
                safety=_safety(order),
            )  # fmt: skip
            await _answer(order, endpoint, listener, say, stop, cut)
        finally:
            await engine.close()
    finally:
        listener.close()


async def _answer(
    order: ServeSpec, endpoint: Endpoint, listener: socket.socket, say: Say, stop: asyncio.Event, cut: asyncio.Event
) -> None:
    runner = runner_of(application(endpoint, models=_models(order), wrong_key=WRONG_KEY))
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        host = f"[{order.host}]" if ":" in order.host else order.host
        say(f"serving {', '.join(_models(order))} at http://{host}:{listener.getsockname()[1]}")
        if not order.key:
            say(f"key: {endpoint.secret}")
        await _first_of(stop, endpoint.broken)
        endpoint.is_closing = True
        if endpoint.engine_error is not None:
            raise endpoint.engine_error
        if number := endpoint.num_running:
            noun = "answer" if number == 1 else "answers"
            say(f"waiting at most {GRACE_S:g} s for {number} running {noun} (interrupt again to exit immediately)")
            await _first_of(endpoint.idle, cut, timeout_s=GRACE_S)
    finally:
        await runner.cleanup()


async def _first_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait for one of them."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for one in waits:
        one.cancel()


def _listener(host: str, port: int) -> socket.socket:
    """A bound socket. Raises UserError."""
    return bound_socket(
        host, port, host_key="--host", port_key="--port", remedy="choose a different port, or 0 for any free port"
    )


def _tokens(order: ServeSpec, model_dir: Path) -> PromptTokens:
    tokenizer = load_tokenizer(model_dir, "from_model")
    return PromptTokens(
        tokenizer, template=None, add_bos="auto", max_context=order.max_context,
        stop_ids=stop_ids(model_dir, tokenizer),
    )  # fmt: skip


def _safety(order: ServeSpec) -> SafetyFilter | None:
    stages = [SafetyStage.model_validate(one) for one in order.safety]
    return SafetyFilter(stages, "--safety") if stages else None


def _models(order: ServeSpec) -> list[str]:
    return [order.name, *order.adapters]


def _engine(order: ServeSpec, model_dir: Path) -> EmbeddedEngine:
    """An engine with one set of weights, which is never replaced."""
    settings = EngineSettings(
        num_slots=order.num_slots, max_context=order.max_context, device=order.device, session_cache_mb=0
    )
    return EmbeddedEngine(
        model_dir, settings, dtype=order.dtype, num_threads=order.num_threads, has_spare=False,
        tracer=Tracer.of(Path(order.folder), "serve", TraceSettings()),
        adapters={name: Path(folder) for name, folder in order.adapters.items()},
    )  # fmt: skip


async def _until_signalled(order: ServeSpec) -> None:
    stop, cut, is_up = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (cut if stop.is_set() else stop).set()
        if not is_up.is_set():  # the model is still being loaded
            serving.cancel()

    def say(words: str) -> None:
        is_up.set()
        print(words, flush=True)

    loop = asyncio.get_running_loop()
    serving = loop.create_task(serve(order, say, stop, cut))
    for number in ENDING:
        loop.add_signal_handler(number, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # they were blocked by the command that became this process
    try:
        await serving
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


def main(path: Path) -> int:
    """Run the process and return its exit status."""
    order = msgspec.json.decode(path.read_bytes(), type=ServeSpec)
    path.unlink()  # it contains the key
    try:
        asyncio.run(_until_signalled(order))
    except EngineError as error:  # its thread has written the traceback
        print(f"error: {first_line(error)}; restart the server", file=sys.stderr, flush=True)
        return FAILED
    except Exception as error:  # the fault boundary of the process
        return report_end(error)
    finally:
        shutil.rmtree(order.folder, ignore_errors=True)
    return ORDERLY


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    quick_exit.run(lambda: sys.exit(main(Path(sys.argv[1]))))
