"""SGLang's Python environment. Torch-free: `validate` and `doctor` use it too."""

from __future__ import annotations

from rollout.engine.server.environment import ServerEnvironment

KNOWN_VERSION = "0.5.23"
PYTHON = ".venv-sglang/bin/python"
"""The default interpreter; `make sglang-cpu` creates its environment."""
CPU_VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1"}
_PARSER = """
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
"""

ENVIRONMENT = ServerEnvironment(
    title="SGLang",
    package="sglang",
    known_version=KNOWN_VERSION,
    remedy="make sglang-cpu (for GPUs: python3 -m venv .venv-sglang, then pip install 'sglang=="
    + KNOWN_VERSION
    + "' there)",
    help_command="python -m sglang.launch_server --help",
    parser=_PARSER,
    cpu_variables=CPU_VARIABLES,
)
