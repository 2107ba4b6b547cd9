"""A stand-in for `python -m vllm.entrypoints.cli.main`: the endpoints and manners of vLLM's control plane, no model.

Token at output position p of a request is (last input token + 1 + p) % 50, whatever the version; its log-prob is
-(1 + version) / 100. So a token lost, repeated or stamped wrongly shows. `FAKE_*` variables make it misbehave;
`FAKE_HOLD` says after how many tokens answers of the first server wait, by the version in use.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web

TICK_S = float(os.environ.get("FAKE_TICK_S", "0.002"))
WORDS = (
    "served-model-name", "host", "dtype", "load-format", "generation-config", "logprobs-mode", "middleware",
    "worker-extension-cls", "weight-transfer-config",
)  # fmt: skip
NUMBERS = (
    "port", "seed", "tensor-parallel-size", "max-model-len", "max-num-seqs", "stream-interval", "block-size",
    "kv-cache-memory-bytes",
)  # fmt: skip
FLAGS = (
    "skip-tokenizer-init", "enable-scale-out", "enable-prompt-tokens-details", "no-async-scheduling", "enforce-eager",
    "disable-uvicorn-access-log",
)  # fmt: skip


class Server:
    def __init__(self, arguments):
        self.arguments = arguments
        self.version = "default"
        self.is_paused = self.is_updating = self.is_loaded = False
        self.calls = []
        self.requests = {}
        self.holds = {} if self.marked("started") else json.loads(os.environ.get("FAKE_HOLD", "{}"))

    async def generate(self, request):
        body = await request.json()
        self.calls.append(["generate", body.get("cache_salt"), len(body["token_ids"]), body["sampling_params"]])
        if "prompt_logprobs" in body["sampling_params"]:
            return await self.probe(request, body)
        response = web.StreamResponse()
        await response.prepare(request)
        mine = self.requests[f"generate-tokens-{body['request_id']}"] = {"is_aborted": False}
        try:
            await self.stream(body, mine, response)
        except ConnectionError:
            pass
        finally:
            self.requests.pop(f"generate-tokens-{body['request_id']}", None)
        return response

    async def probe(self, request, body):
        if self.version == os.environ.get("FAKE_BREAK_PROBE") and not self.marked("broke a probe"):
            while self.requests:  # noqa: ASYNC110 - answers end before the weights are verified
                await asyncio.sleep(TICK_S)
            return self.broken_off(request)
        is_wrong = self.version == os.environ.get("FAKE_WRONG_PROBE")
        if not self.is_loaded and "FAKE_WRONG_AT_START" in os.environ and not self.marked("wrong at a start"):
            is_wrong = True
        if self.version == os.environ.get("FAKE_ODD_PROBE"):
            return web.json_response({"choices": [], "prompt_logprobs": [None, None]})
        rows = [None] + [
            {str(one): {"logprob": -0.9 if is_wrong else -0.5, "rank": 1}} for one in body["token_ids"][1:]
        ]
        return web.json_response({"choices": [], "prompt_logprobs": rows})

    def broken_off(self, request):
        """The client sees its connection break; the server goes on."""
        request.transport.abort()
        return web.json_response({})

    async def stream(self, body, mine, response):
        ids, limit, spans, tokens = body["token_ids"], body["sampling_params"]["max_tokens"], [], []
        finish = None
        while finish is None:
            await asyncio.sleep(TICK_S)
            new = []
            if mine["is_aborted"]:
                finish = "abort"
            elif self.is_paused or len(tokens) >= self.holds.get(self.version, 1000):
                continue
            else:
                new = [(ids[-1] + 1 + len(tokens)) % 50]
                tokens += new
                if not spans or spans[-1]["version"] != self.version:
                    spans.append({"version": self.version, "start": len(tokens) - 1, "end": 0})
                spans[-1]["end"] = len(tokens)
                if tokens[-1] in body["sampling_params"]["stop_token_ids"]:
                    finish = "stop"
                elif len(tokens) >= limit:
                    finish = "length"
            content = [{"token_id": one, "logprob": -(1 + int(self.version)) / 100, "rank": 1} for one in new]
            choice = {
                "index": 0, "token_ids": new, "logprobs": {"content": content}, "finish_reason": finish,
                "stop_reason": None, "weight_versions": spans if finish else None,
            }  # fmt: skip
            if len(tokens) == int(os.environ.get("FAKE_ERROR_AT", "-1")):
                error = {"error": {"message": "Internal server error", "type": "x", "code": 500}}
                await response.write(b"data: " + json.dumps(error).encode() + b"\n\n")
                break
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        else:
            usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": 1}}
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")

    async def abort(self, request):
        names = (await request.json()).get("request_ids")
        self.calls.append(["abort", names or "all"])
        for name, mine in self.requests.items():
            if not names or name in names:
                mine["is_aborted"] = True
        return web.json_response({"status": "aborted"})

    async def pause(self, request):
        self.calls.append(["pause", request.query["mode"], request.query["clear_cache"]])
        self.is_paused = True
        return web.json_response({"status": "paused"})

    async def resume(self, request):
        self.calls.append(["resume"])
        self.is_paused = False
        return web.json_response({"status": "resumed"})

    async def start(self, request):
        assert self.is_paused, "weights are changed under running answers"
        if self.is_updating:
            words = "start_weight_update called while a weight update is already active"
            return web.json_response({"error": words}, status=500)
        self.is_updating = True
        return web.json_response({})

    async def update(self, request):
        info = (await request.json())["update_info"]
        self.calls.append(["load", sorted(info["tensors"])])
        version = Path(info["folder"]).name.partition("-")[0]
        if version == os.environ.get("FAKE_REFUSE_VERSION"):
            return web.json_response({"error": "1 tensors differ from those in the update request"}, status=500)
        if version == os.environ.get("FAKE_DIE_LOADING") and not self.marked("died loading"):
            os._exit(9)
        if version == os.environ.get("FAKE_CRASH_LOADING") and not self.marked("crashed loading"):
            asyncio.get_running_loop().call_later(0.1, os._exit, 9)
            return web.json_response({"error": "EngineDeadError"}, status=500)
        if version == os.environ.get("FAKE_HANG_LOADING") and not self.marked("hung loading"):
            await asyncio.sleep(3600)
        if version == os.environ.get("FAKE_BREAK_LOADING") and not self.marked("broke a load"):
            return self.broken_off(request)
        assert self.is_updating
        assert (Path(info["folder"]) / "model.safetensors").exists()
        return web.json_response({})

    async def finish(self, request):
        self.version = (await request.json())["weight_version"]
        self.is_updating, self.is_loaded = False, True
        return web.json_response({})

    async def init(self, request):
        self.calls.append(["init"])
        return web.json_response({})

    async def name(self, request):
        self.version = (await request.json())["new_version"]
        return web.json_response({})

    async def rpc(self, request):
        self.calls.append(["rpc", (await request.json())["method"]])
        return web.json_response({"results": [{"is_arranged": "FAKE_OTHER_RUNNER" not in os.environ}]})

    async def state(self, request):
        path = [part for part in sys.path if part]
        return web.json_response({"version": "0.32.0", "calls": self.calls, "path": path, "words": sys.argv})

    def marked(self, what):
        """Whether this was done once already, by this server or one before it."""
        mark = Path(os.environ["FAKE_MARKS"]) / what
        was = mark.exists()
        mark.touch()
        return was


def main():
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("folder", type=Path)
    for name in WORDS:
        parser.add_argument(f"--{name}")
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    arguments = parser.parse_args()
    if words := os.environ.get("FAKE_DIE_AT_START"):
        sys.exit(words)
    server, key = Server(arguments), os.environ["AREAL_LIKE_VLLM_KEY"]

    @web.middleware
    async def wants_the_key(request, handler):
        if request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "no valid key"}, status=401)
        return await handler(request)

    app = web.Application(middlewares=[wants_the_key])
    app.add_routes([
        web.post("/inference/v1/generate", server.generate), web.post("/abort_requests", server.abort),
        web.post("/pause", server.pause), web.post("/resume", server.resume), web.get("/version", server.state),
        web.post("/init_weight_transfer_engine", server.init), web.post("/update_weight_version", server.name),
        web.post("/start_weight_update", server.start), web.post("/update_weights", server.update),
        web.post("/finish_weight_update", server.finish), web.post("/collective_rpc", server.rpc),
    ])  # fmt: skip
    web.run_app(app, host=arguments.host, port=arguments.port, print=None)


if __name__ == "__main__":
    main()
