"""Requests to one external model: its budget, its recorded answers, and its counters.

Attempts and deadlines are in http_client.py, the file in records.py. What is asked, and what a reply means, is up to
the caller; chat.py reads replies. A reply that the caller cannot read is counted but not recorded, so that it does not
answer later requests; one with `error` and without `choices` is a failed attempt.

A budget is checked before each request against the sums of the file, which all processes of the run share. Requests
that are under way when it is used up are still paid, so it may be exceeded by what runs at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_like.errors import UserError
from areal_like.external.chat import error_in
from areal_like.external.errors import BudgetUsedUp, ExternalStop, RequestRefused
from areal_like.external.http_client import HttpClient, shown
from areal_like.external.records import AnswerRecords, Totals
from areal_like.external.settings import ModelEndpointOptions
from areal_like.secret_values import replaced

_T = TypeVar("_T")


class ModelClient:
    """Call `ask` on one event loop."""

    def __init__(self, options: ModelEndpointOptions, path: str, where: str, *, max_concurrency: int = 8) -> None:
        """Args:
            options: endpoint, budget and records; `options.records` names the file.
            path: below `base_url`, such as `/chat/completions`.
            where: the setting, for errors.
            max_concurrency: number of requests at once.

        Raises:
            UserError: no key, no HTTP library, or a budget or replay without a file.
        """
        self.options, self.where = options, where
        self._path, self._url = path, f"{options.base_url}{path}"
        file = None if options.records is None else Path(options.records).expanduser()
        if file is None and options.has_budget:
            what = "a budget requires a file that all processes share, but no file is set"
            raise UserError(what, where=where, remedy="set `records` to the file in which to record the replies")
        if options.record == "replay" and (file is None or not file.is_file()):
            what = "there is no such file" if file is not None else "no file is set to replay answers from"
            remedy = "set `records` to the file of an earlier run, such as RUN/external/NAME.jsonl"
            raise UserError(what, where=f"{where}: records {file or ''}".rstrip(), remedy=remedy)
        self._records = AnswerRecords(file)
        self._http: HttpClient | None = None
        if options.record != "replay":
            self._http = HttpClient(
                self._url, options, {}, where, max_connections=max_concurrency, ends_without_key=True,
                is_failure=error_in,
            )  # fmt: skip
        self._free = asyncio.Semaphore(max_concurrency)
        self._sent = Totals()
        self._num_recorded = 0

    @property
    def shown_url(self) -> str:
        """Its address for messages."""
        return shown(self._url)

    async def ask(
        self, body: Mapping[str, Any], read: Callable[[Any], _T], *, salt: int | None = None, is_repeatable: bool = True
    ) -> _T:
        """What `read` makes of the reply to a request: a recorded one, or the endpoint's.

        Args:
            body: of the request, without `model` and `extra_body`, which are added.
            read: takes a reply decoded from JSON, and raises RequestRefused if it has another form.
            salt: part of the key in addition to the body, for a request that does not contain its seed.
            is_repeatable: equal requests may get the same answer.

        Raises:
            ExternalStop: the run must end: budget used up, key refused, answer not recorded, file not writable.
            ExternalError: this request has no answer.
        """
        options = self.options
        full = {"model": options.model, **body, **options.extra_body}
        key = _key(self._path, full, salt)
        if options.record == "replay" or (options.record == "reuse" and is_repeatable):
            found = self._recorded(key, read)
            if found is not None:
                self._num_recorded += 1
                return found[0]
        if options.record == "replay":
            what = f"{options.records} contains no answer to a request of this run ({_start_of(body)})"
            remedy = "use the configuration, seed and data of the recorded run, or record: reuse to ask the endpoint"
            raise ExternalStop(what, where=self.where, remedy=remedy)
        async with self._free:
            self._check_budget()
            return await self._send(full, key, read)

    def _recorded(self, key: str, read: Callable[[Any], _T]) -> tuple[_T] | None:
        """What `read` makes of the recorded reply; None if there is none that may be used."""
        try:
            self._records.refresh()
            reply = self._records.find(key)
        except (OSError, msgspec.MsgspecError) as error:
            raise self._unreadable(error) from error
        if reply is None:
            return None
        try:
            return (read(reply),)
        except RequestRefused:
            if self.options.record == "replay":
                raise
            return None  # of a file that another program wrote: the endpoint may have a better one

    def _unreadable(self, error: Exception) -> ExternalStop:
        what = f"{self._records.path}: the recorded answers cannot be read ({error})"
        return ExternalStop(what, where=self.where, remedy="set records to another file")

    async def _send(self, full: dict[str, Any], key: str, read: Callable[[Any], _T]) -> _T:
        assert self._http is not None
        try:
            content = msgspec.json.encode(full)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise RequestRefused(f"the request cannot be sent as JSON ({error})") from error
        started_s = time.monotonic()
        received = await self._http.post(content)
        seconds = time.monotonic() - started_s
        text = replaced(received.decode(errors="replace"), self._http.secrets)
        try:
            reply = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RequestRefused(f"{self.shown_url} sent a reply that is not JSON ({error})") from error
        tokens = _usage(reply)
        try:
            made = read(reply)
        except RequestRefused:
            self._count(key, tokens or (0, 0), seconds)
            raise
        is_kept = self.options.record != "off"
        self._count(key, tokens or (0, 0), seconds, *((full, reply) if is_kept else ()))
        if tokens is None and self.options.has_budget:
            what = f"{self.shown_url} reports no token counts (`usage`), so the budget cannot be checked"
            raise ExternalStop(what, where=self.where, remedy="remove max_cost and max_tokens_total")
        return made

    def _count(
        self, key: str, tokens: tuple[int, int], seconds: float, request: Any = None, reply: Any = None
    ) -> None:  # fmt: skip
        """Count an answered request in the sums and in the file. tokens: of prompt and reply. request, reply: None if
        texts are not recorded. Raises ExternalStop."""
        tokens_in, tokens_out = tokens
        cost = self.options.cost(tokens_in, tokens_out)
        try:
            self._records.add(
                key, model=self.options.model, tokens_in=tokens_in, tokens_out=tokens_out, cost=cost, seconds=seconds,
                request=request, reply=reply,
            )  # fmt: skip
        except OSError as error:
            what = f"{error.filename or self._records.path}: {error.strerror or error}: answers cannot be recorded"
            raise ExternalStop(
                what, where=self.where, remedy="free disk space, or set records to another file"
            ) from error
        sums = self._sent
        sums.requests, sums.seconds = sums.requests + 1, sums.seconds + seconds
        sums.tokens_in, sums.tokens_out = sums.tokens_in + tokens_in, sums.tokens_out + tokens_out
        sums.cost += cost

    def budget_end(self) -> str:
        """The limit that is used up, and how much is used; empty if none is. Raises ExternalStop: the file cannot be
        read."""
        found = self._used_up()
        return "" if found is None else f"{found[0]}: {found[1]}"

    def _used_up(self) -> tuple[str, str] | None:
        """The option that is used up, and in words how much of it is used; None if there is none."""
        options = self.options
        if not options.has_budget:
            return None
        try:
            spent = self._records.refresh()
        except OSError as error:
            raise self._unreadable(error) from error
        if options.max_tokens_total is not None and spent.tokens >= options.max_tokens_total:
            return "max_tokens_total", f"{spent.tokens:,} of {options.max_tokens_total:,} tokens"
        if options.max_cost is not None and spent.cost >= options.max_cost:
            return "max_cost", f"a cost of {spent.cost:.6g} of {options.max_cost:g}"
        return None

    def _check_budget(self) -> None:
        found = self._used_up()
        if found is None:
            return
        options, (limit, used) = self.options, found
        what = f"the budget of model {options.model} at {shown(options.base_url)} is used up ({used})"
        if options.on_exhausted == "fail":
            raise BudgetUsedUp(what)
        remedy = f"increase {limit} and resume; the answers so far are in {self._records.path}"
        raise ExternalStop(what, where=self.where, remedy=remedy)

    def counters(self) -> dict[str, float]:
        """Monotonic counters of this process: requests answered by the endpoint and by the records, failed attempts,
        tokens, cost and seconds."""
        sent = self._sent
        return {
            "requests": sent.requests,
            "recorded": self._num_recorded,
            "failed_attempts": self._http.num_failures if self._http is not None else 0,
            "tokens_in": sent.tokens_in,
            "tokens_out": sent.tokens_out,
            "cost": sent.cost,
            "request_s": sent.seconds,
        }

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()


def _key(path: str, body: Mapping[str, Any], salt: int | None) -> str:
    """Hash of a request. The address is no part of it, so that records can be used with another server."""
    try:
        facts = msgspec.json.encode([path, body, salt], order="deterministic")
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise RequestRefused(f"the request cannot be sent as JSON ({error})") from error
    return hashlib.blake2b(facts, digest_size=16).hexdigest()


def _usage(reply: Any) -> tuple[int, int] | None:
    """Tokens of prompt and reply, as the endpoint counts them; None if it does not."""
    usage = reply.get("usage") if isinstance(reply, dict) else None
    if not isinstance(usage, dict):
        return None
    given, made = usage.get("prompt_tokens"), usage.get("completion_tokens", 0)
    counts = [count for count in (given, made) if isinstance(count, int) and not isinstance(count, bool) and count >= 0]
    return (counts[0], counts[1]) if len(counts) == 2 else None


def _start_of(body: Mapping[str, Any]) -> str:
    said = body.get("messages") or body.get("prompt") or ""
    last = said[-1].get("content", "") if isinstance(said, list) and said and isinstance(said[-1], dict) else said
    text = " ".join(str(last).split())[:80]
    return "".join(character if character.isprintable() else "?" for character in text)
