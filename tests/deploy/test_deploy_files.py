"""The files of deploy/: their commands load, manifests agree with published schemas, Dockerfiles with hadolint, and the
page says of each what was checked.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from linters import linter

from controller.cli.arguments import parse
from controller.config.loading import load_config

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("docker/*.Dockerfile"))
MANIFESTS = {"job": DEPLOY / "kubernetes/job.yaml", "rayjob": DEPLOY / "kubernetes/rayjob.yaml"}
KUBERNETES = "1.37"
FILES = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and path.suffix != ".dockerignore"]


def train_commands(path: Path) -> list[list[str]]:
    """`areal-like train ...` as a file starts it; a variable of the shell stands for some folder or model."""
    text = path.read_text().replace("\\\n", " ").replace("\n", "\x00")
    if path.suffix == ".yaml" and "RayJob" in text:
        text = " ".join(text.replace("\x00", " ").split()).replace("'", "\x00")
    found = []
    for line in text.split("\x00"):
        match = re.search(r'(?:exec areal-like|exec "\$areal"|exec python -m controller) (train .*)', line)
        if match:
            words = shlex.split(re.sub(r"\$\{?\w+\}?", "/some/where", match[1]))
            found.append([word for word in words if word != "\\"])
    return found


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFESTS[name].read_text()))


@pytest.mark.parametrize(
    "path", [*MANIFESTS.values(), DEPLOY / "skypilot/train.yaml"], ids=lambda path: path.parent.name
)
def test_the_commands_of_a_file_have_a_valid_config_and_settings(path: Path) -> None:
    (words,) = train_commands(path)
    arguments = parse(words, lambda text: pytest.fail(text))
    config = load_config(arguments.config, arguments.overrides).config
    assert config.name == "math_8b"
    assert config.rollout.engine.kind == "sglang"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_says_what_was_checked_and_is_in_the_table_of_the_page(path: Path) -> None:
    head = " ".join(path.read_text().split("\n\n")[0].replace("\n#", " ").split())
    assert re.search(r"Never (built|applied|run|launched)\b.*? here", head)
    assert "Checked:" in head
    page = (REPOSITORY / "docs" / "deploy.md").read_text()
    assert f"| `{path.relative_to(REPOSITORY)}` |" in page


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_what_the_checkout_has_and_pins_what_the_locks_pin(path: Path) -> None:
    text = path.read_text()
    kept = {
        line[1:] for line in path.with_name(f"{path.name}.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert all((REPOSITORY / name).exists() for name in kept)
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE)
    assert {name for line in copied for name in line.split()} - {"."} <= kept
    assert f"torch=={_makefile('TORCH_VERSION')}" in text
    if sglang := re.search(r"sglang==\S+", text):
        assert f'"{sglang[0]}"' in (REPOSITORY / "pyproject.toml").read_text()


def _makefile(name: str) -> str:
    (value,) = re.findall(rf"^{name} \?= (\S+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    return value


@pytest.mark.processes
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_no_remark(path: Path) -> None:
    hadolint = linter("hadolint")
    done = subprocess.run([hadolint, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_pods_have_time_to_save_and_memory_to_share_and_never_run_as_root() -> None:
    cluster = documents("rayjob")[0]["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [documents("job")[1]["spec"]["template"]["spec"], *(group["template"]["spec"] for group in groups)]
    for pod in pods:
        assert pod["terminationGracePeriodSeconds"] > load_config("math_8b_64gpu").config.launch.stop_grace_s
        assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
        assert pod["securityContext"]["runAsNonRoot"]
        uid = re.search(r"^ARG UID=(\d+)$", (DEPLOY / "docker/cuda.Dockerfile").read_text(), re.MULTILINE)
        assert uid is not None
        assert pod["securityContext"]["runAsUser"] == int(uid[1])
    gpus = sum(int(group["replicas"]) * 8 for group in cluster["workerGroupSpecs"])
    assert gpus == 64
    assert f"ray=={cluster['rayVersion']}" in (REPOSITORY / "requirements-ray.lock").read_text().splitlines()


def test_manifests_agree_with_the_schema_of_kubernetes() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    cluster = documents("rayjob")[0]["spec"]["rayClusterSpec"]
    templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **template} for template in templates]
    for document in [*documents("job"), *pods]:
        kubernetes.validate(document, KUBERNETES, strict=True)


def test_the_rayjob_agrees_with_the_definition_of_kuberay() -> None:
    path = os.environ.get("AREAL_LIKE_KUBERAY_CRD")
    if not path:
        pytest.skip("AREAL_LIKE_KUBERAY_CRD names no file ray.io_rayjobs.yaml of KubeRay")
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    versions = {version["name"]: version for version in yaml.safe_load(Path(path).read_text())["spec"]["versions"]}
    schema = versions["v1"]["schema"]["openAPIV3Schema"]
    _refuse_unknown_fields(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    (document,) = documents("rayjob")
    assert [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)] == []


def _refuse_unknown_fields(schema: Any) -> None:
    """A cluster drops fields it does not know; here they are mistakes."""
    if isinstance(schema, list):
        for part in schema:
            _refuse_unknown_fields(part)
    elif isinstance(schema, dict):
        if schema.get("properties") and "x-kubernetes-preserve-unknown-fields" not in schema:
            schema.setdefault("additionalProperties", False)
        if schema.get("x-kubernetes-int-or-string") is True:
            schema.pop("type", None)
        for part in schema.values():
            _refuse_unknown_fields(part)


SKYPILOT = DEPLOY / "skypilot/train.yaml"
SKYPILOT_CHECK = """
import json, sys
import jsonschema
from sky.utils import schemas
errors = jsonschema.Draft7Validator(schemas.get_task_schema()).iter_errors(json.load(sys.stdin))
print(json.dumps([error.message for error in errors]))
"""


@pytest.mark.processes
def test_the_task_agrees_with_the_schema_of_skypilot() -> None:
    python = os.environ.get("AREAL_LIKE_SKYPILOT_PYTHON")
    if not python:
        pytest.skip("AREAL_LIKE_SKYPILOT_PYTHON names no interpreter with the package skypilot")
    task = yaml.safe_load(SKYPILOT.read_text())

    def errors(given: dict[str, Any]) -> list[str]:
        words = [python, "-P", "-c", SKYPILOT_CHECK]
        done = subprocess.run(words, input=json.dumps(given), capture_output=True, text=True, check=True)
        found: list[str] = json.loads(done.stdout.splitlines()[-1])
        return found

    assert errors(task) == []
    assert "work_dir" in errors({**task, "work_dir": "."})[0]


@pytest.mark.processes
@pytest.mark.parametrize("part", ["setup", "run"])
def test_shellcheck_has_no_remark_on_the_commands_of_the_task(part: str) -> None:
    script = yaml.safe_load(SKYPILOT.read_text())[part]
    words = [linter("shellcheck"), "--shell=bash", "-"]
    done = subprocess.run(words, input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


UNIT = DEPLOY / "systemd/areal-like@.service"


def started_by_unit(home: Path, run: str) -> list[str]:
    """The arguments with which the script of ExecStart starts areal-like."""
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    program = home / "venv/bin/areal-like"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o700)
    words = shlex.split(line.replace("%h", str(home)).replace("%i", run))
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.processes
def test_systemd_unit_starts_a_run_and_continues_one_that_exists(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = started_by_unit(tmp_path, "job")
    assert first == ["train", "--keep-alive", f"{runs}/jobs/job.yaml", "name=job", f"runs_dir={runs}"]
    assert parse(first, lambda text: pytest.fail(text)).keep_alive
    (runs / "job").mkdir(parents=True)
    (runs / "job" / "config.yaml").touch()
    later = started_by_unit(tmp_path, "job")
    assert later == ["resume", "--keep-alive", f"{runs}/job"]
    assert parse(later, lambda text: pytest.fail(text)).keep_alive


@pytest.mark.processes
def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze") or pytest.skip("no systemd-analyze here")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("%h/venv/bin/areal-like", "/bin/true"))
    words = [analyze, "--user", "verify", str(unit)]
    runtime = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=runtime)
    assert (done.returncode, done.stderr) == (0, "")
