"""Claims about files that stand in the way of our packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_like.errors import UserError
from areal_like.shadow import PACKAGES, check_not_shadowed

HOME = Path(__file__).resolve().parents[2]


def test_our_own_folder_and_an_empty_one_are_fine(tmp_path: Path) -> None:
    check_not_shadowed(HOME)
    check_not_shadowed(tmp_path)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("as_folder", [False, True])
def test_file_in_the_starting_folder_is_named(tmp_path: Path, package: str, as_folder: bool) -> None:
    intruder = tmp_path / package / "__init__.py" if as_folder else tmp_path / f"{package}.py"
    intruder.parent.mkdir(exist_ok=True)
    intruder.touch()
    with pytest.raises(UserError) as caught:
        check_not_shadowed(tmp_path)
    assert caught.value.where == str(intruder)


def test_folder_without_init_does_not_shadow(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    check_not_shadowed(tmp_path)


@pytest.mark.parametrize("safe_path", [False, True])
def test_foreign_module_that_is_imported_already_is_named(tmp_path: Path, safe_path: bool) -> None:
    (tmp_path / "trainer.py").write_text("print('mine')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import trainer; sys.path[0] = {str(HOME)!r}\n"
        "from areal_like.errors import UserError\n"
        "from areal_like.shadow import check_not_shadowed\n"
        "try: check_not_shadowed()\n"
        "except UserError as error: print(error.where)\n"
    )
    command = [sys.executable, *(["-P"] if safe_path else []), "-c", code]
    done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["mine", str(tmp_path / "trainer.py")]


def test_python_dash_m_really_would_run_the_users_file(tmp_path: Path) -> None:
    """What the check protects against: the reason it must run before children start."""
    (tmp_path / "trainer.py").write_text("print('mine')\n")
    environment = os.environ | {"PYTHONPATH": str(HOME)}
    done = subprocess.run(
        [sys.executable, "-m", "trainer"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "mine\n"
