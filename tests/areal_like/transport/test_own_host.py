"""Which address of this host others can reach."""

from __future__ import annotations

import pytest

from areal_like.errors import UserError
from areal_like.transport.sockets import own_host


def test_a_run_on_loopback_stays_on_loopback():
    assert own_host("tcp://127.0.0.1:4000") == "127.0.0.1"


def test_an_address_that_is_none_is_the_users_mistake():
    with pytest.raises(UserError, match="no network route to the controller"):
        own_host("tcp://no-such-host.invalid:4000")
