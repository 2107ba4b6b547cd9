"""How good is the memory estimate of `areal-like validate`? Predicted and measured peaks of training steps on a CPU.

    python -m benchmarks.memory             every case, about 5 minutes on two cores, under 2 GB of memory
    python -m benchmarks.memory --quick     the first case; writes nothing

Each case is a tiny model made from a config, trained for two steps as in the trainer (its own backend, batches and
loss; several micro-batches, so that all gradients exist). The first step creates AdamW's state. In the second step of
one process torch's profiler records every allocation and release of torch's CPU allocator, in order; the measured peak
is the memory of weights and AdamW's state before the step plus the largest sum of allocations since. Of several ranks
all live tensor storages are counted instead (storage_accounting.py), because the profiler does not see what threads of
gloo release. Each rank is a separate process with one thread; the largest peak counts. Memory of Python, libraries and
the allocator's own pages is neither in the measurement nor in the estimate.

Parameters of the public models are also counted and compared with transformers' own models on torch's meta device, and
the layouts that `areal-like validate` proposes for some of them are listed (memory_layouts.py).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.memory_layouts import layouts
from benchmarks.rank_processes import results_of_ranks
from benchmarks.runs import write
from benchmarks.storage_accounting import LiveStorages

TIMEOUT_S = 900.0
QWEN3 = {"model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
         "num_key_value_heads": 2, "intermediate_size": 384, "vocab_size": 1024,
         "tie_word_embeddings": False}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 32,
         "num_key_value_heads": 2, "intermediate_size": 640, "vocab_size": 2048,
         "tie_word_embeddings": False}  # fmt: skip
QWEN2 = {"model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 1, "intermediate_size": 1024, "vocab_size": 512,
         "tie_word_embeddings": True}  # fmt: skip
LARGE = {**QWEN3, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64,
         "num_key_value_heads": 4}  # fmt: skip
MIXTURE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
           "moe_intermediate_size": 192}  # fmt: skip
CASES: Mapping[str, tuple[dict[str, Any], int, int, dict[str, Any]]] = {
    "qwen3": (QWEN3, 128, 512, {}),
    "qwen3, bfloat16": (QWEN3, 128, 512, {"precision": "bfloat16"}),
    "qwen3, checkpointed": ({**QWEN3, "num_hidden_layers": 8}, 128, 1024, {"gradient_checkpointing": True}),
    "qwen3, large vocabulary": ({**QWEN3, "vocab_size": 32_000}, 128, 512, {"logprob_chunk_tokens": 128}),
    "llama": (LLAMA, 256, 512, {}),
    "qwen2, tied": (QWEN2, 64, 512, {}),
    "qwen3, mostly state": (LARGE, 64, 128, {}),
    "qwen3, FSDP on 2 ranks": (LARGE, 64, 128, {"backend": "fsdp", "ranks": 2}),
    "qwen3, FSDP on 2 ranks, bfloat16": (
        {**QWEN3, "num_hidden_layers": 6}, 128, 512, {"backend": "fsdp", "ranks": 2, "precision": "bfloat16"}),
    "qwen3, FSDP on 4 ranks": (LARGE, 64, 256, {"backend": "fsdp", "ranks": 4}),
    "llama, 2 replicas of 2 FSDP ranks": (LLAMA, 128, 256, {"backend": "fsdp", "ranks": 4, "fsdp": {"replicas": 2}}),
    "llama, sequences split on 2 ranks": (LLAMA, 512, 512, {"backend": "fsdp", "ranks": 2, "sequence_parallel": 2}),
    "qwen3, matrices split on 2 ranks": (LARGE, 64, 256, {"backend": "fsdp", "ranks": 2, "tensor_parallel": 2}),
    "qwen3, matrices split on 2 of 4 FSDP ranks": (
        LARGE, 64, 256, {"backend": "fsdp", "ranks": 4, "tensor_parallel": 2}),
    "mixture of 8 experts": (MIXTURE, 64, 256, {}),
    "mixture of 8 experts, FSDP on 2 ranks": (MIXTURE, 64, 256, {"backend": "fsdp", "ranks": 2}),
    "llama, checkpointed, FSDP on 2 ranks": (
        {**LLAMA, "num_hidden_layers": 6}, 128, 512, {"backend": "fsdp", "ranks": 2, "gradient_checkpointing": True}),
    "llama, bfloat16, matrices split on 2 ranks": (
        LLAMA, 128, 512, {"backend": "fsdp", "ranks": 2, "tensor_parallel": 2, "precision": "bfloat16"}),
}  # fmt: skip
"""Model, tokens of a sequence, tokens of a micro-batch, settings of the trainer."""
PROMPT = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", nargs=3, metavar=("CASE", "RANK", "MEETING"), help="one rank, in its own process")
    options = parser.parse_args()
    if options.case:
        name, rank, meeting = options.case
        print(json.dumps(measure(name, int(rank), meeting)))
        return
    rows = []
    print(f"{'case':34}{'parameters':>12}{'measured MB':>13}{'predicted MB':>14}{'difference':>12}")
    for name in list(CASES)[: 1 if options.quick else None]:
        row = compare(name)
        rows.append(row)
        print(
            f"{name:34}{row['parameters']:12,}{row['measured_bytes'] / 1e6:13.1f}{row['predicted_bytes'] / 1e6:14.1f}"
            f"{row['difference']:+12.1%}",
            flush=True,
        )
    print(f"largest difference: {max(abs(row['difference']) for row in rows):.1%}")
    if not options.quick:
        counts = counted_parameters()
        wrong = [row["model"] for row in counts if row["parameters"] != row["counted"]]
        print(f"parameters of {len(counts)} public models: {'wrong: ' + ', '.join(wrong) if wrong else 'all exact'}")
        fields = {"rows": rows, "models": counts, "layouts": layouts()}
        written = write("memory", "python -m benchmarks.memory", fields)
        print(f"written to {written}")


def counted_parameters() -> list[dict[str, Any]]:
    """Parameters of every public model by its shape and in transformers' model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from areal_like.decoder_shape import PUBLIC_SHAPES

    rows = []
    for name, shape in PUBLIC_SHAPES.items():
        family = "qwen3" if shape.has_qk_norm else "qwen2" if shape.has_qkv_bias else "llama"
        experts = {
            "num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.inner,
        } if shape.experts > 1 else {}  # fmt: skip
        config = AutoConfig.for_model(
            f"{family}_moe" if experts else family, **experts, hidden_size=shape.hidden,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, intermediate_size=shape.inner, vocab_size=shape.vocabulary,
            tie_word_embeddings=shape.is_tied,
        )  # fmt: skip
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        counted = sum(parameter.numel() for parameter in model.parameters())
        rows.append({"model": name, "parameters": shape.parameters, "counted": counted})
    return rows


def compare(name: str) -> dict[str, Any]:
    """Predicted and measured peak of one rank, and their difference as a share of the measured one."""
    from areal_like.decoder_shape import shape_of
    from controller.config.memory.estimate import trainer_memory

    config = config_of(name)
    shape = shape_of(CASES[name][0])
    assert shape is not None
    predicted = max(process.total_bytes for process in trainer_memory(config, shape))
    measured = max(peaks_of(name, config.trainer.ranks))
    return {
        "case": name, "parameters": shape.parameters, "measured_bytes": measured, "predicted_bytes": predicted,
        "difference": predicted / measured - 1,
        "parts": {part: size for one in trainer_memory(config, shape)[-1:] for part, size in one.parts.items()},
    }  # fmt: skip


def config_of(name: str) -> Any:
    """The configuration of a case: four micro-batches per rank in one update."""
    from controller.config.run_config import RunConfig

    model, length, micro_batch, trainer = CASES[name]
    num = 4 * micro_batch // length * trainer.get("ranks", 1)
    return RunConfig.model_validate(
        {
            "model": {"init": model, "tokenizer": "bytes"},
            "data": {"train": {"generator": "running_sum"}},
            "groups_per_step": num // 2,
            "group_size": 2,
            "rollout": {"engine": {"max_context": length}},
            "trainer": {"micro_batch_tokens": micro_batch, **trainer},
        }
    )


def peaks_of(name: str, num_ranks: int) -> list[int]:
    """Measure the peak of every rank, each in its own process. Raises SystemExit with the output of one that fails."""
    return results_of_ranks(
        "benchmarks.memory", lambda rank, meeting: ["--case", name, str(rank), meeting], num_ranks,
        timeout_s=TIMEOUT_S, title=name,
    )  # fmt: skip


def measure(name: str, rank: int, meeting: str) -> int:
    """Measure the peak of the second step in this process, in bytes."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.backends.choice import choose_backend, make_backend, share_sequences
    from trainer.backends.port import Setup
    from trainer.model.attention import choose, register
    from trainer.ranks import Ranks
    from trainer.step import TrainStep, ready_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    register()
    config, device = config_of(name), torch.device("cpu")
    settings = config.trainer
    if settings.ranks > 1:
        store = dist.FileStore(meeting, settings.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.ranks)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CASES[name][0]), dtype=torch.float32).eval()
    ranks, choice = Ranks(rank, settings.ranks, device), choose_backend(settings, 1, device)
    share_sequences(ranks, choice, model)
    setup = Setup(settings, 1.0, 10, choose("sdpa", device), ranks)
    ready_model(model, setup)
    policy = make_backend(choice.descriptor, model, setup)
    step = TrainStep(policy, setup, groups_per_step=config.groups_per_step)
    samples = made_samples(config.samples_per_step, CASES[name][1], CASES[name][0]["vocab_size"])
    step.run(step.prepare(samples, 0))
    prepared = step.prepare(samples, 1)
    before = sum(part.items.numel() * part.items.element_size() for part in policy.parts())
    if settings.ranks == 1:
        return before + allocated_by(lambda: step.run(prepared)).peak_bytes
    storages = LiveStorages()
    storages.install()
    storages.phase("step")
    step.run(prepared)
    dist.barrier()
    dist.destroy_process_group()
    return storages.peaks["step"]


class Allocated(NamedTuple):
    """The largest sum of allocations that were held at once, and the largest single one."""

    peak_bytes: int
    largest_bytes: int


def allocated_by(run: Callable[[], object]) -> Allocated:
    """Call `run`, and account for every allocation and release of torch's CPU allocator in this process meanwhile."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    recorded = profiled.profiler
    assert recorded is not None
    assert recorded.kineto_results is not None
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    held = peak = largest = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events):
        held += change
        peak, largest = max(peak, held), max(largest, change)
    return Allocated(peak, largest)


def made_samples(num: int, length: int, vocabulary: int) -> list[Any]:
    """Samples of random tokens, all of one length; the two of a group have different rewards, so all have gradients."""
    import numpy as np

    from areal_like.trajectory import Segment, Trajectory
    from areal_like.wire.messages import BatchSample

    rng = np.random.default_rng(0)
    samples = []
    for number in range(num):
        answer = Segment(
            rng.integers(3, vocabulary, length - PROMPT).astype(np.int32),
            (-rng.exponential(3.0, length - PROMPT)).astype(np.float32),
            np.zeros(length - PROMPT, np.int32),
        )
        trajectory = Trajectory.from_prompt(rng.integers(3, vocabulary, PROMPT).astype(np.int32), answer, "stop")
        group, place = divmod(number, 2)
        samples.append(BatchSample(group_id=group, sample_index=place, trajectory=trajectory, reward=float(place)))
    return samples


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
