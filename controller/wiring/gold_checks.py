"""Checks of gold answers by the notation and comparison of scorer `math`."""

from __future__ import annotations

from services.reward.scorers.gold_checks import are_same_answers as are_same_answers
from services.reward.scorers.gold_checks import gold_fault as gold_fault
from services.reward.scorers.gold_checks import result_of as result_of
from services.reward.scorers.gold_checks import results_differ as results_differ
from services.reward.scorers.gold_checks import stated_answer as stated_answer
