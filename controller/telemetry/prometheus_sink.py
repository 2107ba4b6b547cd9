"""An endpoint that Prometheus scrapes: http://host:port/metrics, with the newest values of the run.

Uses Prometheus's conventions for names, types and labels. History is kept by Prometheus.

Names: areal_like_<what>, seconds and bytes as units, `_total` for counters. Counters of a process's heartbeat have the
labels process and role, those of one scorer also scorer; a restarted process starts at zero, as Prometheus expects.
areal_like_run_* describe the whole run, areal_like_train_* are gauges of the newest step, areal_like_eval_* of the
newest evaluation.
"""

from __future__ import annotations

import errno
import math
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from areal_like.errors import UserError
from controller.telemetry.sinks import absent

PREFIX = "areal_like_"
GAUGES = frozenset({"queue", "busy_workers", "processes", "cache.entries", "cache.bytes"})
"""Values of a heartbeat that may decrease; percentiles may too."""
_PERCENTILE = re.compile(r"(?:^|[._])p\d+_s$")
_HELP: Mapping[str, str] = {
    "tokens": "Tokens sampled (rollout) or trained on (trainer).",
    "samples": "Samples finished.",
    "busy_s": "Time spent working.",
    "idle_s": "Time in which no slot was active.",
    "paused_s": "Time in which generation was paused for new weights.",
    "wait_s": "Time spent waiting for a batch.",
    "wait_score_s": "Time in which nothing generated and a sample waited for its score.",
    "wait_teacher_s": "Time in which nothing generated and a sample waited for the log-probs of a teacher.",
    "wait_traffic_s": "Time in which nothing generated and a sample waited for a client.",
    "wait_work_s": "Idle time.",
    "cpu_s": "Processor time of the process itself.",
    "queue": "Requests waiting.",
    "busy_workers": "Scoring processes at work.",
}

Name = tuple[str, bool, str]
"""Metric, whether it is a counter, scorer (or empty)."""


class PrometheusSink:
    """Listens from its construction until it is closed."""

    name = "prometheus"
    kinds = frozenset({"step", "eval", "now"})

    def __init__(
        self, host: str, port: int, *, run: str, losses: Callable[[], Mapping[str, Mapping[str, int]]], remedy: str
    ) -> None:
        """`losses`: returns rows written and lost by every sink. Raises UserError if the package is missing or the port
        is not available.
        """
        try:
            from prometheus_client import CollectorRegistry, core, start_http_server
        except ImportError as error:
            raise absent(self.name, remedy, package="prometheus_client") from error
        self._core, self._run, self._losses = core, run, losses
        self._newest: dict[str, Mapping[str, Any]] = {}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
            raise UserError(
                "the port is in use"
                if is_taken
                else f"cannot listen on this address ({getattr(error, 'strerror', None) or error})",
                where=f"metrics.prometheus: {host}:{port}",
                remedy="set metrics.prometheus.port=0 to use any free port"
                if is_taken
                else "set metrics.prometheus.host=127.0.0.1, or use a port of at least 1024",
            ) from error
        shown = f"[{host}]" if self._server.address_family == socket.AF_INET6 else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def write(self, record: Mapping[str, Any]) -> None:
        """Keep the newest row of its kind for the next scrape."""
        self._newest[record["kind"]] = record

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """Metrics of a scrape; called by the endpoint's own threads."""
        core, newest = self._core, dict(self._newest)
        info = core.GaugeMetricFamily(f"{PREFIX}run_info", "The run whose metrics are served.", labels=["run"])
        info.add_metric([self._run], 1)
        yield info
        if now := newest.get("now"):
            yield core.GaugeMetricFamily(f"{PREFIX}run_policy_version", "Newest policy version.", value=now["version"])
            yield core.CounterMetricFamily(f"{PREFIX}run_steps", "Steps done.", value=now["step"])
            yield from self._groups(now["counts"])
            yield from self._processes(now["processes"])
        for kind, prefix in (("step", "train_"), ("eval", "eval_")):
            if row := newest.get(kind):
                yield from self._row(row, prefix)
        for fate in ("written", "lost"):
            family = core.CounterMetricFamily(f"{PREFIX}sink_{fate}_rows", f"Rows {fate} by sink.", labels=["sink"])
            for sink, counts in self._losses().items():
                family.add_metric([sink], counts[fate])
            yield family

    def describe(self) -> Iterable[Any]:
        """Empty, because the metrics depend on the run."""
        return []

    # ------------------------------------------------------------ families

    def _groups(self, counts: Mapping[str, int]) -> Iterator[Any]:
        core = self._core
        fates = core.CounterMetricFamily(f"{PREFIX}run_groups", "Groups by fate.", labels=["fate"])
        for fate in ("drawn", "consumed", "filtered", "dropped"):
            fates.add_metric([fate], counts[fate])
        yield fates
        for state in ("running", "ready"):
            yield core.GaugeMetricFamily(f"{PREFIX}run_groups_{state}", f"Groups {state} now.", value=counts[state])

    def _processes(self, processes: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
        core = self._core
        memory = core.GaugeMetricFamily(
            f"{PREFIX}resident_memory_bytes", "Resident memory, without children.", labels=["process", "role"]
        )
        up = core.GaugeMetricFamily(
            f"{PREFIX}process_up", "1 if the process reports, otherwise 0.", labels=["process", "role"]
        )
        families: dict[str, Any] = {}
        for name, process in processes.items():
            labels = [name, process["role"]]
            up.add_metric(labels, float(bool(process["incarnation"])))
            if process["rss_mb"] is not None:
                memory.add_metric(labels, process["rss_mb"] * 2**20)
            for key, value in process["counters"].items():
                metric, only_grows, scorer = metric_of(key)
                family = families.get(metric)
                if family is None:
                    make = core.CounterMetricFamily if only_grows else core.GaugeMetricFamily
                    names = ["process", "role", *(["scorer"] if scorer else [])]
                    family = families[metric] = make(metric, _HELP.get(key, f"`{key}` of heartbeats."), labels=names)
                family.add_metric([*labels, *([scorer] if scorer else [])], value)
        yield up
        yield memory
        yield from families.values()

    def _row(self, row: Mapping[str, Any], prefix: str) -> Iterator[Any]:
        for key, value in row.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and math.isfinite(value) and key != "time_s":
                name = PREFIX + prefix + _words(key)
                yield self._core.GaugeMetricFamily(
                    name, f"Value of `{key}` in the latest {row['kind']} row.", value=value
                )


def metric_of(key: str) -> Name:
    """The metric of one heartbeat counter, without `_total` (the client adds it)."""
    scorer = ""
    if key.startswith("scorer."):
        scorer, _, rest = key.removeprefix("scorer.").rpartition(".")
        key = f"scorer_{rest}"
    only_grows = key not in GAUGES and not _PERCENTILE.search(key)
    return PREFIX + _words(key), only_grows, scorer


def _words(key: str) -> str:
    """Convert a key such as `busy_s` to busy_seconds, with only characters that Prometheus allows."""
    if key.endswith(("_s", ".s")) and not key.endswith("_per_s"):
        key = key[:-1] + "seconds"
    elif key.endswith("_per_s"):
        key = key[:-1] + "second"
    return re.sub(r"\W", "_", key, flags=re.ASCII)
