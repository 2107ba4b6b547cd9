"""Requests scores from a server: a blocking call for scoring processes, with the failures of scorers.

Attempts, deadlines and the key are in areal_like/external/http_client.py; what is sent, and the format of a reply, are
in remote.py and llm_judge.py. A refused request is `invalid`, one that failed at every attempt `crashed`, and one whose
time is used up `timed_out`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from areal_like.errors import OperationError
from areal_like.external.errors import BudgetUsedUp, RequestFailed, RequestRefused, RequestTimedOut
from areal_like.external.http_client import HttpClient
from areal_like.external.settings import EndpointOptions
from services.reward.scorers.port import CannotJudge, TookTooLong

_T = TypeVar("_T")


class EndpointFailed(OperationError):
    """The server could not be reached, or failed, at every attempt; the request is retried by the service."""


class Requests:
    """Runs requests on a loop of its own, from one thread; the loop exists as long as the process."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, request: Coroutine[Any, Any, _T]) -> _T:
        """Run a request to its end. Raises CannotJudge, TookTooLong, EndpointFailed."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        try:
            return self._runner.run(request)
        except (RequestRefused, BudgetUsedUp) as error:
            raise CannotJudge(str(error)) from error
        except RequestTimedOut as error:
            raise TookTooLong(str(error)) from error
        except RequestFailed as error:
            raise EndpointFailed(str(error)) from error


class Endpoint:
    """Call `post` from one thread."""

    def __init__(self, url: str, options: EndpointOptions, headers: Mapping[str, str], where: str) -> None:
        """Raises UserError if the key or the HTTP library is missing."""
        self._client = HttpClient(url, options, headers, where)
        self._requests = Requests()

    def post(self, body: Any) -> bytes:
        """Send `body` as JSON and return the reply's bytes. Raises CannotJudge, TookTooLong, EndpointFailed."""
        return self._requests.run(self._client.post(as_json(body)))


def as_json(body: Any) -> bytes:
    """A request as JSON. Raises CannotJudge."""
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise CannotJudge(f"the row cannot be sent as JSON ({error})") from error
