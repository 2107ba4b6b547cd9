"""A scorer whose module hangs while it is imported: named while it is waited for, given up in words, never left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

import services
from areal_like.errors import UserError
from areal_like.import_check import USER_PATH
from services.processes.process_tree import living
from services.reward import pool
from services.reward.config import RewardSettings, ScorerSettings

pytestmark = pytest.mark.processes

PATIENCE_S = 120.0
HANGS = """
import os, time
open(os.environ["AREAL_LIKE_USER_PATH"] + "/pid.new", "w").write(str(os.getpid()))
os.rename(os.environ["AREAL_LIKE_USER_PATH"] + "/pid.new", os.environ["AREAL_LIKE_USER_PATH"] + "/pid")
time.sleep(600)
"""
SETTINGS = RewardSettings(scorers=(ScorerSettings(kind="mine_hangs:score"),))
COMMAND = """
import asyncio, sys
sys.path.insert(0, {home!r})
from services.reward.config import RewardSettings, ScorerSettings
from services.reward.pool import Pool
async def main():
    await Pool(RewardSettings(scorers=(ScorerSettings(kind="mine_hangs:score"),))).start()
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_hangs.py").write_text(HANGS)
    monkeypatch.setenv(USER_PATH, str(tmp_path))


def test_module_that_hangs_is_named_and_then_given_up_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool, "SLOW_START_S", 0.2)
    monkeypatch.setattr(pool, "START_TIMEOUT_S", 2.0)

    async def start() -> None:
        one = pool.Pool(SETTINGS)
        try:
            await one.start()
        finally:
            await one.close()

    with pytest.raises(UserError) as refused:
        asyncio.run(start())
    said = "loading reward scorer mine_hangs:score has taken 0.2 s so far; it is abandoned after 2 s\n"
    assert said in capsys.readouterr().err
    assert "mine_hangs:score" in str(refused.value)
    assert "took longer than 2 s" in str(refused.value)
    assert "check the code that runs when the module of the scorer is imported" in str(refused.value)


@pytest.mark.skipif(sys.platform != "linux", reason="needs parent-death signals")
def test_scoring_process_that_hangs_in_an_import_dies_with_a_command_killed_outright(tmp_path: Path) -> None:
    home = str(Path(services.__path__[0]).parent)
    command = subprocess.Popen([sys.executable, "-c", COMMAND.format(home=home)])
    give_up_s = time.monotonic() + PATIENCE_S
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    pid = int((tmp_path / "pid").read_text())
    command.kill()
    command.wait()
    while living([pid]) and time.monotonic() < give_up_s:
        time.sleep(0.01)
    assert not living([pid])
