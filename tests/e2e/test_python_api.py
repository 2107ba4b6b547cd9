"""A script that trains through the Python API, with the scorer that it defines itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY, SHORT, START_TIMEOUT_S

pytestmark = pytest.mark.e2e

PAGE = REPOSITORY / "docs" / "api" / "python.md"
SCRIPT = '''
import json, sys

import areal_like


def score(row, response, **info):
    """1 for an answer that ends by itself."""
    return float(info["finish_reason"] == "stop")


if __name__ == "__main__":
    overrides = json.loads(sys.argv[1])
    scorers = {"scorers": [{"kind": score}]}
    run = areal_like.train("quickstart", reward=scorers, **overrides)
    steps = [row["step"] for row in run]
    status = run.wait().status
    [sample] = run.samples(step=2, limit=1)
    print(json.dumps({
        "steps": steps, "state": status.state, "model": str(run.final_model), "folder": str(run.folder),
        "reward": sample.reward, "finish_reason": sample.finish_reason, "components": list(sample.components),
    }))
    try:
        areal_like.resume(run)
    except areal_like.UserError as error:
        print(error)
'''


def test_script_trains_with_its_own_scorer(runs_dir, tmp_path):
    (tmp_path / "my_job.py").write_text(SCRIPT)
    overrides = dict(word.split("=") for word in SHORT if not word.startswith("warm_start."))
    overrides = {key: json.loads(value) for key, value in overrides.items()}
    overrides |= {"num_steps": 2, "warm_start": None, "runs_dir": str(runs_dir), "name": "python-api"}
    done = subprocess.run(
        [sys.executable, "my_job.py", json.dumps(overrides)],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    answer, refusal = done.stdout.splitlines()
    found = json.loads(answer)
    assert found["steps"] == [1, 2]
    assert found["state"] == "finished"
    assert found["model"] == f"{found['folder']}/final"
    assert found["components"] == ["my_job:score"]
    assert found["reward"] == float(found["finish_reason"] == "stop")
    assert "the run is finished" in refusal


@pytest.mark.thorough
def test_the_documented_program_trains_from_files(tmp_path):
    [program] = re.findall(r"```python\n# my_model.py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "my_model.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "my_model.py"],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    *steps, last = (line.split() for line in done.stdout.splitlines())
    assert [int(step) for step, _ in steps] == list(range(1, 31))
    assert 0.5 <= float(last[0]) <= 1.0
    assert last[1] == str(tmp_path / "runs" / "dpo" / "final")
