"""Functions given as objects become names that worker processes can import, or an error that says how."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path

import pytest

from areal_like.errors import UserError
from controller.python_api.import_names import import_name
from rollout.workflow import SingleTurn

KEY = "reward.scorers.0.kind"


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Makes `__main__` a script of this path and returns a function that it defines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def make(file: Path | None, spec_name: str | None = None):
        main = types.ModuleType("__main__")
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")
            main.__file__ = str(file)
        if spec_name:
            main.__spec__ = types.SimpleNamespace(name=spec_name)
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec("def score(row, response, **info):\n    return 1.0", main.__dict__)
        return main.score

    return make


def test_class_of_an_installed_module_keeps_its_name():
    assert import_name(SingleTurn, "rollout.workflow") == "rollout.workflow:SingleTurn"


def test_function_of_the_calling_script_gets_the_scripts_name(script, tmp_path):
    assert import_name(script(tmp_path / "my_job.py"), KEY) == "my_job:score"


def test_script_started_as_a_module_keeps_its_package(script, tmp_path):
    assert import_name(script(tmp_path / "jobs" / "first.py", "jobs.first"), KEY) == "jobs.first:score"


def test_script_of_another_folder_is_refused_with_the_folder(script, tmp_path):
    function = script(tmp_path / "elsewhere" / "my_job.py")
    with pytest.raises(UserError, match=f"{KEY}: .*current folder -> .*cd {tmp_path / 'elsewhere'}"):
        import_name(function, KEY)


def test_script_of_another_folder_is_fine_when_pythonpath_names_it(script, tmp_path, monkeypatch):
    function = script(tmp_path / "elsewhere" / "my_job.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    assert import_name(function, KEY) == "my_job:score"


def test_function_of_a_notebook_is_refused_with_a_way_out(script):
    with pytest.raises(UserError, match=r"notebook .* -> save this object in a file"):
        import_name(script(None), KEY)


def test_script_whose_name_is_no_module_is_refused(script, tmp_path):
    with pytest.raises(UserError, match=r"my-job\.py.* -> rename the script"):
        import_name(script(tmp_path / "my-job.py"), KEY)


@pytest.mark.parametrize("thing", [lambda row, response: 1.0, types.SimpleNamespace, [].append])
def test_what_has_no_name_at_the_top_of_a_module_is_refused(thing):
    def local(row, response):
        return 1.0

    if thing is types.SimpleNamespace:
        thing = local
    with pytest.raises(UserError, match="top level of a module"):
        import_name(thing, KEY)


@pytest.mark.parametrize(("thing", "shown"), [(lambda row: 1.0, "<lambda>"), (functools.partial(print), "partial")])
def test_what_is_refused_is_called_by_its_name_or_else_by_its_type(thing, shown):
    with pytest.raises(UserError, match=f"cannot import `{shown}`"):
        import_name(thing, KEY)
