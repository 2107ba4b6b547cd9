"""The doctor on Python, our installation, and packages, needed and optional."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_machine import FakeMachine

from areal_like.errors import UserError
from controller.doctor import versions
from controller.doctor.finding import Finding
from controller.doctor.machine import Ran
from controller.doctor.topics import engines, packages, python

ALL_THERE = {
    entry.package: next((version for operator, version in entry.bounds if operator in (">=", "==")), "1")
    for entry in versions.declared()
}


def test_python_outside_the_range_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert python.interpreter(FakeMachine()).verdict == "ok"
    monkeypatch.setattr(python.sys, "version_info", (3, 14, 0))
    found = python.interpreter(FakeMachine())
    assert (found.verdict, "3.14" in found.found) == ("problem", True)
    assert "make PYTHON=" in found.advice


def test_free_threaded_python_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert python.interpreter(FakeMachine()).verdict == "warning"


def test_shadowed_package_is_a_problem_that_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert python.installation(FakeMachine()).verdict == "ok"

    def shadowed() -> None:
        raise UserError("Python would import this", where="/home/me/trainer.py", remedy="rename it")

    monkeypatch.setattr(python, "check_not_shadowed", shadowed)
    found = python.installation(FakeMachine())
    assert (found.verdict, found.advice) == ("problem", "rename it")
    assert "/home/me/trainer.py" in found.found


def test_required_packages_missing_or_too_old_are_problems_with_a_command() -> None:
    assert python.packages(FakeMachine(versions=ALL_THERE)).verdict == "ok"
    missing = python.packages(FakeMachine(versions={**ALL_THERE, "msgspec": ""}))
    assert (missing.verdict, "msgspec" in missing.advice) == ("problem", True)
    old = python.packages(FakeMachine(versions={**ALL_THERE, "pyzmq": "25.1.0"}))
    assert (old.verdict, "pyzmq 25.1.0" in old.found) == ("problem", True)


def test_unreadable_requirements_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "declared", list)
    assert python.packages(FakeMachine()).verdict == "warning"


def test_transformers_must_run_a_tiny_model() -> None:
    def look(version: str, answer: dict[str, object] | str) -> tuple[str, str]:
        found = python.transformers(FakeMachine(versions={"transformers": version}, answers={"tiny_model": answer}))
        return found.verdict, found.advice

    assert look("5.17.0", {"is_finite": True}) == ("ok", "")
    assert look("", "")[0] == look("4.57.0", {"is_finite": True})[0] == "problem"
    assert look("5.17.0", {"is_finite": False})[0] == "problem"
    verdict, advice = look("5.17.0", "RuntimeError: operator torchvision::nms does not exist")
    assert (verdict, "pip uninstall torchvision" in advice) == ("problem", True)


def test_math_verify_that_does_not_verify_is_a_warning() -> None:
    def look(version: str, answer: dict[str, object] | str) -> str:
        return python.math_verify(FakeMachine(versions={"math-verify": version}, answers={"maths": answer})).verdict

    assert look("0.9.0", {"same": True, "other": False}) == "ok"
    assert look("0.9.0", {"same": False, "other": False}) == "warning"
    assert look("0.9.0", "ModuleNotFoundError: No module named 'antlr4'") == "warning"
    assert look("0.5.0", {"same": True, "other": False}) == "warning"
    assert look("", "") == "problem"


# ---------------------------------------------------------------- optional


def test_optional_package_absent_old_and_there() -> None:
    look = packages.plain("ray", "for clusters")
    absent = look(FakeMachine())
    assert (absent.verdict, absent.advice) == ("absent", "for clusters: pip install 'areal-like[ray]'")
    assert look(FakeMachine(versions={"ray": "2.9.0"})).verdict == "warning"
    assert look(FakeMachine(versions={"ray": "2.60.0"})).verdict == "ok"


SGLANG_PYTHON = Path(".venv-sglang/bin/python")


def sglang(machine: FakeMachine) -> Finding:
    (check,) = [check for check in engines.checks() if check.name == "SGLang"]
    found = check.look(machine)
    assert found is not None
    return found


def test_sglang_absent_in_this_environment_and_of_another_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    absent = sglang(FakeMachine())
    assert (absent.verdict, "sglang==0.5.23" in absent.advice) == ("absent", True)
    assert sglang(FakeMachine(versions={"sglang": "0.5.23"})).verdict == "ok"
    other = sglang(FakeMachine(versions={"sglang": "0.4.1"}))
    assert (other.verdict, "0.5.23 is the tested version" in other.found) == ("warning", True)


@pytest.mark.parametrize(
    ("ran", "verdict", "words"),
    [
        (Ran(0, '{"sglang": "0.5.23", "torch": "2.14.1"}'), "ok", "0.5.23 in .venv-sglang (torch 2.14.1)"),
        (Ran(0, '{"sglang": "0.5.23"}'), "warning", "but torch is not"),
        (Ran(0, '{"sglang": "0.5.9", "torch": "2.9.0"}'), "warning", "0.5.23 is the tested version"),
        (Ran(0, '{"torch": "2.14.1"}'), "warning", "SGLang is not installed in"),
        (
            Ran(None, fault="no result within 20 s"),
            "warning",
            "does not work: no result within 20 s",
        ),
    ],
)
def test_sglang_in_an_environment_of_its_own_is_asked_for_its_version(
    ran: Ran, verdict: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / SGLANG_PYTHON).parent.mkdir(parents=True)
    (tmp_path / SGLANG_PYTHON).touch()
    found = sglang(FakeMachine(says=lambda argv: ran))
    assert found.verdict == verdict
    assert words in found.found


TOOLS = {"ninja": "/usr/bin/ninja", "c++": "/usr/bin/c++"}


def test_deepspeed_without_its_compilers_is_a_warning_that_names_the_missing_one() -> None:
    there = {"deepspeed": "0.19.8"}
    assert packages.deepspeed(FakeMachine()).verdict == "absent"
    assert packages.deepspeed(FakeMachine(versions=there, programs=TOOLS)).verdict == "ok"
    no_compiler = packages.deepspeed(FakeMachine(versions=there, programs={"ninja": "/usr/bin/ninja"}))
    assert (no_compiler.verdict, "but a C++ compiler is missing" in no_compiler.found) == ("warning", True)
    hidden = packages.deepspeed(FakeMachine(versions={**there, "ninja": "1.13.0"}, programs={"c++": "/usr/bin/c++"}))
    assert (hidden.verdict, "activate the environment" in hidden.advice) == ("warning", True)
    assert packages.deepspeed(FakeMachine(versions=there)).verdict == "warning"
    assert packages.deepspeed(FakeMachine(versions={"deepspeed": "0.14.0"}, programs=TOOLS)).verdict == "warning"


def test_deepspeeds_prebuilt_kernels_are_read_from_its_record_without_importing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)  # of another test
    record = "version='0.19.8'\ninstalled_ops={'async_io': False, 'cpu_adam': True, 'fused_adam': True}\n"
    machine = FakeMachine(
        versions={"deepspeed": "0.19.8"}, programs=TOOLS,
        files={"/site/deepspeed/git_version_info_installed.py": record},
    )  # fmt: skip
    assert packages.deepspeed(machine).data["built_ops"] == ["cpu_adam", "fused_adam"]
    assert "deepspeed" not in sys.modules


# ---------------------------------------------------------------- versions


def test_requirements_are_read_with_bounds_and_extra() -> None:
    found = versions.parse("transformers>=5.17,<6")
    assert found == versions.Requirement("transformers", ((">=", "5.17"), ("<", "6")))
    assert found.text == "transformers>=5.17,<6"
    extra = versions.parse("sglang==0.5.23 ; extra == 'sglang'")
    assert extra == versions.Requirement("sglang", (("==", "0.5.23"),), "sglang")
    assert versions.parse("ray[default]>=2.50") == versions.Requirement("ray", ((">=", "2.50"),))
    assert versions.parse("@@@") is None


@pytest.mark.parametrize(
    ("bounds", "version", "is_admitted"),
    [
        ("x>=2.11,<2.16", "2.13.0+cpu", True),
        ("x>=2.11,<2.16", "2.9.1", False),
        ("x>=2.11,<2.16", "2.16.0", False),
        ("x==0.5.23", "0.5.23.post1", True),
        ("x==0.5.23", "0.5.2", False),
        ("x>=8", "8", True),
        ("x!=3.1", "3.1.0", False),
        ("x", "anything", True),
    ],
)
def test_versions_are_compared_by_number(bounds: str, version: str, is_admitted: bool) -> None:
    entry = versions.parse(bounds)
    assert entry is not None
    assert entry.admits(version) is is_admitted


def test_this_checkout_declares_what_the_doctor_looks_for() -> None:
    declared = {entry.package for entry in versions.declared()}
    assert {"torch", "transformers", "math-verify", "sglang", "ray", "deepspeed", "datasets", "flash-attn"} <= declared
    assert versions.required_of("sglang").text == "sglang==0.5.23"


def test_checkout_that_cannot_be_read_declares_nothing(tmp_path: Path) -> None:
    assert versions._of_checkout(tmp_path / "pyproject.toml") == []
