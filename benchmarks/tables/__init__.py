"""Formats result files as Markdown tables, for the documentation and for a result's own page.

Contains the list of tables; plots are in plots.py.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.tables import jobs, long, memory, objectives, parts, planted, turns
from benchmarks.tables.form import Result, stamp

TABLES: dict[str, Callable[[Result], str]] = {
    function.__name__: function
    for function in (
        jobs.quickstart,
        jobs.async_vs_sync,
        jobs.interruption,
        jobs.staleness,
        jobs.sweep,
        jobs.divergence,
        jobs.peer_trl,
        jobs.soak,
        jobs.telemetry,
        jobs.checkpoint,
        parts.engine,
        parts.controller,
        parts.simulator,
        parts.routing,
        parts.weight_transfer,
        parts.delta,
        parts.preference,
        parts.packing,
        memory.logprob_memory,
        memory.sharded_memory,
        memory.checkpoint_parts,
        memory.memory,
        long.long_sequences,
        long.experts,
        parts.prompt_sharing,
        parts.row_order,
        parts.sessions,
        parts.reward,
        parts.reward_rates,
        parts.reward_service,
        parts.environments,
        parts.killed_runs,
        parts.chaos,
        parts.equalities,
        parts.capsules,
        parts.regeneration,
        parts.learning_curves,
        turns.tool_sum,
        turns.transcripts,
        objectives.objectives,
        planted.probe_faults,
        planted.diagnosis,
        planted.data_faults,
        parts.dashboard,
        parts.gpu_suite,
    )
} | {"modes": jobs.paired, "engines": jobs.paired}


def markdown(name: str, result: Result) -> str:
    """A result as Markdown: its table, and below it the command and machine."""
    return "\n\n".join([*([TABLES[name](result)] if name in TABLES else []), stamp(result)])
