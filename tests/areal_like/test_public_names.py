"""The names that `areal_like` exports, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import areal_like

PUBLIC = {
    "train", "resume", "evaluate", "Run", "RunStatus", "RunConfig", "load_config", "Trajectory", "Segment", "Verdict",
    "Workflow", "SampleTools", "Sample", "Transcript", "Scorer", "ScorerInput", "CannotJudge", "UserError",
    "ConfigError", "OperationError", "RunFailed", "DeadlineExceeded", "sft", "dpo", "reward_model",
}  # fmt: skip
"""What users build on. A name that leaves this list breaks their programs."""


def test_export_list_is_the_documented_one():
    assert set(areal_like.__all__) - {"__version__"} == PUBLIC == set(areal_like._EXPORTS)
    assert set(dir(areal_like)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_resolves_to_its_definition(name):
    assert getattr(areal_like, name).__name__ == name
    assert getattr(areal_like, name).__doc__


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        areal_like.trian  # noqa: B018


def loaded_after(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.processes
def test_import_loads_no_module_of_ours_and_no_library():
    loaded = {name.partition(".")[0] for name in loaded_after("import areal_like") - loaded_after("import importlib")}
    assert not loaded & {"torch", "numpy", "pydantic", "yaml", "zmq", "msgspec", "controller", "rollout", "services"}


@pytest.mark.processes
def test_public_names_load_no_torch():
    loaded = loaded_after("import areal_like\nfor name in areal_like.__all__: getattr(areal_like, name)")
    assert "controller.python_api.jobs" in loaded
    assert not loaded & {"torch", "transformers", "ray", "sglang"}
