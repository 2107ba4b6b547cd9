"""Command lines of a standalone reward service, shared by several runs, and of the status of services.

    python -m services.reward serve --config rewards.yaml --bind tcp://127.0.0.1:7000
    python -m services.reward status tcp://127.0.0.1:7000
    python -m services.reward keys

Serving is in server.py. A standalone service uses the run id messages.SHARED_RUN: runs distinguish their workers by
prefixing names with their own id.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import yaml

from areal_like.arguments import seconds
from areal_like.config import ProcessSpec
from areal_like.errors import OperationError, UserError
from areal_like.import_check import check_not_shadowed, prefer_installation
from areal_like.process import (
    FAILED,
    ORDERLY,
    PRIVATE_UMASK,
    limit_threads,
    report_end,
    start_logging,
    until_signalled,
)
from areal_like.transport.credentials import make_service_credentials, service_keys_folder
from areal_like.transport.service_stats import ask_stats
from areal_like.wire.messages import SHARED_RUN, StatsReply
from services.reward.config import RewardSettings
from services.reward.server import RewardServer, ServiceSpec, check

log = logging.getLogger(__name__)

KEYS_DEFAULT = "default: ~/.config/areal_like/reward-keys"
COMMANDS = ("serve", "status", "keys")
THEIRS = ("addresses", "curve_dir", "ask_for")
REMEDY = "see the section `reward` in docs/reference.md"
"""Config keys with which a run refers to a service; they have no effect in a service's own config."""
KEYS_WORDS = """\
{folder}: keys of the service and of its clients.
Runs of this user on this machine find {default} automatically. For others copy the folder, without server.secret and
with its permissions, and name it as reward.curve_dir. Only clients that hold it can use the service."""


def main(argv: Sequence[str]) -> int:
    """Run one of COMMANDS and return the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except BaseException as error:  # the fault boundary of the process
        return report_end(error)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.reward", description="Run a standalone reward service.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="start a service that scores answers for any number of runs until SIGTERM or Ctrl-C"
    )
    serve.add_argument(
        "--config", required=True, type=Path, help="YAML file with a `reward` section, for example the config of a run"
    )
    serve.add_argument(
        "--bind",
        default="tcp://127.0.0.1:0",
        help="address to listen on, tcp://HOST:PORT; port 0 chooses any free port",
    )
    serve.add_argument(
        "--curve-dir", type=Path, help=f"folder with the keys of the service, created if missing ({KEYS_DEFAULT})"
    )
    serve.add_argument("--name", default="reward", help="name of the service in logs and statistics")
    serve.add_argument(
        "--silence-s",
        type=seconds,
        default=15.0,
        help="remove clients that send nothing for this many seconds (default: 15)",
    )
    serve.set_defaults(run=_serve)
    status = commands.add_parser(
        "status", help="print health and statistics; the exit status is 1 if a service does not respond"
    )
    status.add_argument(
        "target", nargs="+", help="address of a standalone service (tcp://HOST:PORT), or the folder of a run"
    )
    status.add_argument("--curve-dir", type=Path, help=f"folder with the keys of the service ({KEYS_DEFAULT})")
    status.add_argument(
        "--timeout-s", type=seconds, default=5.0, help="maximum time to wait for each reply, in seconds (default: 5)"
    )
    status.add_argument("--json", action="store_true", help="print one JSON object per service")
    status.set_defaults(run=_status)
    keys = commands.add_parser("keys", help="create the keys of a service and its clients")
    keys.add_argument("folder", type=Path, nargs="?", help=KEYS_DEFAULT)
    keys.set_defaults(run=_keys)
    return parser


# ------------------------------------------------------------ serve


def _serve(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments.config)
    limit_threads(1)
    start_logging(arguments.name)
    os.umask(PRIVATE_UMASK)
    prefer_installation()
    check_not_shadowed()
    keys = _made_keys(arguments.curve_dir)
    spec = ServiceSpec(
        name=arguments.name,
        run_id=SHARED_RUN,
        bind_address=arguments.bind,
        curve_dir=keys,
        silence_s=arguments.silence_s,
    )
    server = RewardServer(spec, settings, on_address=lambda address: print(address, flush=True))
    asyncio.run(until_signalled(server.run))
    return ORDERLY


def read_settings(path: Path) -> RewardSettings:
    """Read the service's settings from a YAML file. Raises UserError, which names the key."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"the file cannot be read ({' '.join(str(error).split())[:300]})", where=str(path)) from error
    section = found.get("reward", found) if isinstance(found, dict) else found
    if not isinstance(section, dict):
        raise UserError(
            "the file has no `reward` section",
            where=str(path),
            remedy="write, for example, reward: {scorers: [{kind: math}]}",
        )
    try:
        settings = RewardSettings.model_validate(section)
    except pydantic.ValidationError as error:
        raise _as_mistake(error.errors()[0], path) from error
    if useless := [key for key in THEIRS if getattr(settings, key)]:
        remedy = "remove this key, which belongs in the config of a run that uses this service"
        raise UserError(f"reward.{useless[0]} has no effect on a standalone service", where=str(path), remedy=remedy)
    check(settings)
    return settings


def _as_mistake(error: Any, path: Path) -> UserError:
    key = ".".join(["reward", *map(str, error["loc"])])
    if error["type"] != "extra_forbidden":
        return UserError(f"{key}: {error['msg']}", where=str(path), remedy=REMEDY)
    near = difflib.get_close_matches(str(error["loc"][-1]), RewardSettings.model_fields, n=1)
    return UserError(f"there is no key `{key}`", where=str(path), remedy=f"did you mean {near[0]}?" if near else REMEDY)


# ------------------------------------------------------------ status


def _status(arguments: argparse.Namespace) -> int:
    places = [place for target in arguments.target for place in _places(target, arguments.curve_dir)]
    is_well = True
    for address, run_id, curve_dir in places:
        question = ask_stats(address, curve_dir=curve_dir, run_id=run_id, timeout_s=arguments.timeout_s)
        try:
            stats = asyncio.run(question)
        except OperationError as error:
            is_well = False
            facts: dict[str, Any] = {"address": address, "state": "unreachable", "reason": str(error)}
            print(json.dumps(facts) if arguments.json else f"{address} is unreachable: {error}")
            continue
        if arguments.json:
            print(json.dumps({"address": address, **msgspec.to_builtins(stats)}))
        else:
            sys.stdout.write(page(address, stats))
    return ORDERLY if is_well else FAILED


def _places(target: str, curve_dir: Path | None) -> list[tuple[str, str, Path]]:
    """Address, run id and keys of the services of `target`."""
    if "://" in target:
        return [(target, SHARED_RUN, curve_dir or service_keys_folder())]
    specs = [ProcessSpec.load(path) for path in sorted(Path(target).glob("processes/reward*.json"))]
    if not specs:
        raise UserError(
            "the target is neither an address nor a run that started reward services",
            where=target,
            remedy="specify tcp://HOST:PORT or the folder of a run",
        )
    return [(spec.bind_address, spec.run_id, Path(spec.curve_dir)) for spec in specs if spec.bind_address is not None]


def page(address: str, stats: StatsReply) -> str:
    """One service's health, pool, verdicts, cache and latencies, as lines of text."""
    counters = stats.counters

    def count(name: str) -> str:
        return f"{counters.get(name, 0.0):,.0f}"

    lines = [
        f"{address}: {stats.state}, {stats.name} (process {stats.pid}), up {stats.uptime_s:,.0f} s",
        f"  scorers    {stats.label}",
        f"  processes  {count('processes')} ready, {count('busy_workers')} of {stats.num_workers} busy, "
        f"{count('pool.started')} started, {count('pool.killed_overdue')} killed overdue, "
        f"{count('pool.killed_memory')} for memory, {count('pool.died_busy')} died",
        f"  queue      {count('queue')} waiting; {count('refused_full')} refused when full, "
        f"{count('refused_draining')} when draining; {count('duplicates')} requested twice",
        "  verdicts   " + ", ".join(f"{count(kind)} {kind}" for kind in ("scored", "timed_out", "crashed", "invalid"))
        + f"; {count('retries')} retries",
        f"  cache      {count('cache.hits')} hits, {count('cache.misses')} misses, {count('cache.entries')} scores in "
        f"{counters.get('cache.bytes', 0.0) / 2**20:.1f} MB",
        "  seconds    " + " ".join(f"{name:>9}" for name in ("p50", "p95", "p99", "answers", "failed")),
    ]  # fmt: skip
    rows = [("queueing", "queue_", ""), ("scoring", "score_", "")]
    rows += [(name, f"scorer.{name}.", f"scorer.{name}.") for name in stats.scorers]
    for title, prefix, counted in rows:
        cells = [f"{counters.get(f'{prefix}{share}_s', 0.0):9.4f}" for share in ("p50", "p95", "p99")]
        if counted:
            failed = sum(counters.get(f"{counted}{kind}", 0.0) for kind in ("timed_out", "crashed", "invalid"))
            cells += [f"{counters.get(f'{counted}answers', 0.0):9,.0f}", f"{failed:9,.0f}"]
        lines.append(
            f"    {title}\n             {' '.join(cells)}" if len(title) > 8 else f"    {title:<8} {' '.join(cells)}"
        )
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------ keys


def _keys(arguments: argparse.Namespace) -> int:
    folder = arguments.folder or service_keys_folder()
    if any(folder.glob("*.secret")):
        raise UserError(
            "the folder already contains keys",
            where=str(folder),
            remedy="remove these keys first, or choose a different folder",
        )
    make_service_credentials(folder)
    print(KEYS_WORDS.format(folder=folder, default=service_keys_folder()))
    return ORDERLY


def _made_keys(folder: Path | None) -> Path:
    """The service's keys, created if there are none; logs who can use them."""
    folder = folder or service_keys_folder()
    is_new = not (folder / "server.secret").exists()
    make_service_credentials(folder)
    log.info("%s keys in %s; copy this folder without server.secret to each client, and set reward.curve_dir to "
             "the copy",
             "created" if is_new else "using", folder)  # fmt: skip
    return folder
