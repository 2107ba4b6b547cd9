"""How many bytes does a rank hold when it loads, publishes, saves and exports? Four FSDP2 ranks over gloo on CPUs.

    python -m benchmarks.sharded_memory            a model of 0.3 billion parameters; 10 GB of memory
    python -m benchmarks.sharded_memory --quick    a model of 11 million parameters; writes nothing

Each rank is a process that runs the trainer's own code: load (`--reference`, and with --quick: also a reference policy
of the same size), one step, then publish, save and export. Counted are the bytes of all live tensor storages in every
thread of the process (storage_accounting.py), not resident memory; the step itself is not counted, since its memory
depends on the batch.

`share`: what the rank must hold in a phase by itself: its part of weights, of the reference and of AdamW's state, and
its part of the copy that the phase makes, so that training goes on meanwhile. `over`: the peak above the share, in
buckets (`trainer.bucket_mb`). At most LIMIT is allowed. `check` is the pass over two dozen tokens with which a trainer
compares packed log-probs with the model's own; it gathers layers like every pass and has no limit here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from benchmarks.packing import PROMPT, made_samples
from benchmarks.rank_processes import run_job_of_ranks
from benchmarks.runs import write
from benchmarks.storage_accounting import LiveStorages
from trainer.activity import Activity
from trainer.backends.fsdp import FsdpBackend
from trainer.backends.policy_module import PolicyModule
from trainer.follower import Follower
from trainer.model.tokenizers import build_tokenizer
from trainer.training import Training

RANKS = 4
LIMIT = 1.25
"""Largest peak above the share, in buckets."""
TOKENS = 256
"""Tokens of the step before; publishing does not depend on it, and is compared with it."""
LARGE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 48_000,
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
SMALL: dict[str, Any] = {
    **LARGE, "hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 7, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 8000,
}  # fmt: skip
PHASES = ("load", "publish", "save", "export")
MB = 1e6
LIMIT_S = 1500.0
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bucket-mb", type=float, default=0.0, help="default: 64, or 2 with --quick")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the step")
    parser.add_argument("--reference", action="store_true", help="with a reference policy of the same size")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        run_rank(options.job, options.rank)
        return
    bucket_mb = options.bucket_mb or (2.0 if options.quick else 64.0)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            Path(folder),
            SMALL if options.quick else LARGE,
            bucket_mb=bucket_mb,
            tokens=options.tokens,
            has_reference=options.reference or options.quick,
        )
    show(found)
    if not options.quick:
        print(f"written to {write('sharded_memory', 'python -m benchmarks.sharded_memory', found)}")


def show(found: Row) -> None:
    """Print the table."""
    print(f"{found['parameters']:,} parameters, {RANKS} ranks, buckets of {found['bucket_mb']:g} MB; "
          f"the whole model is {found['model_mb']:,.0f} MB in float32")  # fmt: skip
    print(f"{'phase':10}{'rank':>5}{'share MB':>10}{'peak MB':>10}{'over, buckets':>15}{'seconds':>9}")
    for row in found["rows"]:
        over = "" if row["share_mb"] is None else f"{row['over_buckets']:.2f}"
        share = "" if row["share_mb"] is None else f"{row['share_mb']:.1f}"
        print(f"{row['phase']:10}{row['rank']:5}{share:>10}{row['peak_mb']:10.1f}{over:>15}{row['seconds']:9.2f}")
    print(f"publishing blocks training for {found['publish_stall_s']:.3f} s; a step of {found['step_tokens']:,} tokens "
          f"takes {found['step_s']:.1f} s: {found['publish_stall_share']:.2%}; "
          f"it is written at {found['publish_write_mb_per_s']:.0f} MB/s")  # fmt: skip


def measure(
    folder: Path, model: dict[str, Any], *, bucket_mb: float, tokens: int = TOKENS, has_reference: bool = True
) -> Row:
    """Run the ranks and return what they measured. Raises SystemExit with the log of a rank that fails."""
    num_parameters = prepare(folder / "prepared", model)
    job = folder / "job.json"
    (folder / "run").mkdir()
    job.write_text(json.dumps({"folder": str(folder), "bucket_mb": bucket_mb, "tokens": tokens,
                               "has_reference": has_reference}))  # fmt: skip
    run_job_of_ranks("benchmarks.sharded_memory", job, RANKS, limit_s=LIMIT_S)
    results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    rows = [row for result in results for row in result["rows"]]
    order = {phase: place for place, phase in enumerate(("load", "check", "publish", "save", "export"))}
    rows.sort(key=lambda row: (order[row["phase"]], row["rank"]))
    step_s = max(result["step_s"] for result in results)
    stall_s = max(result["publish_stall_s"] for result in results)
    return {
        "parameters": num_parameters, "ranks": RANKS, "has_reference": has_reference,
        "bucket_mb": bucket_mb, "model_mb": num_parameters * 4 / MB,
        "limit_buckets": LIMIT, "step_tokens": results[0]["step_tokens"], "step_s": step_s,
        "publish_stall_s": stall_s, "publish_stall_share": stall_s / step_s,
        "publish_write_mb_per_s": results[0]["write_bytes_per_s"] / MB, "rows": rows,
    }  # fmt: skip


def prepare(folder: Path, model: dict[str, Any]) -> int:
    """Write a model with random weights; returns its number of parameters."""
    folder.mkdir()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**model, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.save_pretrained(folder)
    build_tokenizer("characters:running_sum", None).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return sum(parameter.numel() for parameter in made.parameters())


class CountedTraining(Training):
    """The trainer's own, with a phase of the ledger for each operation."""

    def __init__(self, spec: ProcessSpec, ledger: LiveStorages) -> None:
        super().__init__(spec)
        self.ledger = ledger
        self.copy_bytes = dict.fromkeys(PHASES, 0)
        self.seconds: dict[str, float] = {}
        self.step_s = self.publish_stall_s = self.write_bytes_per_s = 0.0

    def open(self) -> None:
        count_checks_apart(self.ledger)
        self.ledger.phase("load")
        started_s = time.perf_counter()
        super().open()
        self.seconds["load"] = time.perf_counter() - started_s
        self.ledger.phase("step", is_counted=False)

    def run(self, prepared: Any) -> dict[str, float]:
        started_s = time.perf_counter()
        metrics = super().run(prepared)
        self.step_s = time.perf_counter() - started_s
        return metrics

    def publish(self) -> Any:
        is_again = "publish" in self.ledger.peaks
        self.ledger.phase("again" if is_again else "publish", is_counted=not is_again)
        started_s = time.perf_counter()
        write = super().publish()
        self.publish_stall_s = time.perf_counter() - started_s  # of the last one, which is not counted
        return write

    def save(self) -> Any:
        self.ledger.phase("save")
        return super().save()

    def export(self) -> Path:
        self.ledger.phase("export")
        return super().export()

    def close(self) -> None:
        self.ledger.phase("end", is_counted=False)
        super().close()


def count_checks_apart(ledger: LiveStorages) -> None:
    """Count the passes that check packed log-probs, before the first step, as a phase of their own."""
    plain_check, plain_call = FsdpBackend.check, PolicyModule.__call__

    def check(backend: FsdpBackend) -> float:
        ledger.phase("check")
        difference = plain_check(backend)
        ledger.phase("load")
        return difference

    def call(module: PolicyModule, *args: Any, **keys: Any) -> Any:
        is_loading = ledger.name == "load"
        if is_loading:
            ledger.phase("check")
        result = plain_call(module, *args, **keys)
        if is_loading:
            ledger.phase("load")
        return result

    FsdpBackend.check = check  # type: ignore[method-assign]
    PolicyModule.__call__ = call  # type: ignore[method-assign]


def share_bytes(training: Training, phase: str) -> int:
    """What a rank holds by itself in a phase: its part of the state, and its part of the copy of the phase."""
    shapes = [parameter.shape for parameter in training.model.parameters()]  # tied ones once
    own = sum(math.ceil(shape[0] / RANKS) * math.prod(shape[1:]) for shape in shapes)
    num_models = 2 if training.settings.loss.kl_coef else 1
    state = 4 * own * (num_models + (0 if phase == "load" else 2))  # weights, reference; then the two moments
    copies = {
        "load": 0,
        "publish": 2,
        "save": 2 + 12,
        "export": 2 + 12,
    }  # the copies of version and checkpoint are kept
    return state + copies[phase] * own


def run_rank(job: Path, rank: int) -> None:
    """One rank, as a process; rank 0 leads."""
    facts = json.loads(job.read_text())
    folder, tokens = Path(facts["folder"]), facts["tokens"]
    torch.set_num_threads(1)
    ledger = LiveStorages()
    ledger.install()
    spec = process_spec(folder, rank, facts["bucket_mb"], has_reference=facts["has_reference"])
    training = CountedTraining(spec, ledger)
    if rank:
        Follower(training, Activity()).run()
        step_tokens = 0
    else:
        step_tokens = lead(training, tokens)
    rows = []
    for phase in ("load", "check", "publish", "save", "export"):
        if phase not in ledger.peaks:
            continue
        share = None if phase == "check" else share_bytes(training, phase)
        over = None if share is None else (ledger.peaks[phase] - share) / (facts["bucket_mb"] * MB)
        rows.append({
            "phase": phase, "rank": rank, "share_mb": None if share is None else share / MB,
            "peak_mb": ledger.peaks[phase] / MB, "over_buckets": over, "seconds": training.seconds.get(phase, 0.0),
        })  # fmt: skip
    result = {
        "rows": rows, "step_s": training.step_s, "step_tokens": step_tokens,
        "publish_stall_s": training.publish_stall_s, "write_bytes_per_s": training.write_bytes_per_s,
    }  # fmt: skip
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))


def lead(training: CountedTraining, tokens: int) -> int:
    """Load, train one step, publish, save and export; returns the tokens of the step."""
    training.open()
    samples = made_samples([tokens // 8 - PROMPT] * 8)
    training.run(training.prepare(samples, 1))
    for phase in ("publish", "save"):
        started_s = time.perf_counter()
        (training.publish if phase == "publish" else training.save)()()
        training.seconds[phase] = time.perf_counter() - started_s
    started_s = time.perf_counter()
    training.export()
    training.seconds["export"] = time.perf_counter() - started_s
    write = training.publish()
    started_s = time.perf_counter()
    written = write()
    training.write_bytes_per_s = written.num_bytes / (time.perf_counter() - started_s)
    training.close()
    return sum(len(sample.trajectory) for sample in samples)


def process_spec(folder: Path, rank: int, bucket_mb: float, *, has_reference: bool) -> ProcessSpec:
    """The spec of one rank."""
    return ProcessSpec(
        role="trainer", name=f"trainer-{rank}" if rank else "trainer", run_id="benchmark", run_dir=str(folder / "run"),
        hub_address="tcp://127.0.0.1:1", parent_pid=os.getpid(), seed=1,
        model=ModelSettings(path=str(folder / "prepared"), dtype="bfloat16"), sampling=SamplingSettings(),
        staleness=StalenessSettings(), groups_per_step=1000, group_size=8, num_steps=10,
        weight_dir=str(folder / "run" / "weights"), num_ranks=RANKS, rank=rank, ranks_address=f"file://{folder}/meet",
        settings={
            "device": "cpu", "backend": "fsdp", "ranks": RANKS, "micro_batch_tokens": 512,
            "weights": {"kind": "disk"}, "loss": {"kl_coef": 0.05 if has_reference else 0.0}, "optimizer": {"lr": 1e-5},
            "rank_timeout_s": 600.0, "bucket_mb": bucket_mb,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
