"""How fast is the embedded engine compared with transformers and SGLang? The quickstart's model, one thread, the same
slots.

    python -m benchmarks.engine            about 17 minutes with SGLang, 8 without
    python -m benchmarks.engine --quick    about 2 minutes; writes nothing

`equal`: answers of one length. `long tail`: prompts and answer lengths of the quickstart's task (2 + Geometric(.25)
terms, at most 16). An untrained model does not stop where a trained one would, so both sides are made to stop there:
the engine by each request's own max_new_tokens, `generate` by a stopping criterion per row, which has the same effect
as EOS (a finished row is padded until the last one of its batch ends). Only tokens of answers are counted. Requests
come in the task's order; `generate` takes them in batches of as many as the engine has slots; `sorted` first sorts them
by prompt length, which in this task predicts the length of the answer. `generate_batch` is transformers' continuous
batching. Its requests are added one by one so that each ends at its own length. With its defaults it does not terminate
on a CPU, so it batches in one thread and has pages of 32 tokens, the fastest of 32, 128 and 256. SGLang is the real
server behind this project's adapter, if it is installed (`make sglang-cpu`). Both of our engines record log-probs and
versions; transformers does not. Sides alternate; the first round is discarded.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; oversubscribed threads would measure nothing

import numpy as np
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from areal_like.errors import UserError
from areal_like.tasks.running_sum import solve
from areal_like.trajectory import Segment
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import WeightStore
from areal_like.wire.messages import Sampling
from benchmarks.measured import INTEGERS
from benchmarks.publishing import add_replace, result_path
from benchmarks.runs import command_of, write
from benchmarks.spreads import median_spread
from benchmarks.sums import VOCABULARY, encoded, random_tokens, texts
from benchmarks.tables.form import ranged
from rollout.config import EngineSettings
from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.port import Engine, GenerationRequest
from rollout.engine.server.process import ServerSetup
from rollout.engine.sglang.engine import SGLangEngine

EQUAL_PROMPT, EQUAL_ANSWER = 12, 100
PAGE_TOKENS = 32


@dataclass(frozen=True)
class Workload:
    """Prompts and the length of each answer."""

    name: str
    prompts: list[np.ndarray]
    answer_lengths: list[int]

    @property
    def num_tokens(self) -> int:
        """Number of useful tokens: those of answers."""
        return sum(self.answer_lengths)

    def sorted(self) -> Workload:
        """The same workload, sorted by prompt length."""
        order = sorted(range(len(self.prompts)), key=lambda i: len(self.prompts[i]))
        return Workload(
            f"{self.name}, sorted", [self.prompts[i] for i in order], [self.answer_lengths[i] for i in order]
        )


def equal(num_requests: int) -> Workload:
    """Random prompts and answers of one length each."""
    rng = np.random.default_rng(0)
    size = (num_requests, EQUAL_PROMPT)
    return Workload("equal", list(random_tokens(rng, size)), [EQUAL_ANSWER] * num_requests)


def long_tail(num_requests: int) -> Workload:
    """Prompts of the quickstart's task and the lengths of their correct answers, end of sequence included."""
    asked = texts(num_requests)
    return Workload("long tail", [encoded(text) for text in asked], [len(solve(text)) + 1 for text in asked])


class _EndAt(StoppingCriteria):
    """Ends each row at its own length."""

    def __init__(self, prompt_length: int, answer_lengths: list[int]) -> None:
        self._ends = torch.tensor(answer_lengths) + prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return self._ends <= input_ids.shape[1]


@torch.inference_mode()
def run_transformers(model: Any, workload: Workload, num_slots: int) -> float:
    """Wall seconds of `generate`, batch after batch."""
    start_s = time.perf_counter()
    for start in range(0, len(workload.prompts), num_slots):
        prompts = workload.prompts[start : start + num_slots]
        lengths = workload.answer_lengths[start : start + num_slots]
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left, as generate requires
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        is_equal = len(set(lengths)) == 1
        criteria = StoppingCriteriaList([] if is_equal else [_EndAt(width, lengths)])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=max(lengths), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            pad_token_id=0, stopping_criteria=criteria,
        )  # fmt: skip
        assert out.shape[1] == width + max(lengths)
    return time.perf_counter() - start_s


@torch.inference_mode()
def run_continuous(model: Any, workload: Workload, num_slots: int) -> float:
    """Wall seconds of transformers' continuous batching, without its start-up and shutdown."""
    sampling = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(workload.answer_lengths),
        eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    longest = max(map(len, workload.prompts)) + max(workload.answer_lengths)
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=num_slots, page_size=PAGE_TOKENS, num_blocks=num_slots * -(-longest // PAGE_TOKENS),
        max_batch_tokens=num_slots * PAGE_TOKENS, use_cuda_graph=False, use_async_batching=False,
    )  # fmt: skip
    made = model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=batching, timeout=5, warmup=False
    )
    with made as manager:
        start_s = time.perf_counter()
        due = {
            manager.add_request(prompt.tolist(), max_new_tokens=length): length
            for prompt, length in zip(workload.prompts, workload.answer_lengths, strict=True)
        }
        while due:
            done = manager.get_result(timeout=1)
            if done is None:
                assert manager.is_running(), f"transformers' continuous batching ended with {len(due)} answers due"
            elif done.is_finished():
                assert len(done.generated_tokens) == due.pop(done.request_id), done.error
        return time.perf_counter() - start_s


async def run_engine(engine: Engine, workload: Workload) -> float:
    """Wall seconds of the engine; all requests are submitted at once."""
    start_s = time.perf_counter()
    outcomes = await asyncio.gather(*(
        engine.generate(GenerationRequest(
            request_id=i, prompt_P=prompt, prefix=Segment.empty(), sampling=Sampling(max_new_tokens=length), seed=i,
        ))
        for i, (prompt, length) in enumerate(zip(workload.prompts, workload.answer_lengths, strict=True))
    ))  # fmt: skip
    wall_s = time.perf_counter() - start_s
    assert [len(outcome.segment) for outcome in outcomes] == workload.answer_lengths
    return wall_s


def publish(model: Any, root: Path) -> Path:
    """Publish the model's weights as version 0."""
    tensors = {}
    for name, parameter in model.named_parameters():
        data = memoryview(parameter.detach().numpy().reshape(-1).view(np.uint8))
        tensors[name] = TensorBytes("float32", tuple(parameter.shape), data)
    return WeightStore(root, "disk", keep=2).publish(0, "l0", tensors)


async def compare(
    model: Any, model_dir: Path, manifest: Path, workloads: list[Workload], num_slots: int, repeats: int,
    max_context: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure all sides in turn, `repeats` times after one warm-up, workload by workload."""
    engines = await started(model_dir, manifest, num_slots, max_context)
    try:
        return [await _compare(model, engines, workload, num_slots, repeats) for workload in workloads]
    finally:
        for engine in engines.values():
            await engine.close()


async def started(model_dir: Path, manifest: Path, num_slots: int, max_context: int) -> dict[str, Engine]:
    """Start the embedded engine, and SGLang if it is installed."""
    num_threads = torch.get_num_threads()
    shape = {"num_slots": num_slots, "max_context": max_context}
    engines: dict[str, Engine] = {
        "embedded": EmbeddedEngine(
            model_dir, EngineSettings(device="cpu", **shape), dtype="float32", num_threads=num_threads
        ),
        "SGLang": SGLangEngine(
            model_dir, EngineSettings(device="cpu", kind="sglang", **shape), dtype="float32", num_threads=num_threads,
            interruption="recompute", setup=ServerSetup("engine", model_dir.parent / "sglang.log", 1),
        ),
    }  # fmt: skip
    for name, engine in list(engines.items()):
        try:
            await engine.start()
        except UserError as error:
            if name == "embedded":
                raise
            print(f"without {name}: {error}", flush=True)
            del engines[name]
        else:
            await engine.load_version(manifest, "recompute")
    return engines


async def _compare(
    model: Any, engines: dict[str, Engine], workload: Workload, num_slots: int, repeats: int
) -> dict[str, Any]:
    sides: dict[str, Callable[[], Awaitable[float]]] = {
        name: partial(run_engine, engine, workload) for name, engine in engines.items()
    }
    sides["generate"] = partial(asyncio.to_thread, run_transformers, model, workload, num_slots)
    if len(set(workload.answer_lengths)) > 1:
        sides["generate, sorted"] = partial(asyncio.to_thread, run_transformers, model, workload.sorted(), num_slots)
    sides["generate_batch"] = partial(asyncio.to_thread, run_continuous, model, workload, num_slots)
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            speed = workload.num_tokens / await side()
            if repeat:
                speeds[name].append(speed)
    print(f"measured: {workload.name}, {num_slots} slots", flush=True)
    ours = speeds["embedded"]
    ratios = {name: [mine / other for mine, other in zip(ours, speeds[name], strict=True)] for name in speeds}
    return {
        "workload": workload.name, "slots": num_slots, "requests": len(workload.prompts), "tokens": workload.num_tokens,
        "longest_answer": max(workload.answer_lengths),
        "tokens_per_s": {name: median_spread(values) for name, values in speeds.items()},
        "ratio": {name: median_spread(values) for name, values in ratios.items() if name != "embedded"},
    }  # fmt: skip


def print_table(cases: list[dict[str, Any]]) -> None:
    """Print one line per case and other side; ranges are from the lowest to the highest repetition."""
    print(f"{'workload':<10} {'slots':>5}  {'embedded tokens/s':<28} {'against':<18}{'tokens/s':<28} ratio")
    for case in cases:
        speeds = case["tokens_per_s"]
        for name, ratio in case["ratio"].items():
            ours, theirs = ranged(speeds["embedded"], 0), ranged(speeds[name], 0)
            print(f"{case['workload']:<10} {case['slots']:>5}  {ours:<28} {name:<18}{theirs:<28} {ranged(ratio, 2)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="its model.init is used (default: the quickstart)")
    parser.add_argument("--slots", type=INTEGERS, default="16,128", help="slot counts, comma-separated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    add_replace(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    init = dict(yaml.safe_load(Path(options.config or "configs/quickstart.yaml").read_text())["model"]["init"])
    init = {"vocab_size": VOCABULARY, **init}
    config = AutoConfig.for_model(init.pop("model_type"), **init)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    repeats, waves = (2, 3) if options.quick else (7, 12)
    cases = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder / "model")
        manifest = publish(model, folder / "weights")
        for num_slots in options.slots:
            workloads = [equal(num_slots), long_tail(waves * num_slots)]
            cases += asyncio.run(
                compare(
                    model, folder / "model", manifest, workloads, num_slots, repeats, config.max_position_embeddings
                )
            )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"\n{num_parameters / 1e6:.2f}M parameters, fp32, {options.threads} thread(s), {repeats} repetitions")
    print_table(cases)
    result = {"parameters": num_parameters, "threads": options.threads, "repetitions": repeats, "cases": cases}
    if not options.quick:
        print(f"written to {write('engine', command_of('engine'), result, result_path('engine', options))}")


if __name__ == "__main__":
    main()
