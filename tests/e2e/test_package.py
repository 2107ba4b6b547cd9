"""The wheel in an environment without a checkout: what it holds, and that the commands work from an empty folder.

The environment borrows the packages of this one, so nothing is downloaded; this checkout is not among them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.launch.forked import SHARED

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("areal_like", "services", "trainer", "rollout", "controller", "configs")
BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
TINY = ["num_steps=1", "groups_per_step=1", "group_size=2", "eval=null", "data.eval=null"]
SEVERAL = """
import areal_like
from controller.cli.main import main

print(areal_like.__file__, areal_like.train.__doc__, flush=True)
for words in (["reference"], ["validate", "quickstart"], ["validate", "own_data"]):
    if status := main(words):
        raise SystemExit(status)
"""
"""Several commands in one process: importing is most of what each costs."""
Installed = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the backend that pyproject.toml names, without an isolated environment."""
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an environment with the wheel, and with the packages that this one has."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*PIP, "--python", str(python), *install], check=True)
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    borrowed = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))  # their .pth is not read
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return folder / "bin"


@pytest.fixture
def installed(environment: Path, tmp_path: Path) -> Installed:
    """installed("areal-like", ...) runs a program of that environment in an empty folder; it must end with status 0.

    The fork server that tests share has imported the checkout, and is left out.
    """

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON") and key != SHARED}
        done = subprocess.run(
            [str(environment / program), *arguments],
            cwd=tmp_path,
            env=dict(variables, COLUMNS="160"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert str(REPOSITORY) not in done.stdout + done.stderr
        return done

    return run


@pytest.mark.e2e
def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    known = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *FOLDERS],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if known.returncode:
        pytest.skip("not a git checkout")
    wanted = {name for name in known.stdout.split("\0") if name and (REPOSITORY / name).is_file()}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        words = archive.read(metadata).decode()
    assert held == wanted
    assert "Requires-Python: <3.14,>=3.11" in words
    assert "Provides-Extra: mcp" in words


@pytest.mark.e2e
def test_an_installed_wheel_knows_its_settings_and_recipes(installed: Installed, tmp_path: Path) -> None:
    shown = installed("python", "-P", "-c", SEVERAL).stdout
    assert f"site-packages{os.sep}areal_like" in shown
    assert "Returns:" in shown  # the docstring of the public function
    assert (REPOSITORY / "docs" / "reference.md").read_text() in shown
    assert "quickstart.yaml is valid" in shown
    assert "own_data.yaml is valid" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.e2e
def test_an_installed_wheel_scores_a_file(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"response": "\\\\boxed{42}", "gold": "42"}\n')
    installed("areal-like", "score", "--scorer", "math", "--input", "in.jsonl", "--output", "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text())["value"] == 1.0


@pytest.mark.e2e
@pytest.mark.thorough
def test_an_installed_wheel_writes_a_job_and_trains_it(installed: Installed, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = ["--data", "rows.jsonl", "--answer", "text", "--model", "tiny", "--hardware", "cpu", "--tracker", "none"]
    assert "quickstart" in installed("areal-like", "train", "--help").stdout
    said = installed("areal-like", "init", "job.yaml", *answers).stdout
    assert "no errors" in said
    assert "probing the starting model" in said
    installed("areal-like", "train", "job.yaml", *TINY)
    summary = json.loads((tmp_path / "runs" / "job" / "summary.json").read_text())
    assert summary["steps"] == 1
    assert "<html" in (tmp_path / "runs" / "job" / "report.html").read_text()
