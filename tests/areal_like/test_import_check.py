"""Claims about files that stand in the way of our packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_like.errors import UserError
from areal_like.import_check import PACKAGES, USER_PATH, check_not_shadowed, check_own_module
from areal_like.import_path import import_factory
from rollout.workflow import load_workflow
from services.reward.scorers.user_function import find_function

HOME = Path(__file__).resolve().parents[2]


CONSOLE = "import sys; from controller.cli.main import main; sys.exit(main(sys.argv[1:]))"
"""What the console script does."""


def cli(folder: Path, *arguments: str, launch: tuple[str, ...] = ("-P", "-c", CONSOLE)) -> tuple[int, str]:
    """Run a command in `folder`, which is searched for modules after this installation; exit status and output."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HOME), str(folder)])}
    command = [sys.executable, *launch, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


def write(folder: Path, package: str, text: str, *, as_folder: bool = False) -> Path:
    """A file or package of the user's under a name of ours."""
    file = folder / package / "__init__.py" if as_folder else folder / f"{package}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.processes
@pytest.mark.parametrize("as_folder", [False, True])
def test_files_of_the_users_under_all_our_names_do_not_disturb_a_command(tmp_path: Path, as_folder: bool) -> None:
    for package in PACKAGES:
        write(tmp_path, package, "raise SystemExit('mine')\n", as_folder=as_folder)
    status, said = cli(tmp_path, "validate", "quickstart")
    assert (status, "is valid" in said) == (0, True), said


@pytest.mark.processes
def test_python_dash_m_works_alongside_files_under_the_names_it_has_yet_to_import(tmp_path: Path) -> None:
    for package in ("services", "trainer", "rollout"):
        write(tmp_path, package, "raise SystemExit('mine')\n")
    status, said = cli(tmp_path, "validate", "quickstart", launch=("-m", "controller"))
    assert (status, "is valid" in said) == (0, True), said


SCORER = "def score(row, response, **info):\n    return 1.0\n"


@pytest.mark.processes
def test_a_scorer_under_one_of_our_names_is_refused_in_one_sentence(tmp_path: Path) -> None:
    theirs = write(tmp_path, "trainer", SCORER)
    status, said = cli(tmp_path, "validate", "quickstart", "reward.scorers=[{kind: 'trainer:score'}]")
    assert status == 2
    assert f"Python imports that package instead of {theirs}" in said
    assert "rename your module, for example to my_trainer.py" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("package", PACKAGES)
def test_a_scorer_under_any_of_our_names_is_refused(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USER_PATH, str(tmp_path))
    theirs = write(tmp_path, package, SCORER)
    with pytest.raises(
        UserError,
        match=f"Python imports that package instead of {theirs}.*rename your module, for example to my_{package}.py",
    ):
        find_function(f"{package}:score", {})


@pytest.mark.processes
def test_a_scorer_under_a_name_of_its_own_works_alongside_files_under_ours(tmp_path: Path) -> None:
    write(tmp_path, "trainer", "raise SystemExit('mine')\n")
    write(tmp_path, "my_scores", SCORER)
    status, said = cli(tmp_path, "validate", "quickstart", "reward.scorers=[{kind: 'my_scores:score'}]")
    assert (status, "is valid" in said) == (0, True), said


LOADERS: dict[str, Callable[[str], object]] = {
    "scorer": lambda name: find_function(name, {}),
    "workflow": load_workflow,
    "generator": lambda name: import_factory(name, "data.train"),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_every_kind_of_own_code_is_checked(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER_PATH, str(tmp_path))
    write(tmp_path, "trainer", "")
    with pytest.raises(UserError, match="is also the name of a package of areal_like"):
        LOADERS[kind]("trainer:made")


def test_modules_that_come_with_the_program_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER_PATH, str(tmp_path))
    write(tmp_path, "services", "")
    check_own_module("services.reward.scorers.shaping", "here")
    check_own_module("my_module", "here")
    with pytest.raises(UserError):
        check_own_module("services.mine", "here")


def test_our_own_folder_is_fine() -> None:
    check_not_shadowed()


@pytest.mark.processes
@pytest.mark.parametrize("safe_path", [False, True])
def test_foreign_module_that_is_imported_already_is_named(tmp_path: Path, safe_path: bool) -> None:
    (tmp_path / "trainer.py").write_text("print('mine')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import trainer; sys.path[0] = {str(HOME)!r}\n"
        "from areal_like.errors import UserError\n"
        "from areal_like.import_check import check_not_shadowed\n"
        "try: check_not_shadowed()\n"
        "except UserError as error: print(error.where)\n"
    )
    command = [sys.executable, *(["-P"] if safe_path else []), "-c", code]
    done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["mine", str(tmp_path / "trainer.py")]


@pytest.mark.processes
def test_python_dash_m_really_would_run_the_users_file(tmp_path: Path) -> None:
    """What the check protects against: the reason it must run before children start."""
    (tmp_path / "trainer.py").write_text("print('mine')\n")
    environment = os.environ | {"PYTHONPATH": str(HOME)}
    done = subprocess.run(
        [sys.executable, "-m", "trainer"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "mine\n"
