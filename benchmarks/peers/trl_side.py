"""TRL's side of `benchmarks.peer_trl`: GRPOTrainer on a model folder, timed without its evaluations.

Runs in TRL's own environment and imports nothing of this project. Reads one JSON object from the file named on the
command line; writes and flushes one JSON line per evaluation.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer


def is_correct(answer: str, ids: list[int], text: str, eos: int) -> bool:
    """As in areal_like/tasks/running_sum.py: the text after the last `#` is right, and the model ended the answer."""
    _, mark, found = text.rpartition("#")
    return eos in ids and bool(mark) and found == answer


class Accuracy(TrainerCallback):
    """Measures greedy accuracy every few steps; this time is not counted."""

    def __init__(self, job: dict[str, Any], tokenizer: Any) -> None:
        self.job, self.tokenizer = job, tokenizer
        self.began_s = time.perf_counter()
        self.away_s = 0.0
        self.reached = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate after the last update of a batch, if one is due."""
        batch, rest = divmod(state.global_step, self.job["mini_batches"])
        if rest or (batch % self.job["eval_every"] and batch < self.job["num_batches"]):
            return
        now_s = time.perf_counter()
        train_s = now_s - self.began_s - self.away_s
        accuracy = self.measure(kwargs["model"])
        self.away_s += time.perf_counter() - now_s
        samples = batch * self.job["batch_samples"]
        print(json.dumps({"batch": batch, "train_s": train_s, "accuracy": accuracy,
                          "samples_per_s": samples / train_s}), flush=True)  # fmt: skip
        if accuracy >= self.job["accuracy"]:
            control.should_training_stop = True

    @torch.no_grad()
    def measure(self, model: Any) -> float:
        """Greedy accuracy over the held-out rows, in batches of 64."""
        was_training = model.training
        model.eval()
        rows, right = self.job["eval_rows"], 0
        for first in range(0, len(rows), 64):
            batch = rows[first : first + 64]
            inputs = self.tokenizer([row["prompt"] for row in batch], return_tensors="pt", padding=True,
                                    padding_side="left")  # fmt: skip
            inputs.pop("token_type_ids", None)
            out = model.generate(**inputs, do_sample=False, max_new_tokens=self.job["max_new_tokens"])
            for row, ids in zip(batch, out[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                right += is_correct(row["answer"], ids, text, self.tokenizer.eos_token_id)
        model.train(was_training)
        return right / len(rows)


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    torch.set_num_threads(job["threads"])
    set_seed(job["seed"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    first = tokenizer(job["eval_rows"][0]["prompt"])["input_ids"]
    if first.count(tokenizer.bos_token_id) != 1:  # our engine and TRL's tokenization both begin a prompt so
        raise SystemExit(f"a prompt must begin with one <bos>, but becomes {first}")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)

    def reward(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        return [
            float(is_correct(right, ids, text, tokenizer.eos_token_id))
            for right, ids, text in zip(answer, completion_ids, completions, strict=True)
        ]

    micro, updates = job["micro_batch"], job["mini_batches"]
    passes = job["batch_samples"] // micro
    wanted = {
        "output_dir": job["out"], "seed": job["seed"], "max_steps": job["num_batches"] * updates,
        "learning_rate": job["lr"], "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5,
        "adam_beta2": 0.99, "max_grad_norm": 1.0, "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": passes // updates, "steps_per_generation": passes,
        "num_generations": job["group_size"], "max_completion_length": job["max_new_tokens"], "temperature": 1.0,
        "beta": 0.0, "delta": job["delta"], "use_cpu": True, "bf16": False, "fp16": False,
        "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1000,
        "disable_tqdm": True, "max_prompt_length": None,
        "use_transformers_continuous_batching": job["batching"] is not None,
        "transformers_continuous_batching_config": job["batching"],
    }  # fmt: skip
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    config = GRPOConfig(**{key: value for key, value in wanted.items() if key in known})
    callback = Accuracy(job, tokenizer)
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(job["train_rows"]),
        processing_class=tokenizer, callbacks=[callback],
    )  # fmt: skip
    callback.began_s = time.perf_counter()
    trainer.train()


if __name__ == "__main__":
    main()
