"""User functions that do everything a scorer should not; imported by the scoring processes of the tests."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

not_callable = 3
held: list[bytes] = []


def note(row: dict[str, Any], pid: int) -> None:
    """Leave a process id for the test to look at."""
    with Path(row["note"]).open("a") as file:
        file.write(f"{pid}\n")


def daemon(row: dict[str, Any]) -> None:
    """A child in a session of its own that nobody waits for, and that ignores every polite signal."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note(row, os.getpid())
            time.sleep(600)
        os._exit(0)
    os.wait()
    while len(Path(row["note"]).read_text().split()) < row.get("num_notes", 1):
        time.sleep(0.01)


def score(row: dict[str, Any], response: str, **info: Any) -> Any:
    action = row["do"]
    if "note" in row and action != "daemon":
        note(row, os.getpid())
    return ACTIONS[action](row, response, info)


def drawn(row: dict[str, Any], response: str, **info: Any) -> Any:
    """As `score`, by somebody who says that it may give another number the next time."""
    return score(row, response, **info)


drawn.is_deterministic = False  # type: ignore[attr-defined]


def _hang(row: dict[str, Any], response: str, info: dict[str, Any]) -> float:
    time.sleep(600)
    return 1.0


def _hang_until_the_file_is_gone(row: dict[str, Any], response: str, info: dict[str, Any]) -> float:
    while Path(row["file"]).exists():
        time.sleep(0.01)
    return 1.0


def _hang_with_daemons(row: dict[str, Any], response: str, info: dict[str, Any]) -> float:
    row = {**row, "num_notes": 3}
    daemon(row | {"num_notes": 2})
    daemon(row)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def _bomb(row: dict[str, Any], response: str, info: dict[str, Any]) -> float:
    """64 processes, each in a session of its own, some of them orphans."""
    root = os.getpid()
    for _ in range(6):
        if os.fork() == 0:
            os.setsid()
    note(row, os.getpid())
    if os.getpid() % 3 == 0 and os.getpid() != root:
        os._exit(0)
    time.sleep(600)
    return 1.0


def _raise(row: dict[str, Any], response: str, info: dict[str, Any]) -> float:
    raise RuntimeError("first line\nthe last line")


def _flood(row: dict[str, Any], response: str, info: dict[str, Any]) -> float:
    line = "x" * 1000
    for _ in range(2000):
        print(line)
    os.write(1, b"\x00\xff" * 1000)
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    return 1.0


def _fork_and_return(row: dict[str, Any], response: str, info: dict[str, Any]) -> float:
    daemon(row)
    return 0.5


def _memory(row: dict[str, Any], response: str, info: dict[str, Any]) -> float:
    while True:
        held.append(os.urandom(1 << 20) * 32)
        time.sleep(0.01)


def _crash_once(row: dict[str, Any], response: str, info: dict[str, Any]) -> float:
    if len(Path(row["note"]).read_text().split()) == 1:
        os._exit(3)
    return 0.25


def _slow(row: dict[str, Any], response: str, info: dict[str, Any]) -> float:
    time.sleep(row["seconds"])
    return 1.0


async def _answer_later(row: dict[str, Any], response: str, info: dict[str, Any]) -> dict[str, float]:
    await asyncio.sleep(0.001)
    return {"reward": 0.75, "style": 2.0}


ACTIONS: dict[str, Any] = {
    "length": lambda row, response, info: float(len(response)),
    "info": lambda row, response, info: {"value": info["num_tokens"], "stopped": info["finish_reason"] == "stop"},
    "nan": lambda row, response, info: float("nan"),
    "infinite component": lambda row, response, info: {"value": 1.0, "style": float("inf")},
    "text": lambda row, response, info: "1.0",
    "nothing": lambda row, response, info: None,
    "exit": lambda row, response, info: sys.exit(0),
    "os._exit": lambda row, response, info: os._exit(0),
    "segfault": lambda row, response, info: ctypes.string_at(0),
    "pid": lambda row, response, info: float(os.getpid()),
    "async": _answer_later,
    "hang": _hang,
    "hang until the file is gone": _hang_until_the_file_is_gone,
    "hang with daemons": _hang_with_daemons,
    "bomb": _bomb,
    "raise": _raise,
    "flood": _flood,
    "fork and return": _fork_and_return,
    "memory": _memory,
    "slow": _slow,
    "crash once": _crash_once,
}


def wrong_signature(row: dict[str, Any]) -> float:
    return 1.0


def as_trl_has_them(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


def as_verl_has_them(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(ground_truth in solution_str)


def as_openrlhf_has_them(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    return {"rewards": [1.0 for _ in queries]}


def with_options(row: dict[str, Any], response: str, *, scale: float, **info: Any) -> float:
    return scale


def graded(row: dict[str, Any], response: str, **info: Any) -> dict[str, float]:
    return {"value": 0.5, "correct": 1.0}
