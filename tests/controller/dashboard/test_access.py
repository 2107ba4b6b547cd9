"""Claims about who may read and who may act."""

from __future__ import annotations

import pytest

from areal_like.errors import UserError
from controller.dashboard.access import HEADERS, TOKEN_VARIABLE, Access, is_loopback

TOKEN = "a-token-of-enough-signs"


@pytest.fixture(autouse=True)
def without_a_token_in_the_environment(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_reading_is_open_on_a_loopback_address_and_acting_never_is(host):
    access = Access.of(host)
    assert not access.reads_need_token
    assert len(access.token) >= 32
    assert not access.is_token("")
    assert not access.is_token(None)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org"])
def test_reading_needs_a_token_on_any_other_address(host):
    assert Access.of(host).reads_need_token
    assert not is_loopback(host)


def test_two_servers_generate_different_tokens():
    assert Access.of("127.0.0.1").token != Access.of("127.0.0.1").token


def test_a_given_token_protects_reading_on_loopback_too(monkeypatch):
    assert Access.of("127.0.0.1", TOKEN).reads_need_token
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    access = Access.of("127.0.0.1")
    assert access.reads_need_token
    assert access.is_token(TOKEN)
    assert not access.is_token(TOKEN + "x")
    assert not access.is_token("é")


@pytest.mark.parametrize("token", ["", "short", "sixteen signs & more", "x" * 201])
def test_a_token_that_can_be_guessed_or_breaks_an_address_is_refused(token, monkeypatch):
    with pytest.raises(UserError, match=r"--token.*16 to 200.*remove this setting"):
        Access.of("127.0.0.1", token)
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(UserError, match=TOKEN_VARIABLE):
        Access.of("127.0.0.1")


@pytest.mark.parametrize("header", ["127.0.0.1:8787", "localhost:9000", "[::1]:8787", "192.0.2.1", "LOCALHOST"])
def test_the_server_answers_to_addresses_and_to_its_own_names(header):
    assert Access.of("127.0.0.1").knows_host(header)


@pytest.mark.parametrize(
    "header", ["evil.example:8787", "127.0.0.1.evil.example", "", None, "localhost.evil", "[::1", "@"]
)
def test_a_name_of_another_site_is_refused_whatever_address_it_leads_to(header):
    assert not Access.of("127.0.0.1").knows_host(header)


def test_the_name_that_the_user_gave_is_known():
    assert Access.of("node7.example").knows_host("node7.example:8787")


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ({"Host": "localhost:8787", "Origin": "http://localhost:8787"}, True),
        ({"Host": "localhost:8787"}, True),
        ({"Host": "localhost:8787", "Origin": "http://localhost:9999"}, False),
        ({"Host": "localhost:8787", "Origin": "http://evil.example"}, False),
        ({"Host": "localhost:8787", "Origin": "null"}, False),
        ({"Host": "localhost:8787", "Sec-Fetch-Site": "same-site"}, False),
        ({"Host": "localhost:8787", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": "null"}, False),
    ],
)
def test_only_pages_of_this_server_and_programs_may_act(headers, is_own):
    assert Access.is_same_origin(headers) is is_own


def test_the_content_policy_allows_no_inline_code_and_no_other_place():
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
