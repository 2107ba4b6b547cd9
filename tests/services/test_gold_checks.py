"""Gold answers: which of them scorer `math` can compare with, and which results of solutions agree with them."""

from __future__ import annotations

import signal
import time

import pytest

from services.reward.scorers import gold_checks
from services.reward.scorers.gold_checks import are_same_answers, gold_fault, result_of, results_differ

USABLE = [
    "7", "-3.5", "1,000", "3/4", "\\frac{3}{4}", "2\\sqrt{3}", "x^2 + 3x - 1", "(1, 2)", "[0, 1)", "\\{1, 2\\}",
    "12\\%", "\\text{Evelyn}", "(B)", "\\text{(C)}", "10\\text{ cm}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
    "1011_2", "8:30", "(-\\infty, 3]", "x \\le 3", "2 or 3", "\\emptyset", "3 \\pm \\sqrt{2}", "2^{4950}", "even",
    "90^\\circ", "\\$5.50",
]  # fmt: skip
UNUSABLE = [
    ("", "no answer"), ("N/A", "not an answer"), ("\\text{unknown}", "not an answer"), ("12?", "not an answer"),
    ("see the figure", "not an answer"), ("\\frac{1}{", "unbalanced braces"), ("}", "unbalanced braces"),
    ("1" * 500, "long answer"), ("Both of them have the same number of apples", "prose"),
    ("9^{9^{9^{9}}}", "too large to evaluate"), ("100000!!", "too large to evaluate"),
]  # fmt: skip


@pytest.mark.parametrize("text", USABLE)
def test_an_answer_that_can_be_compared_has_no_fault(text: str) -> None:
    assert gold_fault(text) is None


@pytest.mark.parametrize(("text", "reason"), UNUSABLE)
def test_an_answer_that_cannot_be_compared_says_why(text: str, reason: str) -> None:
    fault = gold_fault(text)
    assert fault is not None
    assert fault[0] == reason


def test_the_number_of_words_is_an_option() -> None:
    assert gold_fault("two red apples") is None
    assert gold_fault("two red apples", max_words=2) == ("prose", "two red apples")


def test_known_forms_are_not_given_to_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> bool:
        raise AssertionError(text)

    gold_checks._fault.cache_clear()
    monkeypatch.setattr(gold_checks, "_is_read", fail)
    for text in USABLE:
        gold_fault(text)


def test_a_parse_that_takes_too_much_processor_time_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(text: str) -> bool:
        while True:
            pass

    gold_checks._fault.cache_clear()
    monkeypatch.setattr(gold_checks, "_is_read", hang)
    monkeypatch.setattr(gold_checks, "PARSE_LIMIT_S", 0.05)
    handler = signal.getsignal(signal.SIGVTALRM)
    fault = gold_fault("\\unheardof{x}")
    assert fault is not None
    assert fault[0] == "too slow to parse"
    assert signal.getsignal(signal.SIGVTALRM) is handler
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_work_that_catches_errors_is_still_ended() -> None:
    tries = 0

    def work() -> str:
        nonlocal tries
        for _ in range(5):
            tries += 1
            try:
                end_s = time.process_time() + 0.5
                while time.process_time() < end_s:
                    pass
            except Exception:  # as math-verify does
                continue
        return "not ended"

    with pytest.raises(TimeoutError):
        gold_checks._within(0.05, work)
    assert tries == 1


def test_work_that_catches_everything_is_interrupted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gold_checks, "AGAIN_S", 0.05)

    def work() -> None:
        for _ in range(2):
            try:
                while True:
                    pass
            except BaseException:
                continue
        while True:
            pass

    with pytest.raises(TimeoutError):
        gold_checks._within(0.05, work)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("solution", "result"),
    [("6 + 1 = 7\n#### 7", "7"), ("\\boxed{\\frac12}", "\\frac12"), ("\\boxed{1} and \\boxed{2}", "1, 2"), ("7", "")],
)
def test_result_of_a_solution(solution: str, result: str) -> None:
    assert result_of(solution) == result


def test_results_are_compared_in_any_notation() -> None:
    assert are_same_answers("0.5", "\\frac{1}{2}")
    assert not are_same_answers("0.5", "\\frac{1}{3}")
    assert not results_differ("1000", "#### 1,000")
    assert results_differ("1000", "#### 100")
    assert results_differ("3", "\\boxed{3}, \\boxed{-3}")
    assert not results_differ("8:34 pm", "\\boxed{20:34}, or \\boxed{8:34 \\text{ p.m.}}")
