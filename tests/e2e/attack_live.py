"""Attacks on a live run and on a standing reward service, and the same without an attack for comparison.

    python tests/e2e/attack_live.py --seconds 60                  both targets, with a control of each
    python tests/e2e/attack_live.py --seconds 5 --target service  a short look at one

Prints the throughput before, during and after, the time to recover, and memory; ends with status 1 where a target died,
did not recover within RECOVERY_S, or took more than GROWTH_BYTES. The attackers are strangers who have an address and
nothing else; started by root they are another user. `--with-key` adds one who holds the client key but no token.

A script, not a test: its answer depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import encodings.idna  # noqa: F401  (attackers cannot read the library of Python once they are another user)
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/services/support")]

import psutil  # noqa: E402
from attack import GROWTH_BYTES, STRANGERS, key_without_token  # noqa: E402

from areal_like.guard import tied  # noqa: E402
from areal_like.process import is_alive  # noqa: E402
from areal_like.transport.credentials import service_keys_folder  # noqa: E402

RECOVERY_S = 5.0
RECOVERED = 0.8
"""Of the throughput before the attack."""
WINDOW_S = 3.0
"""Throughput is the mean over so long."""
START_S = 600.0
NOBODY = 65534
NUM_IN_FLIGHT = 8
SERVICE = {"scorers": [{"kind": "scorer_zoo:score"}], "num_workers": 1, "num_spares": 0, "cache_mb": 0}
RUN = ["num_steps=100000", "eval.every_steps=0", "eval.at_start=false", "metrics.report=false", "metrics.display=plain"]


@dataclass
class Target:
    """Something to attack. `count`: useful work done so far."""

    name: str
    processes: list[psutil.Process]
    addresses: list[str]
    count: Callable[[], float]
    keys: Path
    run_id: str = ""

    @property
    def is_alive(self) -> bool:
        return all(is_alive(one) for one in self.processes)

    @property
    def rss_bytes(self) -> int:
        total = 0
        for one in self.processes:
            with contextlib.suppress(psutil.Error):
                total += one.memory_info().rss
        return total


@dataclass
class Series:
    """Work and memory over time, about ten times a second."""

    target: Target
    rows: list[tuple[float, float, int]] = field(default_factory=list)

    def __enter__(self) -> Series:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._record, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _record(self) -> None:
        while not self._stop.wait(0.1):
            self.rows.append((time.monotonic(), self.target.count(), self.target.rss_bytes))

    def rate(self, begin_s: float, end_s: float) -> float:
        """Work per second between two times."""
        rows = [row for row in self.rows if begin_s <= row[0] <= end_s]
        return (rows[-1][1] - rows[0][1]) / (rows[-1][0] - rows[0][0]) if len(rows) > 1 else 0.0

    def recovery_s(self, end_s: float, wanted: float) -> float | None:
        """From the end of the attack to the begin of the first window with this rate; None: there is none."""
        for begin_s, _, _ in self.rows:
            is_whole = begin_s >= end_s and begin_s + WINDOW_S <= self.rows[-1][0]
            if is_whole and self.rate(begin_s, begin_s + WINDOW_S) >= wanted:
                return begin_s - end_s
        return None

    def memory(self, begin_s: float, end_s: float) -> list[int]:
        return [row[2] for row in self.rows if begin_s <= row[0] <= end_s]


def measure(target: Target, seconds: float, calm_s: float, *, is_attack: bool, with_key: bool) -> list[str]:
    """One line of the table; returns what is wrong."""
    with Series(target) as series:
        start_s = time.monotonic()
        time.sleep(calm_s)
        begin_s = time.monotonic()
        if is_attack:
            strike(target, seconds, with_key)
        else:
            time.sleep(seconds)
        end_s = time.monotonic()
        time.sleep(max(calm_s, RECOVERY_S + WINDOW_S + 1.0))
        is_alive, last_s = target.is_alive, time.monotonic()
    before, during, after = series.rate(start_s, begin_s), series.rate(begin_s, end_s), series.rate(end_s, last_s)
    recovery_s = series.recovery_s(end_s, RECOVERED * before)
    usual = mean(series.memory(start_s, begin_s) or [0])
    growth = max(series.memory(begin_s, last_s) or [0]) - usual
    kept = (series.memory(end_s, last_s) or [0])[-1] - usual
    recovered = "never" if recovery_s is None else f"{recovery_s:.1f} s"
    kind = "attack" if is_attack else "control"
    print(
        f"{target.name:8} {kind:8} {end_s - begin_s:5.1f} s  before {before:9.1f}/s  during {during:9.1f}/s  "
        f"after {after:9.1f}/s  recovered in {recovered:7}  memory {growth / 2**20:+7.1f} MiB at most, "
        f"{kept / 2**20:+7.1f} MiB at the end  {'alive' if is_alive else 'DEAD'}",
        flush=True,
    )
    wrong = [] if is_alive else ["a process died"]
    if is_attack and (recovery_s is None or recovery_s > RECOVERY_S):
        wrong.append(f"throughput was not back within {RECOVERY_S:g} s")
    if is_attack and growth > GROWTH_BYTES * len(target.processes):
        wrong.append(f"memory grew by {growth / 2**20:.0f} MiB")
    return [f"{target.name}: {words}" for words in wrong]


# ---------------------------------------------------------------- attackers


def strike(target: Target, seconds: float, with_key: bool) -> None:
    """Attack every address at once, each from a process of its own, for so long."""
    command = [sys.executable, __file__, "--strike", "--seconds", str(seconds)]
    key = ["--keys", str(target.keys), "--run-id", target.run_id] if with_key else []
    attackers = [subprocess.Popen([*command, *key, "--address", address]) for address in target.addresses]
    for attacker in attackers:
        assert attacker.wait() == 0, "an attacker did not attack to the end"


def strike_one(address: str, seconds: float, keys: Path | None, run_id: str) -> None:
    """Every attack in turn until the time is over."""
    if keys is None and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    attacks: list[Callable[[], None]] = [lambda attack=attack: attack(address) for attack in STRANGERS]  # type: ignore[misc]
    if keys is not None:
        given = {"run_id": run_id} if run_id else {}
        attacks.append(lambda: key_without_token(address, keys, **given))
    until_s = time.monotonic() + seconds
    while True:
        for attack in attacks:
            if time.monotonic() >= until_s:
                return
            with contextlib.suppress(OSError):  # the target refuses connections for a moment
                attack()


# ---------------------------------------------------------------- targets


@contextlib.contextmanager
def standing_service(folder: Path) -> Iterator[Target]:
    """A reward service that stands alone, with a client that keeps it busy."""
    from standing_harness import Standing, connected, task

    service, done, stop, numbers = Standing(folder, SERVICE), [0], threading.Event(), itertools.count()

    async def ask() -> None:
        async with connected([service.address]) as client:

            async def score() -> None:
                while not stop.is_set():
                    number = next(numbers)  # no question is asked twice
                    verdict = await client.score(task("length", number=number), "four", "stop", 1)
                    done[0] += verdict.value == 4.0

            await asyncio.gather(*(score() for _ in range(NUM_IN_FLIGHT)))

    client = threading.Thread(target=lambda: asyncio.run(ask()), daemon=True)
    client.start()
    try:
        processes = [psutil.Process(service.process.pid)]
        yield Target("service", processes, [service.address], lambda: done[0], service_keys_folder())
    finally:
        stop.set()
        client.join(30.0)
        service.close()


@contextlib.contextmanager
def live_run(folder: Path, config: str, overrides: list[str]) -> Iterator[Target]:
    """A run of the whole system; every port it listens on is attacked, its work is the groups it has consumed."""
    arguments = ["train", config, *RUN, f"runs_dir={folder}", "name=attacked", *overrides]
    with (folder / "command.log").open("wb") as log:
        command = subprocess.Popen(
            tied([sys.executable, "-P", "-m", "controller", *arguments]), cwd=folder, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip
    run = folder / "attacked"

    def num_groups() -> float:
        try:
            return float(json.loads((run / "status.json").read_text())["counts"].get("consumed", 0))
        except (OSError, ValueError, KeyError):
            return 0.0

    try:
        until_s = time.monotonic() + START_S
        while num_groups() == 0.0:
            words = (folder / "command.log").read_text(errors="replace")
            assert command.poll() is None, f"the run ended:\n{words}"
            assert time.monotonic() < until_s, f"the run did not begin:\n{words}"
            time.sleep(0.2)
        root = psutil.Process(command.pid)
        processes, ports = [root, *root.children(recursive=True)], set[int]()
        for process in processes:
            with contextlib.suppress(psutil.Error):
                ports |= {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
        run_id = str(json.loads((run / "state.json").read_text())["run_id"])
        servers = [process for process in processes if process.is_running()]
        addresses = [f"tcp://127.0.0.1:{port}" for port in sorted(ports)]
        yield Target("run", servers, addresses, num_groups, run / "keys", run_id)
    finally:
        command.terminate()
        try:
            command.wait(60.0)
        except subprocess.TimeoutExpired:
            command.kill()
            command.wait()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="length of an attack")
    parser.add_argument("--calm", type=float, default=15.0, help="seconds before and after it")
    parser.add_argument("--target", choices=["service", "run", "both"], default="both")
    parser.add_argument("--config", default="quickstart", help="configuration of the run")
    parser.add_argument("--with-key", action="store_true", help="one attacker holds the client key")
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("overrides", nargs="*", help="key=value for the run")
    for name in ("--strike", "--address", "--keys", "--run-id"):  # of the attackers' processes
        parser.add_argument(name, help=argparse.SUPPRESS, **({"action": "store_true"} if name == "--strike" else {}))
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended on the way out
    if given.strike:
        strike_one(given.address, given.seconds, Path(given.keys) if given.keys else None, given.run_id or "")
        return 0
    wrong = []
    with tempfile.TemporaryDirectory(prefix="areal-attack-") as place:
        os.environ["XDG_CONFIG_HOME"] = place  # the user's own keys are not touched
        for name in ("service", "run") if given.target == "both" else (given.target,):
            folder = Path(place) / name
            folder.mkdir()
            made = standing_service(folder) if name == "service" else live_run(folder, given.config, given.overrides)
            with made as target:
                print(f"{name}: attacks go to {', '.join(target.addresses)}", flush=True)
                for is_attack in (True,) if given.no_control else (False, True):
                    wrong += measure(target, given.seconds, given.calm, is_attack=is_attack, with_key=given.with_key)
    for words in wrong:
        print(f"FAILED {words}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
