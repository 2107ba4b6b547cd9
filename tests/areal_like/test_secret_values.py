"""Secrets of the environment are replaced in texts; ordinary values and names are not."""

from __future__ import annotations

import logging
import sys

import pytest

from areal_like.plain_text import LineFormatter
from areal_like.secret_values import print_traceback, replaced, without_secrets

SECRET = "Zx9-secret-value"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "OPENAI_APIKEY", "MY_SECRET", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "PGPASSWORD",
     "MY_CREDENTIALS", "SERVICE_AUTH", "githubtoken", "GOOGLE_PASSPHRASE"],
)  # fmt: skip
def test_values_of_secret_variables_are_replaced_by_their_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    assert without_secrets(f"401: bad key {SECRET}!") == f"401: bad key [{name}]!"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "Zx9-not-a-secret"), ("MONKEY", SECRET), ("KEYBOARD", SECRET), ("MY_TOKEN", "short"),
        ("SSH_AUTH_SOCK", "/tmp/ssh-a/agent.1"), ("SERVICE_AUTH", "kerberos"), ("KEY_COUNT", "1234567890"),
        ("HOME_URL", "https://example.org/page"),
    ],
)  # fmt: skip
def test_other_values_stay(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert without_secrets(f"a text with {value}") == f"a text with {value}"


def test_only_the_password_of_an_address_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", f"postgres://me:{SECRET}@db:5432/x")
    assert without_secrets(f"no route to postgres://me:{SECRET}@db:5432/x") == (
        "no route to postgres://me:[DATABASE_URL]@db:5432/x"
    )


def test_a_secret_within_another_leaves_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", SECRET)
    monkeypatch.setenv("B_KEY", f"{SECRET}-longer-1")
    assert without_secrets(f"{SECRET}-longer-1") == "[B_KEY]"
    assert replaced("abc", [("b", "x")]) == "a[x]c"


def test_logs_and_tracebacks_have_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    try:
        try:
            raise ValueError(SECRET)
        except ValueError as cause:
            raise RuntimeError(f"with {SECRET}") from cause
    except RuntimeError as error:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed with %s", (SECRET,), sys.exc_info())
        line = LineFormatter("%(message)s").format(record)
        print_traceback(error)
    err = capsys.readouterr().err
    assert "RuntimeError: with [MY_TOKEN]" in err
    for text in (line, err):
        assert SECRET not in text
        assert text.count("[MY_TOKEN]") >= 2
