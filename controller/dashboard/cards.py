"""Single numbers of a run: its state, current activity, and processes.

Curves are in live_charts.py; the state is determined in owner_host.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.dashboard.actions import refusals
from controller.dashboard.live_charts import last
from controller.dashboard.run_list import state_words
from controller.report.charts import Number, number
from controller.report.data import RunData
from controller.report.overview import text
from controller.report.run_charts import eval_points
from controller.run_folder.formatting import megabytes, percent, span
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.run_notes import read_notes
from controller.runs.facts import Facts

Card = dict[str, str]


def header(folder: RunFolder, facts: Facts | None) -> dict[str, Any]:
    """State and progress, and the actions that are refused, with the reasons."""
    note = text(read_notes(folder.root).line)
    if facts is None:
        return {
            "label": text(folder.name, 120), "kind": "damaged", "reason": "", "note": note, "updated_s": None,
            "refused": refusals(None),
        }  # fmt: skip
    status = facts.status
    preparing = text(status.get("preparing") or "") if facts.where.is_running else ""
    return {
        "label": text(folder.name, 120),
        "kind": facts.where.kind,
        "reason": preparing or state_words(facts.where.kind, facts.where.state),
        "note": note,
        "updated_s": number(status.get("time_s")) or number(facts.where.state.get("updated_s")),
        "refused": refusals(facts.where),
    }


def cards(data: RunData, facts: Facts | None) -> list[Card]:
    """Current numbers; unknown ones are left out."""
    status = facts.status if facts else {}
    found = [
        _progress(data, facts), _left(status, is_running=facts is not None and facts.where.is_running),
        _accuracy(data), _of(data, "reward_mean", "reward", "{:.3f}", "of the last step's samples"),
        _rates(data), _staleness(data), _waited(data),
        _of(data, "response_len_mean", "answer length", "{:,.0f}", "tokens, mean"), _version(status),
    ]  # fmt: skip
    return [card for card in found if card is not None]


def process_rows(facts: Facts | None) -> list[dict[str, str]]:
    """The processes as last reported."""
    rows = []
    for name, one in (facts.processes if facts else {}).items():
        memory = number(one.get("rss_mb"))
        rows.append({
            "name": text(name, 60), "role": text(one.get("role") or "", 30), "state": text(one.get("state") or "", 40),
            "memory": "" if memory is None else megabytes(memory),
        })  # fmt: skip
    return rows


def _card(label: str, value: str, note: str = "") -> Card:
    return {"label": label, "value": value, "note": note}


def _progress(data: RunData, facts: Facts | None) -> Card | None:
    step = facts.step if facts and facts.step is not None else last(data.steps, "step")
    if step is None:
        return None
    planned = (facts.num_steps if facts else None) or number(data.setting("num_steps"))
    return _card("step", f"{step:,.0f}", f"of {planned:,.0f}" if planned else "")


def _left(status: Mapping[str, Any], *, is_running: bool) -> Card | None:
    left_s, elapsed_s = number(status.get("eta_s")), number(status.get("elapsed_s"))
    past = f"{span(elapsed_s)} so far" if elapsed_s is not None else ""
    if not is_running or left_s is None:
        return _card("time", span(elapsed_s)) if elapsed_s is not None else None
    return _card("time left", span(left_s), past)


def _accuracy(data: RunData) -> Card | None:
    points = eval_points(data)
    if not points:
        return None
    best = max(accuracy for _, accuracy in points)
    version, accuracy = points[-1]
    return _card("accuracy", f"{accuracy:.3f}", f"version {version:.0f}; best {best:.3f}")


def _of(data: RunData, key: str, label: str, words: str, note: str) -> Card | None:
    value = last(data.steps, key)
    return None if value is None else _card(label, words.format(value), note)


def _rates(data: RunData) -> Card | None:
    tokens, samples = last(data.steps, "trainer_tokens_per_s"), last(data.steps, "samples_per_s")
    if tokens is None:
        return None
    return _card(
        "tokens/s", f"{tokens:,.0f}", "trained" + (f"; {samples:.3g} samples/s" if samples is not None else "")
    )


def _staleness(data: RunData) -> Card | None:
    highest, mean = last(data.steps, "staleness_max"), last(data.steps, "staleness_mean")
    bound: Number = number(data.setting("staleness.max_staleness"))
    if highest is None:
        return None
    parts = [f"mean {mean:.2f}" if mean is not None else "", f"bound {bound:.0f}" if bound is not None else ""]
    return _card("staleness, highest", f"{highest:.0f}", ", ".join(part for part in parts if part))


def _waited(data: RunData) -> Card | None:
    share = last(data.steps, "trainer_wait_share")
    return None if share is None else _card("trainer waited", percent(share), "of its time since the previous step")


def _version(status: Mapping[str, Any]) -> Card | None:
    version = number(status.get("version"))
    return None if not version else _card("version", f"{version:,.0f}", "of the policy")
