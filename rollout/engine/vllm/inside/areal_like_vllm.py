"""The part of the engine that runs inside vLLM's processes. Its folder is in their PYTHONPATH; no other code of
areal_like is imported there, and this file is not imported elsewhere.

vLLM loads each part by an option of its own:

    --weight-transfer-config   FolderEngine: loads the weights of a folder, or refuses them before any is replaced
    --worker-extension-cls     WorkerExtension: random streams keyed by (seed, position), and our log-probs
    --middleware               RequireKey: every route requires the key, also those that vLLM leaves open
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KEY_VARIABLE = "AREAL_LIKE_VLLM_KEY"
BACKEND = "areal_like"


def stream_seed(seed: int, position: int) -> int:
    """Seed of the generator that draws the token at `position` of the whole sequence, prompt included."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class RequireKey:
    """ASGI middleware that answers 401 to every request without the key, on every route."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._wanted = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] in ("http", "websocket"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008})
                    return
                body = b'{"error": "no valid key"}'
                headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": body})
                return
        await self.app(scope, receive, send)


def check_folder(folder: str, expected: dict[str, list[int]]) -> list[str]:
    """The weight files of a folder, if they have exactly the tensors `expected` (shape by name). Raises ValueError:
    vLLM itself loads an empty folder without an error."""
    from safetensors import safe_open

    files = sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".safetensors"))
    found: dict[str, list[int]] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            found |= {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if wrong:
        first = f"{wrong[0]} has shape {found.get(wrong[0])}, expected {expected.get(wrong[0])}"
        raise ValueError(f"{len(wrong)} tensors in {folder} differ from those in the update request: {first}")
    return files


def _tensors_of(files: list[str]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)


def _register() -> None:
    """Register the transfer engine. vLLM is imported here, so that the rest of this file can be tested without it."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class FolderInit(WeightTransferInitInfo):
        pass

    @dataclass
    class FolderUpdate(WeightTransferUpdateInfo):
        folder: str
        tensors: dict[str, list[int]]

    class FolderEngine(WeightTransferEngine[FolderInit, FolderUpdate]):
        """Loads the safetensors files of a folder. A folder is checked before anything is replaced."""

        init_info_cls, update_info_cls = FolderInit, FolderUpdate

        def init_transfer_engine(self, init_info: FolderInit) -> None:
            """There is nothing to connect to."""

        def start_weight_update(self) -> None:
            """Wait for the folder's check: until then the weights in use are not touched."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Load the folder. (vLLM's own method also synchronises an accelerator, which a CPU has not.)"""
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: FolderUpdate) -> None:
            """Check the folder, and load it layer by layer: each layer is packed for its kernels again."""
            files = check_folder(update_info.folder, update_info.tensors)
            initialize_layerwise_reload(self.model)
            loaded = self.model.load_weights(_tensors_of(files))
            if not loaded:
                raise ValueError(f"vLLM's {type(self.model).__name__} loaded no tensors from {update_info.folder}")

        def finish_weight_update(self) -> None:
            """Process the layers that are processed last."""
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """There is nothing to disconnect."""

    WeightTransferEngineFactory.register_engine(BACKEND, FolderEngine)


class WorkerExtension:
    """Methods of every vLLM worker, called by `/collective_rpc`."""

    def arrange_sampling(self) -> dict[str, bool]:
        """Draw the token at each position with a generator that is seeded by the request's seed and that position, and
        report log-probs as areal_like defines them. Returns whether this model runner's sampler can be arranged so.

        vLLM seeds a generator when a request starts, so a continued answer would begin the stream again; and its
        log-probs are either without the temperature, or of the distribution that top-k and top-p have cut.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        sampler = getattr(getattr(runner, "sampler", None), "topk_topp_sampler", None)
        if sampler is None or not hasattr(getattr(runner, "input_batch", None), "generators"):
            return {"is_arranged": False}
        key_generators(runner)
        report_before_cut(sampler)
        return {"is_arranged": True}


def key_generators(runner: Any) -> None:
    """Seed the generator of each row again before each token, by the row's number of tokens so far."""
    generator_class = _keyed_generator()
    draw = runner.sampler.forward

    def keyed_forward(*arguments: Any, **named: Any) -> Any:
        batch = runner.input_batch
        for index, generator in list(batch.generators.items()):
            request = runner.requests[batch.req_ids[index]]
            if not isinstance(generator, generator_class):
                generator = generator_class(device=generator.device)
                batch.generators[index] = request.generator = generator
            generator.manual_seed(stream_seed(request.sampling_params.seed, request.num_tokens))
        return draw(*arguments, **named)

    runner.sampler.forward = keyed_forward


def report_before_cut(sampler: Any) -> None:
    """Make the log-probs those of log_softmax(logits / temperature), before top-k and top-p."""
    draw = sampler.forward

    def forward(logits: Any, generators: Any, k: Any, p: Any) -> Any:
        if k is None and p is None:
            return draw(logits, generators, k, p)
        logprobs = logits.float().log_softmax(-1)  # before `draw`, which may change the logits in place
        return draw(logits, generators, k, p)[0], logprobs

    sampler.forward = forward


def _keyed_generator() -> type:
    import torch

    class KeyedGenerator(torch.Generator):
        """vLLM moves a generator back after a token that it discards, which a CPU's cannot. There is no need to: each
        position has its own seed."""

        def get_offset(self) -> int:
            return 4

        def set_offset(self, offset: int) -> torch.Generator:
            return self

    return KeyedGenerator


if os.environ.get(KEY_VARIABLE):  # in a server, not in a test without vLLM
    _register()
