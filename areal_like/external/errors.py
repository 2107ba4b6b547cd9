"""Failures of requests to servers that others run."""

from __future__ import annotations

from areal_like.errors import OperationError, UserError


class ExternalError(OperationError):
    """A request has no answer; other requests may get theirs."""


class RequestRefused(ExternalError):
    """A retry would not help: a status 4xx, a redirect, a reply that is too long or has another form."""


class RequestTimedOut(ExternalError):
    """The time of all attempts is used up."""


class RequestFailed(ExternalError):
    """The server could not be reached, or failed, at every attempt."""


class BudgetUsedUp(ExternalError):
    """The budget is used up, and further requests fail (`on_exhausted: fail`)."""


class ExternalStop(UserError):
    """The user must change something before any further request: the budget is used up, the key is refused, or an
    answer is not recorded. It ends the run; answers so far are recorded."""
