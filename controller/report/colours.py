"""Colours of charts by name, for a light and a dark background, and the colour of each activity.

The categories follow Okabe and Ito's colour-blind safe set, darkened for white and lightened for black until each has a
contrast of at least 3:1 to its background (WCAG 1.4.11; a test computes it). Ordered classes use a ramp from light to
dark. No chart distinguishes its series by colour alone: lines differ in dash, waits are hatched.
"""

from __future__ import annotations

from collections.abc import Mapping

LIGHT: Mapping[str, str] = {
    "paper": "#ffffff", "ink": "#1c2127", "muted": "#5a6472", "grid": "#e3e6ea",
    "c0": "#0072b2", "c1": "#d55e00", "c2": "#008a64", "c3": "#a8457f", "c4": "#946200", "c5": "#4b5cc4",
    "c6": "#6b7280", "c7": "#8c2f2f", "c8": "#0f7c8a", "c9": "#6b7a00",
    "r0": "#8fb8dc", "r1": "#5f97cb", "r2": "#3b78b8", "r3": "#6d5fb0", "r4": "#94489b", "r5": "#b03a72",
    "r6": "#b83a43", "r7": "#7d2a1e",
    "bad": "#b3261e", "warn": "#9a5b00",
}  # fmt: skip

DARK: Mapping[str, str] = {
    "paper": "#14171c", "ink": "#e8eaee", "muted": "#a3adba", "grid": "#2b313a",
    "c0": "#56b4e9", "c1": "#ff8a3d", "c2": "#2cc295", "c3": "#e88fc4", "c4": "#f0c23c", "c5": "#9fa8ff",
    "c6": "#a9b1bd", "c7": "#ff7f7f", "c8": "#5fd0dc", "c9": "#c6d44a",
    "r0": "#3f6d94", "r1": "#4f8dc6", "r2": "#79b2e8", "r3": "#a79bec", "r4": "#cf8bd6", "r5": "#ee83b0",
    "r6": "#ff8c85", "r7": "#ffc19a",
    "bad": "#ff7a70", "warn": "#f0b13c",
}  # fmt: skip

NUM_CATEGORIES = 8
"""Colours of a chart's series; c8 and c9 are for activities."""
NUM_RAMP = 8

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "solid", "dash", "dot")
"""Dash of the series in a slot, as named by plotly."""

_ACTIVITIES: Mapping[str, str] = {
    "generate": "c0",
    "score": "c5",
    "forward_backward": "c2",
    "train": "c2",
    "packing": "c8",
    "workflow": "c8",
    "update": "c9",
    "publish": "c3",
    "swap": "c7",
    "paused": "c7",
    "checkpoint": "c4",
    "export": "c4",
    "load": "c6",
    "ledger": "c6",
}
_WAITS: Mapping[str, str] = {
    "wait:batch": "c1",
    "wait:work": "c4",
    "wait:lease": "c4",
    "wait:score": "c3",
    "wait:teacher": "c8",
    "wait:version": "c9",
    "wait:requests": "c6",
    "wait:traffic": "c6",
}


def is_wait(activity: str) -> bool:
    """Whether the process only waits during this activity (it is hatched)."""
    return activity == "idle" or activity.startswith("wait:")


def activity_colour(activity: str) -> str:
    """Name of the colour of an activity; activities without their own colour share a grey, waits an orange."""
    if is_wait(activity):
        return _WAITS.get(activity, "c1" if activity != "idle" else "c6")
    return _ACTIVITIES.get(activity, "c6")
