"""Arguments of `areal-like serve`. The command is in serve.py."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from areal_like.arguments import processes, whole

_EPILOG = """\
examples:
  areal-like serve quickstart                       the last policy of a run
  areal-like serve quickstart --version 40          an earlier version, from a checkpoint
  areal-like serve Qwen/Qwen3-0.6B --port 0         a model, on any free port
  AREAL_LIKE_API_KEY=... areal-like serve model/ --host 0.0.0.0
  areal-like serve model/ --adapter sql=adapters/sql --adapter chat=adapters/chat

Clients: OPENAI_BASE_URL=http://127.0.0.1:8000/v1 with OPENAI_API_KEY, or ANTHROPIC_BASE_URL=http://127.0.0.1:8000 with
ANTHROPIC_API_KEY; the key is printed at the start. See docs/serve.md.

exit status: 0 stopped by Ctrl-C or SIGTERM, after running answers were finished; 1 the server failed; 2 a user error:
the model does not exist or cannot be loaded, or the address cannot be used; 130 interrupted before the server was
ready.
"""


def context(text: str) -> int:
    """Parse a context length: tokens of prompt and answer, at least one each."""
    if (number := whole(text)) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} is too small: the minimum is 2, one token of the prompt and one of the answer"
        )
    return number


def port(text: str) -> int:
    """Parse a port; 0: any free one."""
    if (number := whole(text)) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number from 0 to 65535")
    return number


def temperature(text: str) -> float:
    """Parse a temperature; 0 is greedy."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 100.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return value


def adapter(text: str) -> tuple[str, str]:
    """Parse NAME=FOLDER."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=FOLDER")
    return name, folder


def add_serve(commands: Any, make: Callable[..., Any]) -> None:
    """Add the command; `make` creates its parser."""
    command = make(
        commands, "serve", "serve a model with APIs compatible with OpenAI's and Anthropic's", _EPILOG,
        "Start a server in the foreground that answers chat completion, response and message requests with the policy "
        "of a run, a checkpoint or a model.",
    )  # fmt: skip
    command.add_argument(
        "model", metavar="RUN|MODEL", help="a run, a checkpoint, or the folder or Hugging Face Hub name of a model"
    )
    command.add_argument(
        "--version",
        type=whole,
        metavar="N",
        help="for a run: serve the checkpoint of this version instead of the last policy",
    )
    command.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: 127.0.0.1)")
    command.add_argument(
        "--port",
        type=port,
        default=8000,
        metavar="P",
        help="port to listen on (default: 8000); 0 chooses any free port",
    )
    command.add_argument(
        "--key-file", metavar="FILE",
        help="file that contains the API key for clients (default: the key in AREAL_LIKE_API_KEY; if neither is given, "
        "a random key, with which the server can only listen on a loopback address)",
    )  # fmt: skip
    command.add_argument("--name", metavar="M", help="model name for clients (default: the name of the run or model)")
    command.add_argument(
        "--adapter", type=adapter, action="append", default=[], metavar="NAME=FOLDER",
        help="a LoRA adapter in peft's format, which clients request as model NAME; this option can be repeated",
    )  # fmt: skip
    command.add_argument(
        "--slots", type=processes, default=4, metavar="N", help="number of answers generated concurrently (default: 4)"
    )
    command.add_argument(
        "--max-context",
        type=context,
        metavar="N",
        help="maximum number of tokens of prompt and answer together (default: the value of the run, or 4096)",
    )
    command.add_argument(
        "--max-tokens",
        type=whole,
        default=0,
        metavar="N",
        help="maximum answer length in tokens for requests that do not set a limit (default: the rest of the context)",
    )
    command.add_argument(
        "--temperature",
        type=temperature,
        metavar="T",
        help="sampling temperature for requests that do not set one (default: the value of the run, or 1)",
    )
    command.add_argument(
        "--safety",
        metavar="FILE",
        help="YAML file with a list of safety stages, which check requests and answers (default: the stages of the "
        "run; docs/safety.md)",
    )
    command.add_argument(
        "--format", metavar="F", help="format of tool calls (default: the format of the run or of the chat template)"
    )
    command.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda or cuda:N (default: cpu)")
    command.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the weights (default: float32 on CPUs, bfloat16 on GPUs)",
    )
