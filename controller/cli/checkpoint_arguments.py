"""Arguments of `areal-like checkpoint`, `export` and `import`.

The commands are in runs/checkpoint.py and runs/convert.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal_like.arguments import whole

_SAVE_EPILOG = """\
The request is passed to the run's controller through the run's folder. The checkpoint is treated like any other: it is
deleted when newer ones replace it (trainer.checkpoint.keep). Use `areal-like export` to keep the model.

exit status: 0 the checkpoint is on disk; 1 the request was rejected, the checkpoint could not be written, or it is not
on disk after --timeout; 2 there is no such run, or the run is not running.
"""
_EXPORT_EPILOG = """\
examples:
  areal-like export quickstart model/                  a run's newest checkpoint
  areal-like export quickstart model/ --version 40     a different version
  areal-like export quickstart model/ --best
  areal-like export runs/quickstart/checkpoints/step_000040 model/ --dtype bfloat16
  areal-like export my-lora-run adapter/ --lora adapter

The command prints how to serve the folder with SGLang, vLLM and llama.cpp. Only --push-to-hub uses the network; it uses
the token of `hf auth login`.

Weights keep their dtype, and every bit, unless --dtype is set, which rounds to nearest. Checkpoints of a run are
float32; imported checkpoints have the dtype of their model. The last policy of a finished run is also in RUN/final.
"""
_DECRYPT_EPILOG = """\
examples:
  areal-like decrypt runs/quickstart/final model/

The key is read from where the run's configuration says, or from the file named in AREAL_LIKE_ENCRYPTION_KEY_FILE. The
copy is no longer protected: write it to a file system that is encrypted or in memory. See docs/encryption.md.
"""
_IMPORT_EPILOG = """\
examples:
  areal-like import my-model/ start/
  areal-like train quickstart model.path=start/

The command checks the shapes and checksums of the folder and writes a manifest. Exporting the checkpoint again gives
the same tensors, bit for bit. The weights must be in safetensors format. The checkpoint has no optimizer state.
"""


def add_checkpoints(
    commands: Any, command: Callable[..., Any], positive: Callable[[str], float], run_help: str
) -> None:
    """Add the commands to the parser."""
    save = command(
        commands, "checkpoint", "save a checkpoint of a run in progress", _SAVE_EPILOG,
        "Save a checkpoint after the current step without stopping training. The command waits until the checkpoint is "
        "on disk and prints its path.",
    )  # fmt: skip
    save.add_argument("run", metavar="RUN", help=run_help)
    save.add_argument(
        "--timeout", type=positive, default=600.0, metavar="S", help="maximum time to wait, in seconds (default: 600)"
    )
    export = command(
        commands, "export", "convert a checkpoint to a Hugging Face folder", _EXPORT_EPILOG,
        "Convert a checkpoint to a Hugging Face folder with the config, tokenizer and weights that `from_pretrained` "
        "reads.",
    )  # fmt: skip
    export.add_argument(
        "source", metavar="RUN|CHECKPOINT", help="a run (its newest checkpoint is used), or the folder of a checkpoint"
    )
    export.add_argument("out", metavar="OUT", help="a new folder")
    which = export.add_mutually_exclusive_group()
    which.add_argument(
        "--version", type=whole, metavar="N", help="export this version of the run instead of the newest one"
    )
    which.add_argument(
        "--best",
        action="store_true",
        help="export the version with the best evaluation result (trainer.checkpoint.best)",
    )
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the exported weights (default: unchanged)"
    )
    export.add_argument(
        "--lora", choices=("merged", "adapter"),
        help="for a run with trainer.lora: export the merged model (default) or only the adapter in peft's format",
    )  # fmt: skip
    export.add_argument(
        "--push-to-hub", metavar="REPO", help="also upload the folder to this repository on the Hugging Face Hub"
    )
    export.add_argument("--decrypt", action="store_true", help="of an encrypted run: write the weights in the clear")
    export.add_argument("--public", action="store_true", help="make the repository public if this command creates it")
    decrypting = command(
        commands, "decrypt", "write an encrypted model in the clear", _DECRYPT_EPILOG,
        "Copy a model that was exported from an encrypted run to a new folder, with weights in the clear.",
    )  # fmt: skip
    decrypting.add_argument("source", metavar="FOLDER", help="an exported model, such as RUN/final")
    decrypting.add_argument("out", metavar="OUT", help="a new folder")
    importing = command(
        commands, "import", "convert a Hugging Face folder to a checkpoint", _IMPORT_EPILOG,
        "Convert a Hugging Face folder to a checkpoint (version 0, no optimizer state).",
    )  # fmt: skip
    importing.add_argument(
        "source", metavar="HF_FOLDER", help="a folder with config.json and weights in safetensors format"
    )
    importing.add_argument("out", metavar="OUT", help="a new folder")
