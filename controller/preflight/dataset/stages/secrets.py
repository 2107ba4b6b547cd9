"""Stage `secrets`: keys, tokens, passwords in addresses, and private keys in any text of the row.

The patterns are those of `detect-secrets` for named services, and some for services that it does not know. Its
detectors of random-looking strings and of assignments to names such as `password` are left out: they report formulas
and program text. Nothing is sent anywhere: whether a key is valid is not asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from areal_like.private_text import SECRETS
from controller.preflight.dataset.libraries import library
from controller.preflight.dataset.port import Finding, NoOptions, Row, RowStage

_POSSIBLE = re.compile(r"[A-Za-z0-9_\-+/=.:]{16,}|PRIVATE KEY|://[^\s/:@]+:[^\s/@]+@|(?i:AccountKey)")
"""A text without such a part has none of the secrets below; this only saves work."""
WINDOW, OVERLAP = 4_000, 1_000
"""Number of characters that the detectors see at once, and that two such parts have in common."""
_LEFT_OUT = ("Base64 High Entropy String", "Hex High Entropy String", "Secret Keyword", "Public IP (ipv4)")


class Secrets(RowStage[NoOptions]):
    """See the module."""

    name = "secrets"
    is_private = True

    def prepare(self) -> None:
        util: Any = library("detect_secrets.core.plugins.util")
        classes = util.get_mapping_from_secret_type_to_class()
        self._detectors = [kind() for name, kind in sorted(classes.items()) if name not in _LEFT_OUT]

    def check(self, row: Row) -> Finding | None:
        for name, text in row.texts:
            if _POSSIBLE.search(text) is None:
                continue
            for kind, pattern in SECRETS:
                if (match := pattern.search(text)) is not None:
                    return Finding(kind, f"`{name}`: {masked(match[0])}")
            for part in _windows(text):
                for detector in self._detectors:
                    for secret in detector.analyze_string(part):
                        return Finding(str(detector.secret_type), f"`{name}`: {masked(str(secret))}")
        return None


def _windows(text: str) -> Iterator[str]:
    """Overlapping parts of a text: the time of some detectors grows with the square of a text's length."""
    for start in range(0, max(1, len(text) - OVERLAP), WINDOW - OVERLAP):
        part = text[start : start + WINDOW]
        if _POSSIBLE.search(part) is not None:
            yield part


def masked(secret: str) -> str:
    """A secret of which only the beginning can be read."""
    shown = secret[: min(6, len(secret) // 4)]
    return f"{shown}... ({len(secret)} characters)"
