"""`python -m trainer.prepare --spec FILE`: prepares the starting model as a Hugging Face folder.

The model is created, loaded, or trained by supervised steps. This module defines the order (tokenizer, model,
supervised steps, folder, version 0) and runs in its own process. The controller caches the result.

The folder gets its name only when it is complete. If the model is neither created nor trained here, its weight files
are linked instead of copied, so that preparing a large model costs neither time nor disk space.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from areal_like import quick_exit
from areal_like.errors import UserError
from areal_like.process import run_blocking
from areal_like.weights.weight_store import WeightStore
from trainer import export, sft
from trainer.checkpoints.atomic_folder import atomic_folder
from trainer.checkpoints.companion_files import copy_companions
from trainer.config import SftSettings
from trainer.model import attention
from trainer.model.agreement import check as check_agreement
from trainer.model.lora import add_adapter, merge_adapter
from trainer.model.model import (
    check_folder,
    load_causal_lm,
    make_model,
    model_context,
    resolve_folder,
    to_device,
    weight_files,
)
from trainer.model.tokenizers import build_tokenizer
from trainer.prepare_progress import PrepareProgress, byte_counter
from trainer.prepare_spec import PrepareSpec
from trainer.weights.publish import publish_version

log = logging.getLogger(__name__)

KEPT_VERSIONS = 2


def prepare(spec: PrepareSpec) -> Path:
    """Prepare the model described by `spec`; returns its folder. Raises UserError for everything the user can fix."""
    transformers.utils.logging.disable_progress_bar()
    target = Path(spec.out_dir)
    _check_request(spec, target)
    with closing(PrepareProgress(Path(spec.status_path) if spec.status_path else None)) as progress:
        return _prepare(spec, target, progress)


def _prepare(spec: PrepareSpec, target: Path, progress: PrepareProgress) -> Path:
    path = spec.model.path
    source = resolve_folder(path, progress_bar=byte_counter(progress.downloaded)) if path else None
    config = check_folder(source) if source else None
    tokenizer = build_tokenizer(spec.model.tokenizer, source)
    model = _starting_model(spec, source, config, tokenizer)
    if spec.sft is not None:
        assert model is not None
        _supervise(spec, spec.sft, model, tokenizer, progress)
    with atomic_folder(target, replaces=False) as partial:
        if source is not None and spec.sft is None:
            _link_model(source, partial)
        else:
            assert model is not None
            export.write_model(model, partial, dtype="float32")
        if spec.model.tokenizer == "from_model":
            assert source is not None
            copy_companions(source, partial)
        else:
            tokenizer.save_pretrained(str(partial))
        export.write_generation_config(partial, eos_token_id=_eos(spec, config, tokenizer), tokenizer=tokenizer)
    if spec.publish_to:
        assert model is not None
        store = WeightStore(Path(spec.publish_to), spec.publish_kind, KEPT_VERSIONS)
        publish_version(store, model, 0, spec.lineage, dtype=spec.model.dtype)
    return target


def _check_request(spec: PrepareSpec, target: Path) -> None:
    if (spec.model.path is None) == (spec.model.init is None):
        raise UserError(
            "neither path nor init is set" if spec.model.path is None else "both path and init are set",
            where="model",
            remedy="set either path, the folder of a model, or init, the config of a new model",
        )
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(
            "the path already exists and is not an empty folder",
            where=str(target),
            remedy="choose a different folder, or remove this path",
        )


def _starting_model(
    spec: PrepareSpec, source: Path | None, config: PretrainedConfig | None, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | None:
    """Return the model before any supervised step; None if its parameters are not needed in memory."""
    if source is None or config is None:
        assert spec.model.init is not None
        model = make_model(spec.model.init, tokenizer, seed=spec.seed)
    else:
        num_rows = config.get_text_config().vocab_size
        if len(tokenizer) > num_rows:
            raise UserError(
                f"the tokenizer has {len(tokenizer)} tokens, but the vocabulary of the model has only {num_rows}",
                where="model.tokenizer",
                remedy="use the tokenizer that belongs to the model",
            )
        if spec.sft is None and not spec.publish_to:
            return None
        model = load_causal_lm(source)
    return model if spec.sft is None else to_device(model, spec.sft.device)


def _eos(spec: PrepareSpec, config: PretrainedConfig | None, tokenizer: PreTrainedTokenizerBase) -> int | list[int]:
    """Return the ids that end an answer if the model has no generation config: its config's, else the tokenizer's."""
    known = config.get_text_config().eos_token_id if config and spec.model.tokenizer == "from_model" else None
    eos: int | list[int] = tokenizer.eos_token_id if known is None else known
    return eos


def _supervise(
    spec: PrepareSpec,
    settings: SftSettings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    progress: PrepareProgress,
) -> None:
    """Run the supervised steps, in place."""
    assert spec.sft_rows is not None
    longest = min(settings.max_tokens, settings.micro_batch_tokens)
    if (limit := model_context(model.config)) is not None:
        longest = min(longest, limit.tokens)
    encoder = sft.ExampleEncoder(
        tokenizer,
        eos_token_id=tokenizer.eos_token_id,
        max_tokens=longest,
        prompt_template=spec.prompt_template,
        add_bos=spec.add_bos,
    )
    rows = sft.read_rows(Path(spec.sft_rows))
    examples = [encoder.encode(row, where=f"{spec.sft_rows}: row {number}") for number, row in enumerate(rows, start=1)]
    choice = attention.choose("auto", model.device, "float32")  # a kernel configured for the trainer may need 16 bits
    check_agreement(model, choice, torch.float32, max_context=longest)
    if settings.lora is not None:
        add_adapter(model, settings.lora, seed=spec.seed, where="warm_start.sft.lora")
    log.info(
        "supervised training on %d rows: %d steps with batch size %d, %s",
        len(rows),
        settings.steps,
        settings.batch_size,
        choice,
    )

    def report(step: int, loss: float, seconds: float) -> None:
        log.info("supervised step %d of %d: loss %.4f, %.1f s", step, settings.steps, loss, seconds)
        progress.stepped(step, settings.steps, loss, seconds)

    sft.run_sft(model, choice, examples, settings, seed=spec.seed, report=report)
    if settings.lora is not None:
        merge_adapter(model)


def _link_model(source: Path, folder: Path) -> None:
    """Add config and weight files of `source` to `folder`, as hard links if the file system allows it."""
    names = [source / "config.json", *weight_files(source), *source.glob("*.index.json")]
    for file in names:
        real = file.resolve()  # the hub's cache has symbolic links
        try:
            os.link(real, folder / file.name)
        except OSError:
            shutil.copyfile(real, folder / file.name)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the preparation as a process, with the exit statuses of every process of a run."""
    run_blocking(PrepareSpec, _prepare_and_log, argv)


def _prepare_and_log(spec: PrepareSpec) -> None:
    started_s = time.monotonic()
    folder = prepare(spec)
    log.info("prepared the model in %s in %.1f s", folder, time.monotonic() - started_s)


if __name__ == "__main__":
    quick_exit.run(main)
