"""Stage `personal_data`: e-mail addresses, telephone numbers, bank accounts and credit cards in any text of the row.

Telephone numbers are found by `phonenumbers` (Google's libphonenumber), account numbers by the check digits of ISO
13616, card numbers by the issuer's prefix and Luhn's check digit. Names and postal addresses are not detected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from areal_like.errors import UserError
from areal_like.private_text import cards, emails, ibans
from areal_like.settings import Settings
from controller.preflight.dataset.libraries import library
from controller.preflight.dataset.port import Finding, Row, RowStage
from controller.preflight.dataset.stages.secrets import masked

Kind = Literal["email", "phone", "iban", "card"]
_PHONE = re.compile(r"(?<![\w.,$^_{\\])(?:\+\s?\d|\(\d{2,5}\)|\d)[\d\s().\-/]{6,22}\d(?![\w%])")
_WRITTEN_AS_PHONE = re.compile(r"^\+|^\(\d{2,5}\)\s?\d{2,4}[\s.\-]\d|^(?:1[\s.\-])?\d{3}([\s.\-])\d{3}\1\d{4}$")
"""International, or grouped as telephone numbers are: a row of digits in a problem is a number."""


class PersonalOptions(Settings):
    """Options of stage `personal_data`."""

    kinds: tuple[Kind, ...] = Field(("email", "phone", "iban", "card"), min_length=1)
    """What is looked for."""
    regions: tuple[str, ...] = ("US", "GB", "DE", "FR")
    """Countries (ISO 3166) whose telephone numbers are recognised without the international prefix."""


class PersonalData(RowStage[PersonalOptions]):
    """See the module."""

    name = "personal_data"
    Options = PersonalOptions
    is_private = True

    def prepare(self) -> None:
        if "phone" in self.options.kinds:
            self._phones: Any = library("phonenumbers")
            for region in self.options.regions:
                if region not in self._phones.SUPPORTED_REGIONS:
                    remedy = "use an ISO 3166 country code, such as US"
                    raise UserError(
                        f"`{region}` is not the code of a supported country",
                        where="personal_data: regions",
                        remedy=remedy,
                    )

    def check(self, row: Row) -> Finding | None:
        finders = {"email": _email, "phone": self._phone, "iban": _iban, "card": _card}
        for name, text in row.texts:
            for kind in self.options.kinds:
                if found := finders[kind](text):
                    return Finding(kind, f"`{name}`: {masked(found)}")
        return None

    def _phone(self, text: str) -> str:
        for match in _PHONE.finditer(text):
            written = match[0].strip()
            if _WRITTEN_AS_PHONE.search(written) and any(
                self._is_phone(written, region) for region in self._regions(written)
            ):
                return written
        return ""

    def _regions(self, written: str) -> tuple[str | None, ...]:
        return (None,) if written.startswith("+") else self.options.regions

    def _is_phone(self, written: str, region: str | None) -> bool:
        try:
            number = self._phones.parse(written, region)
        except self._phones.NumberParseException:
            return False
        return bool(self._phones.is_possible_number(number) and self._phones.is_valid_number(number))


def _email(text: str) -> str:
    return _first(emails(text))


def _iban(text: str) -> str:
    return _first(ibans(text))


def _card(text: str) -> str:
    return _first(cards(text))


def _first(matches: Iterator[re.Match[str]]) -> str:
    return next((match[0] for match in matches), "")
