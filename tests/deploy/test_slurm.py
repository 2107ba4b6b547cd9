"""A walk through deploy/slurm/train.sbatch with srun, scontrol, ray and areal-like replaced by programs that record how
they were called.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from linters import linter

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "train.sbatch"
RECORD = '#!/usr/bin/env bash\nprintf "%s\\n" "${0##*/} $*" >>"$CALLS"\n'
STUBS = {
    "srun": RECORD
    + 'echo "auth ${RAY_AUTH_MODE:-none}" >>"$CALLS"\nls -l "${RAY_AUTH_TOKEN_PATH:-/dev/null}" >>"$CALLS"\n'
    '[ -z "${LASTS:-}" ] || until [ -e "$CALLS.end" ]; do sleep 0.05; done\nexit "${SRUN_STATUS:-0}"\n',
    "scontrol": RECORD + '[ "$1" != show ] || printf "node1\\nnode2\\n"\n',
    "areal-like": RECORD + '[ "$1" != stop ] || touch "$CALLS.end"\n',
}
Job = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Of a job on one node."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in STUBS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "RUNS_DIR": str(tmp_path / "runs"),
        "RETRY_S": "0",
    }


@pytest.fixture
def job(variables: dict[str, str], tmp_path: Path) -> Job:
    """job("quickstart", "first", SLURM_NNODES="2") runs the script to its end."""

    def run(*words: str, **changed: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(SCRIPT), *words]
        environment = {**variables, **changed}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


def calls(variables: dict[str, str]) -> list[str]:
    path = Path(variables["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.processes
def test_one_node_trains_without_ray(job: Job, variables: dict[str, str]) -> None:
    done = job("quickstart", "first", "num_steps=3", "name=a b")
    assert done.returncode == 0, done.stderr
    srun, auth, _ = calls(variables)
    assert srun == (
        "srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --kill-on-bad-exit=0 python -m controller train quickstart "
        f"name=first runs_dir={variables['RUNS_DIR']} num_steps=3 name=a b"
    )
    assert auth == "auth none"


@pytest.mark.processes
def test_several_nodes_start_ray_on_each_with_a_token_of_the_job(job: Job, variables: dict[str, str]) -> None:
    done = job("cluster", "first", SLURM_NNODES="2", LOCAL_DIR="/scratch")
    assert done.returncode == 0, done.stderr
    show, srun, auth, token = calls(variables)
    assert show == "scontrol show hostnames node[1-2]"
    assert srun == (
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0 "
        "ray symmetric-run --address node1:6379 --min-nodes 2 -- "
        f"python -m controller train cluster name=first runs_dir={variables['RUNS_DIR']} launch.ray.local_dir=/scratch"
    )
    assert auth == "auth token"
    assert token.startswith(stat.filemode(stat.S_IFREG | 0o600))
    assert not list(Path(variables["RUNS_DIR"]).iterdir())  # the token is gone with the job


@pytest.mark.processes
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_run_that_is_there_is_resumed(job: Job, variables: dict[str, str], nodes: str) -> None:
    folder = Path(variables["RUNS_DIR"]) / "first"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    assert job("cluster", "first", SLURM_NNODES=nodes).returncode == 0
    (srun,) = [call for call in calls(variables) if call.startswith("srun")]
    assert srun.endswith(f"python -m controller resume {folder}")


@pytest.mark.processes
@pytest.mark.parametrize("requeue", ["0", "1"])
def test_the_signal_before_the_limit_stops_the_run_and_waits_for_it(variables: dict[str, str], requeue: str) -> None:
    command = ["bash", str(SCRIPT), "quickstart", "first"]
    environment = {**variables, "LASTS": "1", "REQUEUE": requeue}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while len(calls(variables)) < 3:  # the step has started
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0
    after = calls(variables)[3:]
    assert after[0] == f"areal-like stop {variables['RUNS_DIR']}/first --timeout 540"
    assert after[1:] == (["scontrol requeue 7"] if requeue == "1" else [])


@pytest.mark.processes
def test_the_job_ends_with_the_status_of_the_run(job: Job, variables: dict[str, str]) -> None:
    assert job("quickstart", "first", SRUN_STATUS="2", REQUEUE="1").returncode == 2
    assert not [call for call in calls(variables) if call.startswith("scontrol")]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "changed", "said"),
    [
        ((), {}, "error: sbatch train.sbatch CONFIG RUN"),
        (("quickstart", "a/b"), {}, "error: RUN is a name, without slashes: a/b"),
        (("quickstart", "a"), {"SLURM_JOB_ID": ""}, "error: this is a job script"),
        (("quickstart", "a"), {"RUNS_DIR": "runs"}, "error: RUNS_DIR must be an absolute path"),
        (("quickstart", "a"), {"VENV": "/nowhere"}, "error: VENV has no bin: /nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    job: Job, variables: dict[str, str], words: tuple[str, ...], changed: dict[str, str], said: str
) -> None:
    done = job(*words, **changed)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1
    assert not calls(variables)


@pytest.mark.processes
def test_shellcheck_has_no_remark() -> None:
    shellcheck = linter("shellcheck")
    done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
