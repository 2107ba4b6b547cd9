"""Claims about how an implementation is found by name or import path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_like.errors import UserError
from areal_like.import_check import HOME, USER_PATH
from areal_like.registry import Registry, load_object

KEY = "kitchen.oven"


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, and modules that are forgotten again."""
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(USER_PATH, str(tmp_path))
    (tmp_path / "own_ovens.py").write_text("GAS, ELECTRIC, words = 1, 2, 'x'\n")
    (tmp_path / "broken_ovens.py").write_text("raise RuntimeError('no gas')\n")
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.endswith("_ovens"):
            del sys.modules[name]


def ovens() -> Registry[int]:
    return Registry(int, noun="oven", where=KEY, built_in={"gas": "own_ovens:GAS", "electric": "own_ovens:ELECTRIC"})


def test_nothing_is_imported_before_it_is_named() -> None:
    made = ovens()
    assert made.names == ("gas", "electric")
    assert "gas" in made
    assert "own_ovens:GAS" not in made
    assert "own_ovens" not in sys.modules
    assert list(made) == [1, 2]


def test_name_and_import_path_give_the_same_descriptor() -> None:
    assert ovens().find("electric") == ovens().find("own_ovens:ELECTRIC") == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("electrc", "kitchen.oven: no oven `electrc` -> did you mean electric?"),
        ("Gas", "kitchen.oven: no oven `Gas` -> did you mean gas?"),
        ("wood", "no oven `wood` -> gas, electric, or the import path of a descriptor, module:ATTRIBUTE"),
        ("own_ovens:", "no oven `own_ovens:`"),
        ("absent_ovens:GAS", "module absent_ovens cannot be imported (ModuleNotFoundError"),
        ("broken_ovens:GAS", "module broken_ovens cannot be imported (RuntimeError: no gas)"),
        ("own_ovens:GASS", "module own_ovens has no GASS -> did you mean own_ovens:GAS?"),
        ("own_ovens:words", "own_ovens:words is of type str -> name an instance of int"),
    ],
)
def test_what_cannot_be_found_is_one_error(name: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        ovens().find(name)
    assert text in str(caught.value)
    assert caught.value.where == KEY


def test_module_hidden_by_a_package_of_ours_is_named(own_modules: Path) -> None:
    (own_modules / "trainer.py").write_text("X = 1\n")
    with pytest.raises(UserError, match=r"my_trainer\.py"):
        load_object("trainer:X", KEY)


@pytest.mark.processes
def test_module_in_the_current_folder_is_found_by_a_program_that_starts_without_it(own_modules: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(HOME)!r})\n"
    code += "from areal_like.registry import load_object; print(load_object('own_ovens:GAS', 'x'))"
    environment = {key: value for key, value in os.environ.items() if key != USER_PATH}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=own_modules, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"
