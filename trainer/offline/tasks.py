"""Creates the task of a spec and encodes its rows. The tasks' formulas are in objectives.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from areal_like.scored_text import write_tokenizer_digest
from trainer.backends.port import Setup
from trainer.model.model import read_config
from trainer.model.tokenizers import load_tokenizer
from trainer.offline.encoding import LENGTH_REMEDY, LoadedRows, load_items
from trainer.offline.opening import longest_sequence
from trainer.offline.preferences import PreferenceTask, pair_item
from trainer.offline.reward_task import RewardTask, TextEncoder
from trainer.offline.rows import read_demonstrations, read_pairs
from trainer.offline.spec import OfflineSpec
from trainer.offline.supervised import SupervisedTask, demonstration_item
from trainer.offline.task import Task
from trainer.sft import ExampleEncoder


@dataclass(frozen=True)
class Prepared:
    """Rows as tokens, and a function that creates the task when there is a model."""

    train: LoadedRows
    eval: LoadedRows | None
    max_tokens: int
    make_task: Callable[[Setup], Task]
    complete: Callable[[Path], None]
    """Called with each model folder that is written, before it gets its final name."""


def prepare_task(spec: OfflineSpec, start: Path) -> Prepared:
    """Read and encode the rows with the tokenizer of `start`. Raises UserError."""
    data, tokenizer = spec.data, load_tokenizer(start)
    max_tokens = longest_sequence(read_config(start), data.max_tokens)
    texts = TextEncoder(tokenizer, max_tokens)
    assert tokenizer.eos_token_id is not None, "load_tokenizer refuses those"
    encoder = ExampleEncoder(
        tokenizer, eos_token_id=tokenizer.eos_token_id, max_tokens=max_tokens, prompt_template=data.prompt_template,
        add_bos=data.add_bos, length_remedy=LENGTH_REMEDY,
    )  # fmt: skip

    def load(file: str) -> LoadedRows:
        path, on_long = Path(file), data.on_long
        if spec.objective == "sft":
            demonstrations = read_demonstrations(path)
            return load_items(file, demonstrations, lambda row: demonstration_item(encoder, row), on_long=on_long)
        encode = texts.item if spec.objective == "reward_model" else lambda row: pair_item(encoder, row)
        return load_items(file, read_pairs(path), encode, on_long=on_long)

    def make_task(setup: Setup) -> Task:
        if spec.objective == "sft":
            return SupervisedTask(setup)
        return PreferenceTask(setup, spec.dpo) if spec.objective == "dpo" else RewardTask(setup)

    train, held_out = load(data.train), None if data.eval is None else load(data.eval)
    complete = write_tokenizer_digest if spec.objective == "reward_model" else _nothing
    return Prepared(train, held_out, max_tokens, make_task, complete)


def _nothing(folder: Path) -> None:
    """Do nothing: a causal language model needs no further files."""
