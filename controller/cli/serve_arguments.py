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
  areal-like serve quickstart --version 40          an earlier one, of a checkpoint
  areal-like serve Qwen/Qwen3-0.6B --port 0         a model, at any free port
  AREAL_LIKE_API_KEY=... areal-like serve model/ --host 0.0.0.0
  areal-like serve model/ --adapter sql=adapters/sql --adapter chat=adapters/chat

Clients: OPENAI_BASE_URL=http://127.0.0.1:8000/v1 with OPENAI_API_KEY, or ANTHROPIC_BASE_URL=http://127.0.0.1:8000 with
ANTHROPIC_API_KEY; the key is printed at the start. See docs/serve.md.

exit status: 0 ended by Ctrl-C or SIGTERM, after the answers under way; 1 the server failed; 2 a user error: there is no
such model, it cannot be loaded, or the address cannot be used; 130 interrupted before it was ready.
"""


def context(text: str) -> int:
    """Parse a context length: tokens of prompt and answer, at least one each."""
    if (number := whole(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} tokens are too few for a prompt and an answer")
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
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER")
    return name, folder


def add_serve(commands: Any, make: Callable[..., Any]) -> None:
    """Add the command; `make` creates its parser."""
    command = make(
        commands, "serve", "serve a policy to clients of OpenAI's and Anthropic's APIs", _EPILOG,
        "Answer requests for chat completions, responses and messages with the policy of a run, a checkpoint or a "
        "model's folder, in the foreground.",
    )  # fmt: skip
    command.add_argument("model", metavar="RUN|MODEL", help="a run, a checkpoint, a model's folder or hub name")
    command.add_argument(
        "--version", type=whole, metavar="N", help="for a run: this checkpoint instead of its last policy"
    )
    command.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (127.0.0.1)")
    command.add_argument("--port", type=port, default=8000, metavar="P", help="port (8000); 0: any free one")
    command.add_argument(
        "--key-file", metavar="FILE",
        help="file with the clients' key (else AREAL_LIKE_API_KEY; else a random one, for this machine only)",
    )  # fmt: skip
    command.add_argument("--name", metavar="M", help="the model's name for clients (that of the run or folder)")
    command.add_argument(
        "--adapter", type=adapter, action="append", default=[], metavar="NAME=FOLDER",
        help="an adapter (LoRA, in peft's format) on the model, which clients request as model NAME; repeatable",
    )  # fmt: skip
    command.add_argument(
        "--slots", type=processes, default=4, metavar="N", help="number of answers generated concurrently (4)"
    )
    command.add_argument(
        "--max-context",
        type=context,
        metavar="N",
        help="context length: tokens of prompt and answer (that of the run, or 4096)",
    )
    command.add_argument(
        "--max-tokens",
        type=whole,
        default=0,
        metavar="N",
        help="longest answer in tokens if a request sets no limit (as many as fit)",
    )
    command.add_argument(
        "--temperature", type=temperature, metavar="T", help="temperature if a request has none (that of the run, or 1)"
    )
    command.add_argument("--format", metavar="F", help="notation of tool calls (that of the chat template)")
    command.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda or cuda:N (cpu)")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help="weights' dtype (float32; on GPUs bfloat16)")
