"""Patterns of secrets and personal data in texts, which need no library.

The stages of `areal-like data` (controller/preflight/dataset/stages) and the stages of `rollout.safety` use them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

SECRETS = (
    ("Anthropic key", re.compile(r"\bsk-ant-[A-Za-z0-9_-]{20,}")),
    ("Hugging Face token", re.compile(r"\bhf_[A-Za-z0-9]{30,}")),
    ("Google API key", re.compile(r"\bAIza[A-Za-z0-9_-]{35}")),
    ("OpenAI key", re.compile(r"\bsk-(?:proj-|svcacct-)?[A-Za-z0-9_-]{32,}")),
    ("Private key", re.compile(r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY")),
)
"""Kind and pattern of keys of named services."""
EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![\w@])")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")
_CARD = re.compile(r"(?<![\w.,+\-*/^])(?:\d{4}([ -]?)\d{4}\1\d{4}\1\d{4}|3[47]\d{2}([ -]?)\d{6}\2\d{5})(?![\w.]\d|\d)")
_ISSUER = re.compile(r"4|5[1-5]|2[2-7]|3[47]|6(?:011|4[4-9]|5)")


def emails(text: str) -> Iterator[re.Match[str]]:
    """E-mail addresses."""
    return EMAIL.finditer(text) if "@" in text else iter(())


def ibans(text: str) -> Iterator[re.Match[str]]:
    """International Bank Account Numbers with right check digits."""
    return (match for match in _IBAN.finditer(text) if is_iban(match[0]))


def cards(text: str) -> Iterator[re.Match[str]]:
    """Card numbers with the prefix of an issuer and the right check digit."""
    for match in _CARD.finditer(text):
        digits = re.sub(r"\D", "", match[0])
        if _ISSUER.match(digits) and is_luhn(digits):
            yield match


def is_iban(text: str) -> bool:
    """Whether the check digits of an International Bank Account Number are right (ISO 13616: modulo 97)."""
    bare = text.replace(" ", "")
    if not 15 <= len(bare) <= 34:
        return False
    return int("".join(str(int(sign, 36)) for sign in bare[4:] + bare[:4])) % 97 == 1


def is_luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of the others (Luhn's formula, ISO/IEC 7812-1)."""
    doubled = [int(digit) * (2 if place % 2 else 1) for place, digit in enumerate(reversed(digits))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0
