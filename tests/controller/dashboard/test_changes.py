"""Claims about changes: applied to the old content they give the new one, and they are short."""

from __future__ import annotations

import copy
import json

from page_content import applied

from controller.dashboard.changes import changes


def chart(name="loss", num=20, more=0.0):
    ys = [float(x) for x in range(num - 1)] + [num - 1 + more]
    return {"key": name, "x": {"label": "step"}, "series": [{"name": "a", "xs": list(range(num)), "ys": ys}]}


def check(old, new):
    change = changes(old, new)
    assert applied(old, change) == new
    return change


def test_nothing_changed_is_an_empty_change():
    content = {"run": {"kind": "running"}, "charts": {"loss": chart()}}
    assert changes(content, copy.deepcopy(content)) == {}


def test_a_curve_that_grew_is_sent_by_its_end():
    old, new = {"charts": {"loss": chart(num=300)}}, {"charts": {"loss": chart(num=301)}}
    assert len(json.dumps(check(old, new))) < 120


def test_a_last_point_that_moved_is_sent_alone():
    change = check({"charts": {"loss": chart(num=300)}}, {"charts": {"loss": chart(num=300, more=0.5)}})
    assert change["charts"]["loss"]["ends"] == [[299, [299], [299.5]]]


def test_a_curve_that_became_shorter_is_right_too():
    check({"charts": {"loss": chart(num=30)}}, {"charts": {"loss": chart(num=29)}})


def test_another_frame_or_mostly_new_points_are_sent_whole():
    old = {"charts": {"loss": chart(num=30)}}
    renamed = copy.deepcopy(old)
    renamed["charts"]["loss"]["series"][0]["name"] = "b"
    shifted = copy.deepcopy(old)
    shifted["charts"]["loss"]["series"][0]["ys"][2] = 9.0
    more = copy.deepcopy(old)
    more["charts"]["loss"]["series"].append({"name": "c", "xs": [1], "ys": [2.0]})
    for new in (renamed, shifted, more):
        assert "whole" in check(old, new)["charts"]["loss"]


def test_charts_and_parts_that_come_and_go():
    change = check(
        {"charts": {"loss": chart()}, "events": [1]}, {"charts": {"kl": chart("kl")}, "events": [2], "run": "x"}
    )
    assert change["charts"]["loss"] is None
    check({"charts": {}}, {"charts": {"loss": chart()}, "run": 1})
