"""Every module of the packages compiles, without a warning, in the other Python versions that pyproject.toml allows.

An interpreter is taken from the PATH or from pyenv; nothing is installed in it. What was run there by hand is in
docs/decisions/0095-package-and-deploy.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("areal_like", "services", "trainer", "rollout", "controller", "configs")
(FIRST, LAST), *_ = re.findall(
    r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (REPOSITORY / "pyproject.toml").read_text()
)  # fmt: skip
OTHERS = [f"3.{minor}" for minor in range(int(FIRST), int(LAST)) if minor != sys.version_info[1]]
COMPILE = """
import sys, warnings
from pathlib import Path

warnings.simplefilter("error")
for folder in sys.argv[1:]:
    for path in Path(folder).rglob("*.py"):
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
print(sys.version_info[1])
"""


def interpreter(version: str) -> str | None:
    """The path of an interpreter of this version."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(pyenv[-1]) if pyenv else shutil.which(f"python{version}")


@pytest.mark.e2e
@pytest.mark.parametrize("version", OTHERS)
def test_every_module_compiles_without_a_warning(version: str) -> None:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} here")
    done = subprocess.run(
        [found, "-I", "-c", COMPILE, *FOLDERS], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == version.removeprefix("3.")
