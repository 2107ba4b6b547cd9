"""Arguments of `areal-like checkpoint`, `export` and `import`.

The commands are in runs/checkpoint.py and runs/convert.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal_like.arguments import whole

_SAVE_EPILOG = """\
The run's controller is asked through the run's folder. The checkpoint counts as any other: it is deleted when
newer ones replace it (trainer.checkpoint.keep); `areal-like export` makes a model of it that is kept.

exit status: 0 it is on disk; 1 it was refused, could not be written, or is not there after --timeout; 2 there is no
such run, or it is not running.
"""
_EXPORT_EPILOG = """\
examples:
  areal-like export quickstart model/                  a run's newest checkpoint
  areal-like export quickstart model/ --version 40     another version of it
  areal-like export quickstart model/ --best
  areal-like export runs/quickstart/checkpoints/step_000040 model/ --dtype bfloat16
  areal-like export my-lora-run adapter/ --lora adapter

Prints how SGLang, vLLM and llama.cpp serve the folder. Only --push-to-hub uses the network, with the token of
`hf auth login`.

Weights keep their type: float32 in checkpoints of a run, that of the model in imported ones. In that type every
bit is kept; --dtype rounds to nearest. A finished run also has its last policy in RUN/final.
"""
_IMPORT_EPILOG = """\
examples:
  areal-like import my-model/ start/
  areal-like train quickstart model.path=start/

The folder is checked (shapes, checksums) and gets a manifest. Exported again it has the same tensors, bit for bit.
Weights must be safetensors. Checkpoints have no optimizer state until a run has trained.
"""


def add_checkpoints(
    commands: Any, command: Callable[..., Any], positive: Callable[[str], float], run_help: str
) -> None:
    """Add the commands to the parser."""
    save = command(
        commands, "checkpoint", "save a checkpoint of a run in progress", _SAVE_EPILOG,
        "Save a checkpoint after the current step, without stopping training. Waits until it is on disk, then prints "
        "its path.",
    )  # fmt: skip
    save.add_argument("run", metavar="RUN", help=run_help)
    save.add_argument(
        "--timeout", type=positive, default=600.0, metavar="S", help="wait at most this many seconds (600)"
    )
    export = command(
        commands, "export", "convert a checkpoint to a Hugging Face folder", _EXPORT_EPILOG,
        "Convert a checkpoint to a Hugging Face folder: config, tokenizer and weights that `from_pretrained` reads.",
    )  # fmt: skip
    export.add_argument(
        "source", metavar="RUN|CHECKPOINT", help="a run (its newest checkpoint), or a checkpoint's folder"
    )
    export.add_argument("out", metavar="OUT", help="a new folder")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--version", type=whole, metavar="N", help="this version of the run, not the newest")
    which.add_argument(
        "--best", action="store_true", help="the version with the best evaluation (trainer.checkpoint.best)"
    )
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="type of the weights (unchanged by default)"
    )
    export.add_argument(
        "--lora", choices=("merged", "adapter"),
        help="for a run with trainer.lora: the merged model (the default), or only the adapter in the format of peft",
    )  # fmt: skip
    export.add_argument(
        "--push-to-hub", metavar="REPO", help="also upload the folder to this repository on the Hugging Face hub"
    )
    export.add_argument("--public", action="store_true", help="if the repository is created, make it public")
    importing = command(
        commands, "import", "convert a Hugging Face folder to a checkpoint", _IMPORT_EPILOG,
        "Convert a Hugging Face folder to a checkpoint (version 0, no optimizer state).",
    )  # fmt: skip
    importing.add_argument("source", metavar="HF_FOLDER", help="a folder with config.json and safetensors")
    importing.add_argument("out", metavar="OUT", help="a new folder")
