"""The content of a dashboard's page, as its script keeps it."""

from __future__ import annotations

import copy
from typing import Any


def applied(old: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """What static/run.js does."""
    new = copy.deepcopy(old)
    for key, part in change.items():
        if key != "charts":
            new[key] = part
            continue
        for name, one in part.items():
            if one is None:
                del new["charts"][name]
            elif "whole" in one:
                new["charts"][name] = one["whole"]
            else:
                for series, (begin, xs, ys) in zip(new["charts"][name]["series"], one["ends"], strict=True):
                    series["xs"][begin:], series["ys"][begin:] = xs, ys
    return new
