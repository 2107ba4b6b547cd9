"""The trained model: created from a config, or loaded from a Hugging Face folder, in float32 and without dropout.

It includes the checks that turn an invalid model folder or `model.init` into a short error message. Tokenizers are in
tokenizers.py, attention kernels in attention.py, and saving in trainer/export.py.

Training needs log-probs of engine and trainer with the same meaning, so dropout is switched off.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal_like.context_limit import ContextLimit, context_limit
from areal_like.errors import UserError, first_line
from areal_like.weights.tensor_parts import has_parts
from trainer.checkpoints.convert import stored_tensors
from trainer.model.stored_tensor import as_tensor

log = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


# ---------------------------------------------------------------- finding and checking a folder


def resolve_folder(path: str, *, progress_bar: type | None = None) -> Path:
    """Return the local folder of `path`: itself, or the hub's snapshot if `path` is a hub name. Raises UserError.

    progress_bar: replaces the hub's (trainer/prepare_progress.py has one that reports bytes).
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(
            "the path is a file, not a model folder", where=path, remedy="specify the folder that contains config.json"
        )
    if not HUB_NAME.fullmatch(path):
        raise UserError("there is no such model folder", where=path, remedy="check model.path")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=HUB_FILES, etag_timeout=10, tqdm_class=progress_bar))
    except Exception as error:  # network, authentication and hub errors have no common root
        raise UserError(
            f"there is no such folder, and the download from the hub failed ({type(error).__name__}: "
            f"{first_line(error)})",
            where=path,
            remedy="check model.path, or download the model and specify its folder",
        ) from error


def check_folder(folder: Path) -> PretrainedConfig:
    """Return the config of a folder with a causal language model and readable weights. Raises UserError otherwise."""
    config = read_config(folder)
    _check_causal_lm(config, where=str(folder))
    check_weights(folder)
    return config


def check_weights(folder: Path) -> None:
    """Raise UserError if the folder has no weights, or a file of them cannot be read; WeightError if a checkpoint lacks
    a part."""
    if has_parts(folder):
        stored_tensors(folder)
        return
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            try:
                with safe_open(str(file), framework="np"):  # reads the header
                    pass
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"the weights cannot be read ({first_line(error)})",
                    where=str(file),
                    remedy="download the file again",
                ) from error


def read_config(folder: Path) -> PretrainedConfig:
    """Read config.json of `folder`. Raises UserError if it is missing, damaged or of an unknown model type."""
    if not folder.is_dir():
        raise UserError("there is no such model folder", where=str(folder), remedy="check the path of the model")
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(
            "the folder contains no config.json", where=str(folder), remedy="specify a Hugging Face model folder"
        )
    try:
        model_type = json.loads(file.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"the file cannot be read as a JSON object ({first_line(error)})",
            where=str(file),
            remedy="download the file again",
        ) from error
    _check_model_type(model_type, where=str(file))
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers' validation has many exception types
        raise UserError(
            f"the file is not a usable config ({first_line(error)})", where=str(file), remedy="correct the file"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights. Raises UserError if there are none, the index names a missing one, or they are
    the parts of a checkpoint."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
            names = sorted(str(Path(name)) for name in named)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(
                f"the index cannot be read ({first_line(error)})", where=str(index), remedy="download the file again"
            ) from error
        for name in names:
            if not (folder / name).is_file():
                raise UserError(
                    f"the index lists {name}, which is missing", where=str(index), remedy="download the file again"
                )
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if has_parts(folder):
        raise UserError(
            "the weights are the parts of a checkpoint, not a Hugging Face folder",
            where=str(folder),
            remedy="convert it with areal-like export, and specify the exported folder",
        )
    pickled = [folder / name for name in PICKLED if (folder / name).is_file()]
    if pickled:
        return pickled
    raise UserError(
        "the folder contains no weights (model.safetensors)",
        where=str(folder),
        remedy="download the weights of the model",
    )


def _check_model_type(model_type: Any, *, where: str) -> None:
    if not isinstance(model_type, str) or not model_type:
        raise UserError("the config has no model_type", where=where, remedy='set model_type, for example to "qwen3"')
    if model_type not in CONFIG_MAPPING_NAMES:
        near = difflib.get_close_matches(model_type, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "use a causal language model, e.g. qwen3"
        raise UserError(
            f"the installed version of transformers does not support model_type {model_type!r}",
            where=where,
            remedy=hint,
        )


def _check_causal_lm(config: PretrainedConfig, *, where: str) -> None:
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    causal_names = {causal} if isinstance(causal, str) else set(causal or ())
    named = set(config.architectures or ())
    if not causal_names or (named and not named & causal_names):
        what = ", ".join(sorted(named)) or config.model_type
        raise UserError(
            f"{what} is not a causal language model",
            where=where,
            remedy="use a causal language model, whose class name ends with ForCausalLM",
        )


# ---------------------------------------------------------------- making a model


def config_from_init(init: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Create a config from `init` (transformers config keys with `model_type`) with the tokenizer's size and ids.

    Raises UserError for an unknown model_type or key, a value that the config class rejects, or too small a vocabulary.
    """
    keys = dict(init)
    model_type = keys.pop("model_type", None)
    _check_model_type(model_type, where="model.init.model_type")
    assert isinstance(model_type, str)
    _check_causal_lm(AutoConfig.for_model(model_type), where="model.init.model_type")
    known = set(AutoConfig.for_model(model_type).to_dict()) | {"rope_theta", "rope_scaling"}
    for key in sorted(set(keys) - known):
        near = difflib.get_close_matches(key, sorted(known), n=1)
        hint = f"did you mean {near[0]}?" if near else f"see transformers' {model_type} config"
        raise UserError(f"the config of {model_type} has no setting `{key}`", where=f"model.init.{key}", remedy=hint)
    num_tokens = len(tokenizer)
    num_rows = keys.setdefault("vocab_size", num_tokens)
    if isinstance(num_rows, int) and num_rows < num_tokens:
        raise UserError(
            f"the vocabulary size is {num_rows}, but the tokenizer has {num_tokens} tokens",
            where="model.init.vocab_size",
            remedy="remove this key; its value is taken from the tokenizer",
        )
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        keys.setdefault(name, getattr(tokenizer, name))
    try:
        config = AutoConfig.for_model(model_type, **keys)
    except Exception as error:  # huggingface_hub's strict dataclasses have their own error types
        what = " ".join(str(error).split())[:300]
        raise UserError(
            f"{model_type} rejects these settings ({what})", where="model.init", remedy="correct the settings"
        ) from error
    return config


def make_model(init: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PreTrainedModel:
    """Create a float32 model; its weights are a pure function of `init`, the vocabulary and `seed`."""
    config = config_from_init(init, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError, KeyError) as error:
            raise UserError(
                f"no model can be created from these settings ({first_line(error)})",
                where="model.init",
                remedy="correct them",
            ) from error
    return without_dropout(model)


# ---------------------------------------------------------------- loading for training


def load_causal_lm(folder: Path, *, device: str = "cpu") -> PreTrainedModel:
    """Load the model in `folder`, float32, on `device`. Packed attention is attached by trainer.model.attention.

    Raises UserError for a folder without a readable causal language model, weights that do not fit the config or are
    not finite, and a device that does not exist.
    """
    check_folder(folder)
    return load_weights(folder, AutoModelForCausalLM, device=device)


def load_weights(
    folder: Path, kind: Any, *, device: str, config: PretrainedConfig | None = None, made: Sequence[str] = ()
) -> PreTrainedModel:
    """Load a model of class `kind` (one of transformers' Auto classes), float32, without dropout, not memory-mapped.

    config: replaces the folder's. made: names of parameters that the folder need not have. Raises UserError if weights
    are missing, do not fit the config or are not finite.
    """
    given: dict[str, Any] = {} if config is None else {"config": config}
    place: str | None = str(folder)
    if has_parts(folder):  # transformers takes tensors only without a folder
        tensors = {name: as_tensor(stored) for name, stored in stored_tensors(folder).items()}
        place, given = None, {"config": config or read_config(folder), "state_dict": tensors}
        with torch.device("meta"):  # and without a folder the Auto classes fail
            kind = type(kind.from_config(given["config"]))
    try:
        loaded: Any = kind.from_pretrained(
            place,
            **given,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, in our own message
        )
    except Exception as error:  # loading raises any exception of the architecture's code
        raise UserError(
            f"the model cannot be loaded ({type(error).__name__}: {first_line(error)})",
            where=str(folder),
            remedy="check that config.json matches the weights",
        ) from error
    model: PreTrainedModel = loaded[0]
    model.config.name_or_path = str(folder)
    report: dict[str, Any] = loaded[1]
    _check_all_loaded(report, folder, made)
    if report["unexpected_keys"]:
        log.warning("%s: ignored %d tensors that the model does not have", folder, len(report["unexpected_keys"]))
    _own_storage(model)
    _check_finite(model, folder)
    return to_device(without_dropout(model), device)


def _check_all_loaded(report: Mapping[str, Any], folder: Path, made: Sequence[str]) -> None:
    """Raise UserError if the file lacks parameters of the config's model, or has them in another shape."""
    mismatched = [_mismatch_words(entry) for entry in sorted(report["mismatched_keys"], key=str)]
    wrong = mismatched + [f"{name} is missing" for name in sorted(set(report["missing_keys"]) - set(made))]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            f"config.json does not match the weights: {'; '.join(wrong[:3])}{more}",
            where=str(folder),
            remedy="download the weights and config.json again from the same source, or correct config.json",
        )


def _mismatch_words(entry: Any) -> str:
    """Describe an entry (name, shape in the file, shape by the config) of transformers' report."""
    if isinstance(entry, tuple) and len(entry) == 3:
        name, in_file, by_config = entry
        return f"{name} has shape {tuple(in_file)} in the file, but {tuple(by_config)} according to config.json"
    return f"{entry} has a different shape"


def _check_finite(model: PreTrainedModel, folder: Path) -> None:
    """Raise UserError if a weight is NaN or infinite: a damaged file, or a policy that diverged."""
    bad = [name for name, tensor in model.state_dict().items() if not all_finite(tensor)]
    if bad:
        raise UserError(
            f"{len(bad)} tensors contain values that are not finite; the first is {bad[0]}",
            where=_file_of(bad[0], folder),
            remedy="download the model again if the file is damaged, or use an earlier checkpoint if training had "
            "diverged",
        )


def all_finite(tensor: torch.Tensor) -> bool:
    """True if no value is NaN or infinite. A sum is several times cheaper; if it overflows, each value is checked."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def _file_of(name: str, folder: Path) -> str:
    """Return the weight file with tensor `name`, or the folder if it cannot be determined among several files."""
    if has_parts(folder):
        return str(folder)
    files = weight_files(folder)
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(str(file), framework="np") as opened:
                if name in opened.keys():  # noqa: SIM118  (not a dict)
                    return str(file)
    return str(files[0] if len(files) == 1 else folder)


def to_device(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Move to `device`. Raises UserError if it does not exist."""
    try:
        moved: PreTrainedModel = model.to(torch.device(device))  # type: ignore[arg-type]
        return moved
    except (RuntimeError, AssertionError) as error:  # raised for unknown names, and for CUDA without a GPU
        raise UserError(
            f"device {device!r} cannot be used ({first_line(error)})",
            where="device",
            remedy="use cpu, or install a build of torch with CUDA support",
        ) from error


def _own_storage(model: PreTrainedModel) -> None:
    """Copy every tensor out of the memory-mapped file.

    The file may be replaced during training. torch's own memory always has the same alignment, so that a resumed run
    computes the same bits as the run it continues.
    """
    with torch.no_grad():
        for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
            tensor.data = tensor.data.clone()


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Switch dropout off, in place."""
    model.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def model_context(config: PretrainedConfig) -> ContextLimit | None:
    """Return the longest sequence that the model's positions cover; None if the config does not define it."""
    return context_limit(vars(config.get_text_config()))


def num_parameters(model: PreTrainedModel, *, is_trained: bool | None = None) -> int:
    """Number of parameters, tied ones counted once; is_trained: only those that are trained, or that are not."""
    wanted = (parameter for parameter in model.parameters() if is_trained in (None, parameter.requires_grad))
    return sum(parameter.numel() for parameter in wanted)
