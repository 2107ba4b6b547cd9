"""A whole job of agents with everything under it killed in mid-episode, at points that its programs wait for."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from areal_like.process import is_alive
from benchmarks.killed_run import PROGRAM, KilledRun
from controller.launch.forked import SHARED
from controller.ledger.ledger import LEDGER_FILE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="programs are forked, and /proc read"),
]

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "agent_tool_sum.yaml"
NUM_STEPS, GROUPS, GROUP_SIZE, MAX_STALENESS = 5, 2, 4, 2
ADMITTED = (MAX_STALENESS + 1) * GROUPS * GROUP_SIZE
"""Samples that are started before the first step: when so many have ended, there is a step."""
SMALL = (
    "warm_start=null", f"num_steps={NUM_STEPS}", f"groups_per_step={GROUPS}", f"group_size={GROUP_SIZE}",
    f"staleness.max_staleness={MAX_STALENESS}", "sampling.max_new_tokens=6", "rollout.engine.num_slots=4",
    "rollout.queue_samples=4", "data.train.limit=64", "data.eval=null", "eval.every_steps=0", "eval.at_start=false",
    "reward.scorers=[]", "metrics.report=false", "metrics.display=plain", "rollout.threads=1", "trainer.threads=1",
)  # fmt: skip
PROGRAM_TEXT = '''
import json, os, time, urllib.request
from pathlib import Path

FOLDER = Path({folder!r})


def post(url, body):
    head = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)) as response:
        return json.load(response)


def ask(messages):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, {{"model": "policy", "messages": messages}})["choices"][0]["message"]


def passes():
    """Whether this program may continue: no more than so many do."""
    number = len(os.listdir(FOLDER / "passed"))
    if number >= int((FOLDER / "limit").read_text()):
        return False
    try:
        os.close(os.open(FOLDER / "passed" / str(number), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


messages = [{{"role": "user", "content": json.loads(os.environ["AREAL_LIKE_ROW"])["prompt"]}}]
messages += [ask(messages), {{"role": "user", "content": "1+1="}}]
held = FOLDER / "held" / str(os.getpid())
held.touch()
while not passes():
    time.sleep(0.02)
held.unlink()
answer = ask(messages)
post(os.environ["AREAL_LIKE_REWARD_URL"], {{"reward": len(answer["content"]) % 3}})
'''


class Hold:
    """Holds programs between their two answers: no more than a limit of them continue."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("held", "passed"):
            (folder / name).mkdir(parents=True)
        self.let_pass(0)
        self.program = folder / "program.py"
        self.program.write_text(PROGRAM_TEXT.format(folder=str(folder)))

    def let_pass(self, number: int) -> None:
        """Let programs continue until so many have."""
        (self._folder / "new").write_text(str(number))
        (self._folder / "new").rename(self._folder / "limit")

    @property
    def num_passed(self) -> int:
        return len(list((self._folder / "passed").iterdir()))

    def held(self) -> list[psutil.Process]:
        """Programs that wait now."""
        return [process for path in (self._folder / "held").iterdir() if (process := program_of(int(path.name)))]


def program_of(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return process if is_alive(process) and any(PROGRAM in word for word in process.cmdline()) else None
    except psutil.NoSuchProcess:
        return None


def num_failed(run: KilledRun) -> int:
    """Samples of the ledger that ended without a reward."""
    db = sqlite3.connect(f"{(run.folder / LEDGER_FILE).as_uri()}?mode=ro", uri=True)
    with closing(db):
        return int(db.execute("SELECT COUNT(*) FROM samples WHERE verdict_kind != 'scored'").fetchone()[0])


def wait_until(run: KilledRun, is_reached: Callable[[], bool]) -> None:
    """The run's end with an error ends the wait."""
    while not is_reached():
        run.watch(0.1)


def killed(run: KilledRun, hold: Hold, kind: str) -> None:
    """Kill a process of this kind while programs are between their answers; they end with it, and others start."""
    before = hold.held()
    assert before
    run.kill(kind)
    assert run.kills[kind] == 1
    wait_until(run, lambda: not any(map(is_alive, before)))
    wait_until(run, lambda: bool(hold.held()))


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    return Hold(tmp_path / "hold")


@pytest.fixture
def run(tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> Iterator[KilledRun]:
    monkeypatch.delenv(SHARED, raising=False)  # `KilledRun` finds the processes among its descendants
    command = f"{{command: [python, {hold.program}], preload: [urllib.request], reward: agent}}"
    (runs_dir := tmp_path / "runs").mkdir()
    (scratch := tmp_path / "scratch").mkdir()
    overrides = [*SMALL, f"rollout.workflow_options={command}", f"runs_dir={runs_dir}"]
    started = KilledRun(str(CONFIG), overrides, "agents", runs_dir, scratch)
    yield started
    started.destroy()


def test_samples_of_killed_programs_workers_and_controllers_are_trained_on_once(run: KilledRun, hold: Hold) -> None:
    wait_until(run, lambda: len(hold.held()) > 1)
    os.kill(hold.held()[0].pid, 9)
    wait_until(run, lambda: num_failed(run) == 1)
    killed(run, hold, "rollout")
    hold.let_pass(ADMITTED)
    run.wait_for_step(1)
    wait_until(run, lambda: hold.num_passed == ADMITTED and bool(hold.held()))
    killed(run, hold, "controller")
    hold.let_pass(1_000_000)
    run.wait_for_end()
    found = run.recount()
    assert found["findings"] == []
    assert (found["consumed"], found["dropped"], found["failed"]) == (NUM_STEPS * GROUPS, 0, 1)
    assert found["trained"] == NUM_STEPS * GROUPS * GROUP_SIZE - 1, "all but the sample whose program was killed"
    assert run.num_resumes == 1
    assert run.left() == {"processes": [], "shared_memory": [], "temporary_files": []}
