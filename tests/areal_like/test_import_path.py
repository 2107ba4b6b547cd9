"""Claims about names in settings: registered ones, import paths, and what is said of wrong ones."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from areal_like.import_path import check_arguments, find_named, import_factory, import_object, is_import_path


class Animal:
    """What is registered here."""


class Cat(Animal):
    """Made without arguments."""


class Picky(Animal):
    def __init__(self, food: str) -> None:
        self.food = food


CAT = Cat()
ANIMALS = {"dog": Animal(), "horse": Animal()}


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_animals")
    vars(module).update(CAT=CAT, Cat=Cat, Picky=Picky, stone=3)
    monkeypatch.setitem(sys.modules, "my_animals", module)


def find(name: str) -> Animal:
    return find_named(name, ANIMALS, Animal, noun="animal", where="zoo.kind")


def test_registered_names_instances_and_classes_by_import_path_are_found() -> None:
    assert find("dog") is ANIMALS["dog"]
    assert find("my_animals:CAT") is CAT
    assert type(find("my_animals:Cat")) is Cat


@pytest.mark.parametrize(
    ("name", "what", "remedy"),
    [
        ("hrose", "no animal `hrose`", "did you mean horse?"),
        ("Dog", "no animal `Dog`", "did you mean dog?"),
        ("", "no animal ``", "dog, horse, or module:ATTRIBUTE"),
        ("my_animals:CTA", "module my_animals has no attribute CTA", "did you mean my_animals:CAT?"),
        (
            "no_such_module_here:x",
            "module no_such_module_here cannot be imported",
            "put the module into the current folder",
        ),
        (
            "my_animals:stone",
            "my_animals:stone is neither an instance nor a subclass of Animal",
            "specify a subclass of",
        ),
        ("my_animals:Picky", "my_animals:Picky cannot be created without arguments", ""),
    ],
)
def test_a_wrong_name_is_one_error_with_the_nearest_right_one(name: str, what: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        find(name)
    assert caught.value.where == "zoo.kind"
    assert caught.value.what.startswith(what)
    assert remedy in caught.value.remedy


def test_only_module_colon_attribute_is_an_import_path() -> None:
    assert [is_import_path(name) for name in ("a.b:C", "a:b.c", "a", "a:", ":b", "a b:c")] == [True] * 2 + [False] * 4


def test_a_module_of_the_current_folder_is_found_after_everything_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    (tmp_path / "zoo_of_mine.py").write_text("LION = 1\n")
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("AREAL_LIKE_USER_PATH", raising=False)
    assert import_object("zoo_of_mine:LION", "zoo.kind") == 1
    assert sys.path[-1] == str(tmp_path)
    del sys.modules["zoo_of_mine"]


# ---------------------------------------------------------------- modules that fail, and arguments


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The current folder, with modules of the user's; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("AREAL_LIKE_USER_PATH", raising=False)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "what", "has_cause"),
    [
        ("1 / 0", "(ZeroDivisionError: division by zero)", True),
        ("raise SystemExit(3)", "(SystemExit: 3)", True),
        ("import no_such_module_of_theirs", "(ModuleNotFoundError: No module named", True),
    ],
)
def test_module_that_fails_is_named_with_its_error(folder: Path, text: str, what: str, has_cause: bool) -> None:
    (folder / "mine_that_fails.py").write_text(text)
    with pytest.raises(UserError) as caught:
        import_object("mine_that_fails:x", "zoo.kind")
    assert what in caught.value.what
    assert caught.value.remedy == "correct the error that the module raises when it is imported"
    assert (caught.value.__cause__ is not None) == has_cause


@pytest.mark.parametrize("name", ["no_such_module_of_theirs", "no_such_package.inner", "my_zoo.inner"])
def test_module_that_is_not_there_needs_no_traceback(folder: Path, name: str) -> None:
    (folder / "my_zoo").mkdir()
    (folder / "my_zoo" / "__init__.py").touch()
    with pytest.raises(UserError) as caught:
        import_object(f"{name}:x", "zoo.kind")
    assert caught.value.__cause__ is None
    assert caught.value.remedy == "put the module into the current folder, or install it"


def test_path_of_the_user_is_looked_in_instead_of_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "zoos").mkdir()
    (folder / "zoos" / "zoo_elsewhere.py").write_text(
        "class A:\n    class B:\n        lion = 2\n        nothing = None\n"
    )
    monkeypatch.setenv("AREAL_LIKE_USER_PATH", str(folder / "zoos"))
    assert import_object("zoo_elsewhere:A.B.lion", "zoo.kind") == 2
    assert sys.path.count(str(folder / "zoos")) == 1
    import_object("zoo_elsewhere:A", "zoo.kind")
    assert sys.path.count(str(folder / "zoos")) == 1
    for wrong, remedy in (
        ("A.B.loin", "did you mean zoo_elsewhere:A.B.lion?"),
        ("A.B.nothing", "did you mean zoo_elsewhere:A.B.nothing?"),
        ("A.B.lion.x", "fix the name"),
        ("zzz", "fix the name"),
    ):
        with pytest.raises(UserError) as caught:
            import_object(f"zoo_elsewhere:{wrong}", "zoo.kind")
        assert caught.value.what == f"module zoo_elsewhere has no attribute {wrong}"
        assert caught.value.remedy == remedy


def test_own_modules_are_not_looked_for_among_the_users(folder: Path) -> None:
    import_object("areal_like.clock:VirtualClock", "zoo.kind")
    assert str(folder) not in sys.path


def test_factory_can_be_called() -> None:
    assert import_factory("my_animals:Cat", "zoo.kind") is Cat
    with pytest.raises(UserError, match="my_animals:stone is not callable -> specify a function or a class"):
        import_factory("my_animals:stone", "zoo.kind")


def plain(a: int, b: int = 1) -> None: ...


def open_ended(a: int, *rest: int, **more: int) -> None: ...


def by_position(a: int, /, b: int) -> None: ...


def nothing() -> None: ...


@pytest.mark.parametrize(
    ("factory", "arguments", "what", "remedy"),
    [
        (plain, {"a": 1}, "", ""),
        (plain, {"a": 1, "b": 2}, "", ""),
        (plain, {}, "missing: a", "use these options: a, b"),
        (plain, {"a": 1, "z": 1, "c": 1}, "unknown: c, z", "use these options: a, b"),
        (plain, {"c": 1}, "unknown: c; missing: a", "use these options: a, b"),
        (open_ended, {"a": 1, "x": 1}, "", ""),
        (open_ended, {"x": 1}, "missing: a", "use these options: a"),
        (by_position, {"a": 1, "b": 1}, "unknown: a", "use these options: b"),
        (nothing, {"a": 1}, "unknown: a", "remove all options; zoo has none"),
        (dict, {"a": 1}, "", ""),
        (3, {"a": 1}, "", ""),
    ],
)
def test_names_of_arguments_are_checked_before_the_call(
    factory: Any, arguments: dict[str, int], what: str, remedy: str
) -> None:
    if not what:
        check_arguments("zoo", factory, arguments, "zoo.options")
        return
    with pytest.raises(UserError) as caught:
        check_arguments("zoo", factory, arguments, "zoo.options")
    assert (caught.value.what, caught.value.where, caught.value.remedy) == (
        f"the options of zoo are not valid ({what})", "zoo.options", remedy,
    )  # fmt: skip
