"""The built-in stages, each on rows with and without its fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import OperationError, UserError
from controller.preflight.dataset.columns import Columns
from controller.preflight.dataset.port import Finding, Row, RowStage, SetStage
from controller.preflight.dataset.registry import StageSpec, make_stages
from controller.preflight.dataset.stages import contamination, secrets
from controller.preflight.dataset.stages.secrets import Secrets

COLUMNS = Columns("problem", "answer")
LONG = (
    "Tom buys 12 apples and gives 5 of them to his sister, who eats 2 right away. How many apples does Tom have left?"
)


def row(problem: Any = LONG, answer: Any = "7", number: int = 1, columns: Columns = COLUMNS, **more: Any) -> Row:
    fields = {"problem": problem, "answer": answer, **more}
    return Row(
        number, f"rows.jsonl:{number}", {key: value for key, value in fields.items() if value != "absent"}, columns
    )


def found(kind: str, *rows: Row, **options: Any) -> list[str | None]:
    """The reason for each row, or None."""
    (stage,) = make_stages([StageSpec(kind, options)])
    stage.prepare()
    reasons: list[Finding | None] = []
    if isinstance(stage, RowStage):
        reasons = [stage.check(one) for one in rows]
    else:
        assert isinstance(stage, SetStage)
        stage.open()
        for one in rows:
            sketch = stage.sketch(one)
            reasons.append(None if sketch is None else stage.decide(one.number, one.where, sketch))
        stage.close()
    return [None if finding is None else finding.reason for finding in reasons]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"problem": "absent"}, "missing prompt"),
        ({"problem": " \n"}, "empty prompt"),
        ({"problem": 3}, "wrong type"),
        ({"problem": [{"role": "user", "content": "Add 2 and 3."}]}, None),
        ({"problem": [{"content": "Add 2 and 3."}]}, "wrong type"),
        ({"problem": []}, "empty prompt"),
        ({"answer": "absent"}, "missing answer"),
        ({"answer": ""}, "empty answer"),
        ({"answer": ["7"]}, "wrong type"),
        ({"answer": 7}, None),
        ({"answer": "so it is ####"}, "empty answer"),
        ({"problem": "a\ufffdb"}, "replacement character"),
        ({"problem": "caf\u00c3\u00a9 au lait"}, "wrong encoding"),
        ({"problem": "it\u00e2\u20ac\u2122s late"}, "wrong encoding"),
        ({"problem": "3 \u00c3\u2014 4"}, "wrong encoding"),
        ({"problem": "Ã la carte, naïve, “quoted”, 5 − 3"}, None),
        ({"problem": "a\x00b"}, "control character"),
        ({"problem": "tab\tand\nline"}, None),
        ({"problem": "half \ud83d"}, "an unpaired surrogate"),
        ({"note": ["deep", {"text": "\x07"}]}, "control character"),
        ({"problem": "Find $\\frac{1}{2$."}, "unbalanced markup"),
        ({"problem": "Find $\\frac{1}{2}."}, "unbalanced markup"),
        ({"problem": "Find $\\{x : x > 0\\}$ and pay \\$5."}, None),
        ({"problem": "He pays $5 for a {thing."}, None),
        ({"solution": "\\begin{align*} x = \\boxed{7}"}, "unbalanced markup"),
        ({"problem": "```python\nx = 1\n"}, "unbalanced markup"),
        ({"problem": "[asy] draw((0,0)--(1,1)); Find $\\pi$."}, "unbalanced markup"),
    ],
)
def test_schema(fields: dict[str, Any], reason: str | None) -> None:
    assert found("schema", row(**fields)) == [reason]


def test_schema_without_markup_and_without_answers() -> None:
    assert found("schema", row("Find $\\frac{1}{2$."), markup=False) == [None]
    assert found("schema", row(answer="absent", columns=Columns("problem", None))) == [None]


def test_schema_removes_a_line_that_cannot_be_read() -> None:
    assert found("schema", Row(1, "rows.jsonl:1", {}, COLUMNS, "the line is not JSON")) == ["unreadable line"]


def test_exact_duplicates_ignore_case_spaces_and_punctuation() -> None:
    same = row("tom  BUYS 12 apples!", number=2)
    other = row("Tom buys 12 apples.", "8", number=3)
    assert found("exact_duplicates", row("Tom buys 12 apples."), same, other, row("Tom buys 1.2 apples.")) == [
        None, "same prompt", "same prompt, different answer", None,
    ]  # fmt: skip
    assert found("exact_duplicates", row("A b"), row("a B", "8"), compare="prompt_and_answer") == [None, None]


def test_near_duplicates_have_the_same_numbers_and_answer() -> None:
    pytest.importorskip("rensa")
    reworded = row(LONG.replace("buys", "purchases"), number=2)
    other_number = row(LONG.replace("12", "13"), number=3)
    other_answer = row(LONG.replace("buys", "sells"), "9", number=4)
    rows = (row(), reworded, other_number, other_answer, row("Add all the digits of 2026."))
    assert found("near_duplicates", *rows) == [None, "similar prompt", None, None, None]
    assert found("near_duplicates", *rows, numbers="any", answers="any")[2:4] == ["similar prompt"] * 2
    assert found("near_duplicates", *rows, threshold=1.0) == [None] * 5


def test_near_duplicates_in_chinese() -> None:
    pytest.importorskip("rensa")
    one = "小明有五个苹果，又买了三个，吃了两个，还剩几个苹果？"
    other = one.replace("又买了", "再买了")
    assert found("near_duplicates", row(one, "6"), row(other, "6", number=2)) == [None, "similar prompt"]


def test_length() -> None:
    assert found("length", row("short"), row(), row(answer="7" * 30), max_answer=20) == [
        "short prompt",
        None,
        "long answer",
    ]
    assert found("length", row("word " * 3_000)) == ["long prompt"]


def test_language() -> None:
    pytest.importorskip("py3langid")
    german = row("Ein Bauer hat zwölf Kühe und kauft noch drei dazu. Wie viele Kühe hat er jetzt?")
    formulas = row("$\\text{Wie viele Kühe hat der Bauer noch?}$ $x^2$")
    assert found("language", row(), german, formulas) == [None, "other language", None]
    spanish = row("Los números primos entre veinte y cuarenta son muy pocos.")
    assert found("language", german, spanish, allowed=["de"]) == [None, "other language"]
    with pytest.raises(UserError, match="`xx` is not the code of a supported language"):
        found("language", row(), allowed=["xx"])


@pytest.mark.parametrize(
    ("answer", "reason"), [("7", None), ("see above", "not an answer"), ("\\frac{1}{", "unbalanced braces")]
)
def test_unparseable_answer(answer: str, reason: str | None) -> None:
    assert found("unparseable_answer", row(answer=answer)) == [reason]


@pytest.mark.parametrize(
    ("answer", "solution", "reason"),
    [
        ("7", "12 - 5 = 7\n#### 7", None),
        ("8", "12 - 5 = 7\n#### 7", "different result"),
        ("1000", "#### 1,000", None),
        ("\\frac12", "so $\\boxed{\\frac{1}{2}}$", None),
        ("\\frac13", "so $\\boxed{\\frac{1}{2}}$", "different result"),
        ("3", "both $\\boxed{3}$ and $\\boxed{-3}$", "different result"),
        ("8", "no mark of a result: 7", None),
        ("8", "so it is \\boxed{}", "no result"),
    ],
)
def test_solution_disagrees(answer: str, solution: str, reason: str | None) -> None:
    assert found("solution_disagrees", row(answer=answer, solution=solution)) == [reason]


def test_solution_in_the_column_of_the_answer_is_compared_with_another_column() -> None:
    columns = Columns("problem", "answer")
    published = {"answer": "12 - 5 = 7 #### 7", "columns": columns}
    assert found("solution_disagrees", row(**published), row(final_answer="8", **published)) == [
        None,
        "different result",
    ]


def test_contamination_in_both_directions(tmp_path: Path) -> None:
    pytest.importorskip("rensa")
    evaluation = tmp_path / "eval.jsonl"
    evaluation.write_text(
        json.dumps({"question": LONG, "answer": "7"}) + "\n" + json.dumps({"question": "What is 3 + 4?"}) + "\n"
    )
    longer, part = f"Read this carefully. {LONG} Explain each step.", " ".join(LONG.split()[:12])
    rows = [row(LONG.upper()), row(longer), row(part), row(LONG.replace("his", "her").replace("buys", "gets")),
            row(LONG.replace("12", "13")), row(LONG.replace("buys", "sells"), "9"), row("what is 3 + 4"),
            row("Tom buys a house for his sister. What is its price?")]  # fmt: skip
    assert found("contamination", *rows, files=[str(evaluation)]) == [
        "evaluation prompt", "the prompt contains an evaluation prompt", "the prompt is part of an evaluation prompt",
        "similar evaluation prompt", None, None, "evaluation prompt", None,
    ]  # fmt: skip
    assert found("contamination", *rows[4:6], files=[str(evaluation)], numbers="any", answers="any") != [None, None]


def test_contamination_finds_short_and_chinese_prompts_inside_a_row(tmp_path: Path) -> None:
    pytest.importorskip("rensa")
    evaluation = tmp_path / "eval.jsonl"
    short, formula, chinese = (
        {"question": "How many sides has a regular nonagon?", "answer": "9"},
        {"question": "Compute the value of 5", "answer": "5"},
        {"question": "小明有五个苹果，又买了三个，吃了两个，还剩几个苹果？", "answer": "6"},
    )
    evaluation.write_text("".join(json.dumps(one) + "\n" for one in (short, formula, chinese)))
    rows = [row("Think first. How many sides has a regular nonagon? Give a number.", "9"),
            row("How many sides has a regular nonagon? And a hexagon?", "15"),
            row("Compute the value of 5!", "120"), row("Compute the value of 5 + 7", "absent"),
            row(f"请仔细阅读。{chinese['question']}写出步骤。", "6")]  # fmt: skip
    assert found("contamination", *rows, files=[str(evaluation)]) == [
        "the prompt contains an evaluation prompt", None, None, None, "the prompt contains an evaluation prompt",
    ]  # fmt: skip


def test_contamination_has_one_time_limit_for_the_answers_of_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rensa")
    evaluation = tmp_path / "eval.jsonl"
    lines = [{"question": f"{LONG} {word}", "answer": str(at)} for at, word in enumerate(("a", "b", "c", "d"))]
    evaluation.write_text("".join(json.dumps(one) + "\n" for one in lines))
    limits: list[float] = []
    now_s = iter(range(0, 1_000, 4))
    monkeypatch.setattr(contamination.time, "process_time", lambda: next(now_s))
    monkeypatch.setattr(contamination, "are_same_answers", lambda gold, other, limit_s: bool(limits.append(limit_s)))
    assert found("contamination", row(f"{LONG} e", "\\slow"), files=[str(evaluation)]) == [None]
    assert len(limits) >= 4
    assert limits[:3] == [6.0, 2.0, -2.0]


def test_contamination_names_a_bad_line_of_an_evaluation_file(tmp_path: Path) -> None:
    pytest.importorskip("rensa")
    evaluation = tmp_path / "eval.jsonl"
    evaluation.write_text('{"question": "What is 3 + 4?"}\n{"question": \n')
    with pytest.raises(UserError, match=r"eval.jsonl:2: the line is not JSON"):
        found("contamination", row(), files=[str(evaluation)])


@pytest.mark.parametrize(
    ("text", "is_secret"),
    [
        ("AKIA" + "QYLPMN5HHHFPZAM2", True),
        ("use ghp_" + "a1B2" * 9, True),
        ("AKIA" + "JTFMWSYYVUEQJBND", True),
        ("key sk-ant-" + "a1b2" * 6, True),
        ("postgres://admin:" + "pw12@db.internal:5432/app", True),
        ("-----BEGIN RSA PRIVATE " + "KEY-----", True),
        ("\\frac{123456789012345678901234567890}{2}", False),
        ("Evaluate 1+2+3+4+5+6+7+8+9+10+11+12+13+14+15+16+17", False),
        ("See https://example.org/a/long/path/with/2026/numbers", False),
    ],
)
def test_secrets(text: str, is_secret: bool) -> None:
    pytest.importorskip("detect_secrets")
    reasons = found("secrets", row(f"{LONG} {text}"))
    assert (reasons != [None]) is is_secret


def test_detectors_of_secrets_see_a_bounded_part_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("detect_secrets")
    (stage,) = make_stages([StageSpec("secrets")])
    stage.prepare()
    assert isinstance(stage, Secrets)
    lengths: list[int] = []
    for detector in stage._detectors:
        seen = detector.analyze_string
        monkeypatch.setattr(detector, "analyze_string", lambda text, seen=seen: lengths.append(len(text)) or seen(text))
    assert stage.check(row(note="eyJ" * 10_000)) is None
    assert 0 < max(lengths) <= secrets.WINDOW
    for before in (0, 100, 2_985, 3_990, 20_000):
        finding = stage.check(row(note=" " * before + "AKIA" + "QYLPMN5HHHFPZAM2" + " " * 5_000))
        assert finding is not None
        assert finding.reason == "AWS Access Key"


def test_a_secret_is_masked() -> None:
    pytest.importorskip("detect_secrets")
    (stage,) = make_stages([StageSpec("secrets")])
    stage.prepare()
    assert isinstance(stage, RowStage)
    secret = "hf_" + "a1B2" * 8
    finding = stage.check(row(f"{LONG} {secret}"))
    assert finding is not None
    assert finding.evidence == "`problem`: hf_a1B... (35 characters)"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("write to anna.schmidt@web.de today", "email"),
        ("call +1 212-736-5000 now", "phone"),
        ("call (415) 736-5000", "phone"),
        ("call +49 30 901820", "phone"),
        ("IBAN DE89 3704 0044 0532 0130 00", "iban"),
        ("IBAN DE88 3704 0044 0532 0130 00", None),
        ("card 4111 1111 1111 1111", "card"),
        ("card 4111 1111 1111 1112", None),
        ("Find the remainder of 2127365000 divided by 7", None),
        ("Evaluate 100 - 200 - 3000 and 1, 2, 3, 4, 5, 6, 7", None),
        ("In 1998-2004 the price @ 5 rose", None),
    ],
)
def test_personal_data(text: str, reason: str | None) -> None:
    pytest.importorskip("phonenumbers")
    assert found("personal_data", row(f"{LONG} {text}")) == [reason]


def test_only_the_chosen_personal_data() -> None:
    assert found("personal_data", row("call +1 212-736-5000, a@b.de"), kinds=["email"]) == ["email"]
    assert found("personal_data", row("call +1 212-736-5000"), kinds=["email"]) == [None]


def test_toxic_words_are_whole_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tmp_path / "words.txt"
    words.write_text("ass\nbad phrase\n")
    rows = (row("What a BAD phrase!"), row("A class of 12 assesses it."), row("An ass."))
    assert found("toxic", *rows, words=str(words)) == ["listed word", None, "listed word"]
    (tmp_path / "judging.py").write_text(
        "def judge(text): return 0.9 if 'hate' in text else 0.1\ndef odd(text): return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert found("toxic", row("I hate 12 apples"), row(), classifier="judging:judge") == ["classifier", None]
    with pytest.raises(OperationError, match="not a probability"):
        found("toxic", row(), classifier="judging:odd")
    words.write_text("\n")
    with pytest.raises(UserError, match="contains no words"):
        found("toxic", row(), words=str(words))


def test_pass_rate(tmp_path: Path) -> None:
    verdicts = tmp_path / "verdicts.jsonl"
    values = {"hard": (0, 0), "easy": (1, 1), "good": (0, 1), "once": (0,), "failed": (None, None)}
    verdicts.write_text(
        "".join(json.dumps({"id": key, "value": value}) + "\n" for key, of in values.items() for value in of)
    )
    rows = [row(id=key) for key in (*values, "unknown")]
    assert found("pass_rate", *rows, verdicts=str(verdicts)) == ["too hard", "too easy", None, None, None, None]
    verdicts.write_text('{"id": null, "value": 0}\n' * 2 + '{"id": "hard", "value": 0}\n' * 2)
    assert found("pass_rate", row(), row(id=""), row(id=None), verdicts=str(verdicts)) == [None] * 3
    verdicts.write_bytes(b'{"id": "\xff", "value": 1}\n')
    with pytest.raises(UserError, match="is not UTF-8 text"):
        found("pass_rate", row(), verdicts=str(verdicts))
    verdicts.write_text('{"id": 1}\n')
    with pytest.raises(UserError, match=r"verdicts.jsonl:1: the line is not a JSON object with `id` and `value`"):
        found("pass_rate", row(), verdicts=str(verdicts))


def test_a_function_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_stages.py").write_text(
        "def few(row, least=2):\n    return f'few words' if len(row['problem'].split()) < least else None\n"
        "def odd(row):\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert found("my_stages:few", row("word"), row()) == ["few words", None]
    assert found("my_stages:few", row(), least=50) == ["few words"]
    with pytest.raises(OperationError, match="the function returned 3"):
        found("my_stages:odd", row())
    with pytest.raises(UserError, match="unknown: most"):
        found("my_stages:few", row(), most=3)
