"""Claims about names in settings: registered ones, import paths, and what is said of wrong ones."""

from __future__ import annotations

import sys
import types

import pytest

from areal_like.errors import UserError
from areal_like.import_path import find_named, import_object, is_import_path


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
        ("my_animals:CTA", "module my_animals has no CTA", "did you mean my_animals:CAT?"),
        ("no_such_module_here:x", "module no_such_module_here cannot be imported", "must be in the current folder"),
        ("my_animals:stone", "my_animals:stone is not a Animal", "a subclass of"),
        ("my_animals:Picky", "my_animals:Picky cannot be made without arguments", ""),
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
