"""A stand-in for `python -m sglang.launch_server`: the endpoints and manners of SGLang's control plane, no model.

Outputs and the answers to control calls leave the scheduler through two sockets, as SGLang's do: with
`FAKE_FRONT_LAG_S` outputs wait in the front, which then passes several at once and names the weights in use by then.

Token at output position p of a request is (last input token + 1 + p) % 50, whatever the version; its log-prob is
-(1 + version) / 100. So a token lost, repeated or stamped wrongly shows. `FAKE_*` variables make it misbehave.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path

from aiohttp import web

TICK_S = float(os.environ.get("FAKE_TICK_S", "0.002"))
BUSY_S = 0.05
"""For how long the scheduler keeps the batch of an answer that has ended."""


FRONT_LAG_S = float(os.environ.get("FAKE_FRONT_LAG_S", "0"))
"""The front halts for up to so long, now and then."""


class Front:
    """Passes outputs to the clients in the order they came, those of one request that wait together as one event."""

    def __init__(self, server):
        self.server = server
        self.waiting = {}
        self.wake = asyncio.Event()
        self.random = random.Random(int(os.environ.get("FAKE_FRONT_SEED", "0")))

    def put(self, response, event):
        """An output of the scheduler; the future it returns is done once the output was passed on."""
        sent = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(response, []).append((event, sent))
        self.wake.set()
        return sent

    async def run(self):
        while True:
            await self.wake.wait()
            if FRONT_LAG_S and self.random.random() < 0.2:
                await asyncio.sleep(self.random.uniform(0.0, FRONT_LAG_S))
            self.wake.clear()
            waiting, self.waiting = self.waiting, {}
            for response, outputs in waiting.items():
                await self.pass_on(response, outputs)

    async def pass_on(self, response, outputs):
        events = [event for event, _ in outputs]
        event = events[-1]
        meta = event["meta_info"]
        event["output_ids"] = [token for one in events for token in one["output_ids"]]
        meta["output_token_logprobs"] = [e for one in events for e in one["meta_info"]["output_token_logprobs"]]
        spans = meta.get("weight_versions")
        meta["weight_version"] = spans[-1]["version"] if spans else self.server.version
        try:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        except ConnectionError:
            pass
        for _, sent in outputs:
            if not sent.done():
                sent.set_result(None)


class Server:
    def __init__(self, arguments):
        self.arguments = arguments
        self.front = Front(self)
        self.version = arguments.weight_version
        self.model_path = arguments.model_path
        self.is_paused = False
        self.calls = []
        self.requests = {}
        self.asleep = False
        self.busy_until_s = 0.0
        self.sums = {}

    async def generate(self, request):
        body = await request.json()
        self.calls.append(["generate", body["extra_key"], len(body["input_ids"])])
        assert not self.asleep, "asked to generate without memory"
        if "FAKE_REFUSE_GENERATE" in os.environ:
            return web.json_response({"error": {"message": "no"}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        mine = self.requests[body["rid"]] = {"is_aborted": False}
        try:
            await self.stream(body, mine, response)
        finally:
            self.requests.pop(body["rid"], None)
            self.busy_until_s = time.monotonic() + BUSY_S
        return response

    async def stream(self, body, mine, response):
        ids, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        spans, reported, tokens = [], 0, []
        every, finish = self.arguments.stream_interval, None
        give_up_at = int(os.environ.get("FAKE_ABORT_AT", "0"))
        eos = -1 if body["sampling_params"]["ignore_eos"] else int(os.environ.get("FAKE_EOS", "-1"))
        while finish is None:
            await asyncio.sleep(TICK_S)
            if mine["is_aborted"]:
                finish = {"type": "abort", "message": "Aborted"}
            elif self.is_paused:
                continue
            else:
                tokens.append((ids[-1] + 1 + len(tokens)) % 50)
                if not spans or spans[-1]["version"] != self.version:
                    spans.append({"version": self.version, "start": len(tokens) - 1, "end": 0})
                spans[-1]["end"] = len(tokens)
                if tokens[-1] in (eos, *body["sampling_params"]["stop_token_ids"]):
                    finish = {"type": "stop", "matched": tokens[-1]}
                elif len(tokens) >= limit:
                    finish = {"type": "length", "length": limit}
                elif len(tokens) == give_up_at:
                    finish = {"type": "abort", "message": "out of memory"}
            if finish is None and len(tokens) % every:
                continue
            new = range(reported, len(tokens))
            label = {at: span["version"] for span in spans for at in range(span["start"], span["end"])}
            logprobs = [[-(1 + int(label[at])) / 100, tokens[at], None] for at in new]
            event = {
                "output_ids": tokens[reported:],
                "meta_info": {
                    "id": body["rid"],
                    "finish_reason": finish,
                    "prompt_tokens": len(ids),
                    "cached_tokens": 0,
                    "completion_tokens": len(tokens),
                    **({"weight_versions": spans} if finish else {}),
                    "output_token_logprobs": logprobs,
                },
            }
            reported = len(tokens)
            sent = self.front.put(response, event)
        await sent
        await response.write(b"data: [DONE]\n\n")

    async def abort(self, request):
        body = await request.json()
        self.calls.append(["abort", body.get("rid", "all")])
        for rid, mine in self.requests.items():
            if body.get("abort_all") or rid == body.get("rid"):
                mine["is_aborted"] = True
        return web.Response()

    async def pause(self, request):
        mode = (await request.json())["mode"]
        self.calls.append(["pause", mode])
        if mode == "abort":
            for mine in self.requests.values():
                mine["is_aborted"] = True
            while self.requests:  # noqa: ASYNC110 - as the server does
                await asyncio.sleep(TICK_S)
        self.is_paused = True
        return web.json_response({"status": "ok"})

    async def resume(self, request):
        self.calls.append(["resume"])
        self.is_paused = False
        return web.json_response({"status": "ok"})

    async def load(self, request):
        body = await request.json()
        self.calls.append(["load", body["weight_version"], body["flush_cache"]])
        if body["weight_version"] == os.environ.get("FAKE_REFUSE_VERSION"):
            return web.json_response({"success": False, "message": "does not fit"}, status=400)
        if body["weight_version"] == os.environ.get("FAKE_DIE_LOADING") and not self.marked("died loading"):
            os._exit(9)
        if body["weight_version"] == os.environ.get("FAKE_HANG_LOADING") and (
            "FAKE_HANG_AGAIN" in os.environ or not self.marked("hung loading")
        ):
            await asyncio.sleep(3600)  # the scheduler; the front goes on answering
        assert (Path(body["model_path"]) / "model.safetensors").exists()
        assert not self.asleep, "a version is loaded into memory that was given back"
        self.version, self.model_path = body["weight_version"], body["model_path"]
        self.sums = sums_of(Path(self.model_path) / "model.safetensors")
        return web.json_response({"success": True, "message": "done"})

    async def flush(self, request):
        self.calls.append(["flush"])
        is_busy = bool(self.requests) or time.monotonic() < self.busy_until_s or "FAKE_STAY_BUSY" in os.environ
        return web.Response(
            text="Flush cache failed.\n" if is_busy else "Cache flushed.\n", status=400 if is_busy else 200
        )

    async def release(self, request):
        tags = (await request.json())["tags"]
        self.calls.append(["release", tags])
        assert not self.requests, "memory is given back while somebody generates"
        if time.monotonic() < self.busy_until_s:
            os._exit(1)  # the scheduler's assertion ends it, and with it the server
        if "FAKE_KEEP_MEMORY" in os.environ and not self.marked("kept memory"):
            return web.json_response({"error": "busy"}, status=400)
        assert not self.asleep, "the memory was given back before"
        self.asleep = True
        return web.json_response({})

    async def take_back(self, request):
        self.calls.append(["take back", (await request.json())["tags"]])
        if "FAKE_KEEP_SLEEPING" in os.environ and not self.marked("kept sleeping"):
            return web.json_response({"error": "no memory"}, status=400)
        assert self.asleep, "it has its memory"
        self.asleep = False
        return web.json_response({})

    async def join(self, request):
        body = await request.json()
        self.calls.append(["join", body["group_name"], body["rank_offset"], body["world_size"]])
        return self.maybe("FAKE_REFUSE_JOIN")

    async def leave(self, request):
        self.calls.append(["leave", (await request.json())["group_name"]])
        return self.maybe(None)

    async def begin(self, request):
        self.calls.append(["begin"])
        assert self.is_paused, "weights are changed under running answers"
        return self.maybe(None)

    async def bucket(self, request):
        body = await request.json()
        self.calls.append(["bucket", body["names"], body["shapes"], body.get("weight_version"), body["flush_cache"]])
        if "weight_version" in body:
            self.version = body["weight_version"]
            self.sums = {"weight": sum_of_group()}
        return self.maybe("FAKE_REFUSE_BUCKET")

    async def end(self, request):
        self.calls.append(["end"])
        return self.maybe(None)

    async def running_front(self, _):
        task = asyncio.create_task(self.front.run())
        yield
        task.cancel()

    def maybe(self, fault):
        is_well = fault is None or fault not in os.environ
        return web.json_response({"success": is_well, "message": "as configured"}, status=200 if is_well else 400)

    async def checksums(self, request):
        self.calls.append(["checksums"])
        sums = self.sums
        if os.environ.get("FAKE_WRONG_SUM") == self.version and not self.marked("wrong sum"):
            sums = {name: "0" * 16 for name in sums}
        return web.json_response({"success": True, "ranks": [{"checksums": sums}]})

    def marked(self, what):
        """Whether this was done once already, by this server or one before it."""
        mark = Path(os.environ["FAKE_MARKS"]) / what
        was = mark.exists()
        mark.touch()
        return was

    async def model_info(self, request):
        return web.json_response({"model_path": self.model_path, "weight_version": self.version})

    async def server_info(self, request):
        return web.json_response({
            "version": "0.5.23", "incremental_streaming_output": True, "disable_overlap_schedule": True,
            "context_length": self.arguments.context_length, "calls": self.calls,
            "path": [part for part in sys.path if part], "weight_version": self.version,
        })  # fmt: skip


def sum_of_group():
    """Of the one tensor that is said to have come."""
    return hashlib.sha256(Path(os.environ["FAKE_GROUP_PAYLOAD"]).read_bytes()).digest()[:8].hex()


def sums_of(path):
    """Of each tensor in a safetensors file, as SGLang sums them on a CPU (none is fused here)."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    sums = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            sums[name] = hashlib.sha256(data[start:end]).digest()[:8].hex()
    return sums


def main():
    parser = argparse.ArgumentParser(prog="launch_server.py")
    for name in ("model-path", "weight-version", "host", "dtype", "device", "load-format", "attention-backend"):
        parser.add_argument(f"--{name}")
    for name in ("port", "nccl-port", "tp-size", "context-length", "max-running-requests", "stream-interval",
                 "random-seed", "max-total-tokens"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--mem-fraction-static", type=float)
    for name in ("skip-tokenizer-init", "incremental-streaming-output", "skip-server-warmup",
                 "disable-overlap-schedule", "enable-memory-saver", "sleep-on-idle"):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--config", type=Path)
    arguments = parser.parse_args()
    arguments.key = json.loads(arguments.config.read_text())["admin-api-key"] if arguments.config else None
    words = os.environ.get("FAKE_DIE_AT_START")
    if words:
        sys.exit(words)
    server = Server(arguments)

    @web.middleware
    async def wants_the_key(request, handler):
        if arguments.key and request.headers.get("Authorization") != f"Bearer {arguments.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    app = web.Application(middlewares=[wants_the_key])
    app.cleanup_ctx.append(server.running_front)
    app.add_routes([
        web.post("/generate", server.generate), web.post("/abort_request", server.abort),
        web.post("/pause_generation", server.pause), web.post("/continue_generation", server.resume),
        web.post("/update_weights_from_disk", server.load), web.get("/model_info", server.model_info),
        web.get("/server_info", server.server_info), web.post("/release_memory_occupation", server.release),
        web.post("/resume_memory_occupation", server.take_back), web.post("/weights_checker", server.checksums),
        web.post("/init_weights_update_group", server.join), web.post("/destroy_weights_update_group", server.leave),
        web.post("/begin_weight_update", server.begin), web.post("/end_weight_update", server.end),
        web.post("/update_weights_from_distributed", server.bucket), web.post("/flush_cache", server.flush),
    ])  # fmt: skip
    web.run_app(app, host=arguments.host, port=arguments.port, print=None)


if __name__ == "__main__":
    main()
