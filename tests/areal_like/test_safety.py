"""What the safety stages find in a text, and what they do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest

from areal_like.errors import UserError
from areal_like.safety import SafetyFilter, SafetyStage


def look(text: str, *stages: dict[str, Any], part: Any = "answers") -> tuple[str, str, dict[str, int]]:
    found = SafetyFilter([SafetyStage.model_validate(one) for one in stages], "rollout.safety").look(text, part)
    return found.text, found.refused_by, dict(found.counts)


@pytest.mark.parametrize(
    ("kind", "options", "text", "masked"),
    [
        ("regex", {"patterns": [r"ab+c", "x"]}, "1 abbc 2 x ABC", "1 [masked] 2 [masked] ABC"),
        ("regex", {"patterns": ["ab", "bc"], "ignore_case": True}, "ABC", "[masked]"),
        ("words", {"words": ["bad", "very Wrong"]}, "Bad, badly very\nwrong!", "[masked], badly [masked]!"),
        ("words", {"words": ["bad"]}, r'{"x": "a\nbad", "y": "\tBad\""}', r'{"x": "a\n[masked]", "y": "\t[masked]\""}'),
        ("words", {"words": ["one bad"]}, r"a\none\nbad C:\nbadly", r"a\n[masked] C:\nbadly"),
        ("words", {"words": ["İstanbul"]}, "in İstanbul, I\u0307stanbul", "in [masked], [masked]"),
        ("words", {"words": ["caf\u00e9", "Straße"]}, "Cafe\u0301, cafe, STRASSE", "[masked], cafe, [masked]"),
        ("words", {"words": ["bad"]}, "ｂａｄ これはbadです bade", "[masked] これは[masked]です bade"),
        ("words", {"words": ["坏词"]}, "这是坏词。坏 词", "这是[masked]。坏 词"),
        ("words", {"words": ["バカ", "คำหยาบ"]}, "おﾊﾞｶさん นี่คือคำหยาบนะ", "お[masked]さん นี่คือ[masked]นะ"),
        ("words", {"words": ["나쁜말"]}, "나쁜말을 나", "[masked]을 나"),
        ("words", {"words": ["बुरा"]}, "बुरा बुरी", "[masked] बुरी"),
        ("secrets", {}, "key sk-ant-" + "a" * 24, "key [masked]"),
        ("personal_data", {}, "to a.b@c.org, DE89 3704 0044 0532 0130 00", "to [masked], [masked]"),
        ("personal_data", {"kinds": ["card"]}, "4111 1111 1111 1111 a@b.org", "[masked] a@b.org"),
        ("personal_data", {}, "4111 1111 1111 1112 and 12 plus 13", "4111 1111 1111 1112 and 12 plus 13"),
    ],
)
def test_a_stage_masks_what_it_finds(kind, options, text, masked):
    assert look(text, {"kind": kind, "action": "mask", "options": options})[0] == masked


def test_stages_apply_in_order_and_one_that_refuses_is_the_last():
    mask = {"kind": "words", "action": "mask", "options": {"words": ["red"]}}
    count = {"kind": "regex", "action": "count", "options": {"patterns": ["blue", "red"]}}
    refuse = {"kind": "regex", "options": {"patterns": ["green"]}}
    assert look("red blue", mask, count, refuse) == (
        "[masked] blue", "", {"safety_words_mask": 1, "safety_regex_count": 1}
    )  # fmt: skip
    text, refused_by, counts = look("green red", refuse, mask)
    assert (text, refused_by) == ("green [masked]", "regex"), "what is refused is stored, and has to be masked"
    assert counts == {"safety_regex_refuse": 1, "safety_words_mask": 1}
    assert look("green red", refuse, {**mask, "action": "refuse"})[1:] == ("regex", {"safety_regex_refuse": 1})
    assert look("plain", mask, refuse) == ("plain", "", {})


def test_a_stage_looks_only_at_its_part():
    stage = {"kind": "words", "look_at": "prompts", "options": {"words": ["bad"]}}
    assert look("bad", stage)[1] == ""
    assert look("bad", stage, part="prompts")[1] == "words"
    made = SafetyFilter([SafetyStage.model_validate(stage)], "x")
    assert (made.looks_at("prompts"), made.looks_at("answers")) == (True, False)


def test_a_function_of_the_user_says_whether_or_where(tmp_path, monkeypatch):
    (tmp_path / "my_safety.py").write_text(
        "def all_of_it(text, least): return len(text) >= least\n"
        "def places(text): return [(0, 1)] if text else None\n"
        "def outside(text): return [[0, 99]]\n"
        "name = 'x'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    stage = {"kind": "my_safety:all_of_it", "options": {"least": 3}}
    assert look("abc", stage)[1:] == ("my_safety:all_of_it", {"safety_all_of_it_refuse": 1})
    assert look("ab", stage)[1] == ""
    assert look("abc", {"kind": "my_safety:places", "action": "mask"})[0] == "[masked]bc"
    with pytest.raises(ValueError, match=r"returned the range \[0, 99\], which is empty or outside the text of 3"):
        look("abc", {"kind": "my_safety:outside"})
    with pytest.raises(UserError, match=r"rollout.safety.0.kind: my_safety:name is not a function"):
        look("abc", {"kind": "my_safety:name"})
    with pytest.raises(UserError, match="module my_safety has no attribute plces"):
        look("abc", {"kind": "my_safety:plces"})


def test_a_function_that_cannot_be_called_as_configured_is_named_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "other_safety.py").write_text(
        "async def later(text): return True\n"
        "class Later:\n    async def __call__(self, text): return True\n"
        "made = Later()\n"
        "def least(text, *, least): return False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for stage, what in (
        ({"kind": "other_safety:later"}, "rollout.safety.0.kind: other_safety:later is asynchronous"),
        ({"kind": "other_safety:made"}, "is asynchronous"),
        ({"kind": "other_safety:least"}, r"rollout.safety.0.options: other_safety:least cannot be called .*'least'"),
        ({"kind": "other_safety:least", "options": {"most": 1}}, "'most'|'least'"),
        ({"kind": "other_safety:least", "options": {"least": 1, "text": "x"}}, "multiple values for argument 'text'"),
    ):
        with pytest.raises(UserError, match=what):
            SafetyFilter([SafetyStage.model_validate(stage)], "rollout.safety")
    SafetyFilter([SafetyStage.model_validate({"kind": "other_safety:least", "options": {"least": 1}})], "x")


def test_truth_values_of_numpy_count_and_other_results_are_named(tmp_path, monkeypatch):
    (tmp_path / "numpy_safety.py").write_text(
        "import numpy as np\n"
        "def whether(text): return np.float32(len(text)) > 2\n"
        "def array(text): return np.array(len(text) > 2)\n"
        "def places(text): return np.array([[0, 1]])\n"
        "def share(text): return 0.01\n"
        "def name(text): return 'no'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for kind in ("whether", "array"):
        assert look("abc", {"kind": f"numpy_safety:{kind}"})[1] == f"numpy_safety:{kind}"
        assert look("ab", {"kind": f"numpy_safety:{kind}"})[1] == ""
    assert look("abc", {"kind": "numpy_safety:places", "action": "mask"})[0] == "[masked]bc"
    for kind, what in (
        ("share", "numpy_safety:share returned 0.01 instead of True"),
        ("name", "returned 'no' instead of True"),
    ):
        with pytest.raises(TypeError, match=what):
            look("abc", {"kind": f"numpy_safety:{kind}"})


def test_words_are_read_from_a_file(tmp_path: Path):
    (tmp_path / "words.txt").write_text("one\n\ntwo words\n")
    assert look("Two  words", {"kind": "words", "options": {"file": str(tmp_path / "words.txt")}})[1] == "words"
    (tmp_path / "empty.txt").write_text("\n")
    for name, what in (("empty.txt", "the word list contains no words"), ("missing.txt", "missing.txt")):
        with pytest.raises(UserError, match=what):
            look("a", {"kind": "words", "options": {"file": str(tmp_path / name)}})


@pytest.mark.parametrize(
    ("stage", "what"),
    [
        (
            {"kind": "word"},
            "there is no safety stage `word`; use regex, words, secrets, personal_data, or module:function",
        ),
        ({"kind": "words"}, "options of stage words: set `words`, or set `file` to a file with one word"),
        ({"kind": "regex", "options": {"patterns": ["("]}}, "`(` is not a regular expression"),
        ({"kind": "secrets", "options": {"patterns": []}}, "options.patterns of stage secrets"),
    ],
)
def test_a_mistake_in_a_stage_is_named(stage, what):
    with pytest.raises(pydantic.ValidationError) as caught:
        SafetyStage.model_validate(stage)
    assert what in str(caught.value)
