"""The environment `openenv`: a session of an OpenEnv server, over its WebSocket.

Each episode has one session. The package openenv is not used here: messages are JSON, and the server runs in a separate
environment (decision 0106).

A turn that the server's action class rejects is answered with the error message, from which a policy can learn; it does
not count as a step. Every other error of the server, and its loss, is a failure of the episode. A server without
capacity is retried until `step_timeout_s` has passed. The address of a server may contain a key, so messages show only
scheme and host.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import aiohttp

from areal_like.environment import Step
from areal_like.errors import OperationError, UserError
from services.environment.adapters.actions import OPTIONS, ActionPattern, check_mapping
from services.environment.mcp_servers import without_addresses

MAX_MESSAGE_BYTES = 16 << 20
MAX_SEED = 2**31
"""Largest seed of NumPy's generators."""
ASK_AGAIN_S = 0.2
"""Interval between two attempts at a server without capacity."""
MAX_FAULT_CHARS = 500
_SESSIONS: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()
"""The HTTP session of all episodes of a process."""


class OpenEnvFailed(OperationError):
    """The server cannot be reached, reported an error, or sent an invalid reply."""


class OpenEnvEnvironment:
    """One session."""

    def __init__(
        self, *, url: str, action_field: str | None = None, action: Mapping[str, Any] | None = None,
        observation_field: str | None = None, pattern: str | None = None, reset: Mapping[str, Any] | None = None,
        reset_columns: Sequence[str] = (), correct_at: float | None = None,
    ) -> None:  # fmt: skip
        """Args:
            url: address of the server, such as http://127.0.0.1:8000.
            action_field: the field of the server's action that holds the turn's text; None: the policy writes the
                action's fields as a JSON object.
            action: further fields of every action.
            observation_field: the field of the observation that the policy sees; None: the observation as JSON.
            pattern: a regular expression that finds the action in a turn; None: the whole turn.
            reset: arguments of every reset; `seed` is always added, and a server uses those it knows.
            reset_columns: columns of the row that are arguments of the reset.
            correct_at: sum of rewards from which an episode counts as `correct`; None: no such component.

        Raises:
            UserError: an option of another form.
        """
        self._url = _socket_url(url)
        if isinstance(reset_columns, str) or not all(isinstance(one, str) for one in reset_columns):
            raise UserError(
                f"`reset_columns` must be a list of column names, not {reset_columns!r}",
                where=f"{OPTIONS}.reset_columns",
                remedy="write, for example, reset_columns: [task_id]",
            )
        self._action_field, self._observation_field = action_field, observation_field
        self._action, self._reset = check_mapping("action", action), check_mapping("reset", reset)
        self._pattern, self._columns, self._correct_at = ActionPattern(pattern), list(reset_columns), correct_at
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._sum, self._num_invalid, self._was_rewarded = 0.0, 0, False

    async def reset(self, row: dict[str, Any], seed: int) -> Step:
        """Open a session and begin. Raises OpenEnvFailed."""
        missing = [name for name in self._columns if name not in row]
        if missing:
            raise OpenEnvFailed(f"the row has no {', '.join(missing)}, which is listed in reset_columns")
        arguments = {**self._reset, **{name: row[name] for name in self._columns}, "seed": seed % MAX_SEED}
        while True:
            self._socket = await self._connected()
            kind, data = await self._ask("reset", arguments)
            if kind != "error" or data.get("code") != "CAPACITY_REACHED":
                break
            await self.close()
            await asyncio.sleep(ASK_AGAIN_S)
        if kind == "error":
            raise OpenEnvFailed(f"reset: {_words(data)}")
        reward = 0.0 if data.get("reward") is None else data["reward"]
        return Step(observation=self._text(data), reward=reward, is_done=data.get("done", False))

    async def step(self, action: str) -> Step:
        """Take the action in a text. Raises OpenEnvFailed."""
        fields, fault = self._fields(action)
        if not fault:
            kind, data = await self._ask("step", fields)
            if kind == "error" and data.get("code") == "VALIDATION_ERROR":
                fault = f"The action is not valid: {_words(data)}"
            elif kind == "error":
                raise OpenEnvFailed(f"step: {_words(data)}")
        if fault:
            self._num_invalid += 1
            return Step(observation=fault, components=self._parts())
        reward, is_done = data.get("reward"), data.get("done", False)
        # Steps without a reward are common, but an episode without one is a failure: the check of steps rejects None.
        self._was_rewarded |= reward is not None
        if reward is None and (self._was_rewarded or not is_done):
            reward = 0.0
        self._sum += float(reward) if isinstance(reward, int | float) else 0.0
        return Step(observation=self._text(data), reward=reward, is_done=is_done, components=self._parts())  # type: ignore[arg-type]

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None and not self._socket.closed:
            await self._socket.close()

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        loop = asyncio.get_running_loop()
        session = _SESSIONS.get(loop)
        if session is None:
            connector = aiohttp.TCPConnector(limit=0)
            session = _SESSIONS[loop] = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        try:
            return await session.ws_connect(self._url, max_msg_size=MAX_MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            reason = without_addresses(str(error)) or type(error).__name__
            raise OpenEnvFailed(f"{without_addresses(self._url)} cannot be reached ({reason})") from None

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Send a message; returns type and data of the reply. Raises OpenEnvFailed."""
        assert self._socket is not None, "reset comes first"
        try:
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        except (aiohttp.ClientError, ConnectionError):
            pass  # a server without capacity reports that and closes: the report can still be read
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise OpenEnvFailed(f"{kind}: the server has closed the session ({message.type.name})")
        try:
            answer = json.loads(message.data)
            found, content = answer["type"], answer["data"]
            if found not in ("observation", "error") or not isinstance(content, dict):
                raise ValueError(f"a message {found!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OpenEnvFailed(f"{kind}: the server's reply cannot be read ({type(error).__name__})") from None
        return found, content

    def _fields(self, text: str) -> tuple[dict[str, Any], str]:
        """Fields of the action in a text, and why there is none (empty if there is one)."""
        found = self._pattern.find(text)
        if found is None:
            return {}, "There is no action."
        if self._action_field is not None:
            return {**self._action, self._action_field: found}, ""
        try:
            written = json.loads(found)
        except (ValueError, RecursionError) as error:
            return {}, f"The action is not JSON ({str(error)[:100]})."
        if not isinstance(written, dict):
            return {}, "The action is not a JSON object."
        return {**written, **self._action}, ""

    def _text(self, data: Mapping[str, Any]) -> str:
        observation = data.get("observation")
        if self._observation_field is None:
            return json.dumps(observation, ensure_ascii=False)
        if not isinstance(observation, dict) or self._observation_field not in observation:
            known = ", ".join(observation) if isinstance(observation, dict) else "none"
            raise OpenEnvFailed(f"the observation has no field {self._observation_field}; its fields: {known}")
        value = observation[self._observation_field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _parts(self) -> dict[str, float]:
        parts = {"invalid_actions": float(self._num_invalid)}
        if self._correct_at is not None:
            parts["correct"] = float(self._sum >= self._correct_at)
        return parts


def _socket_url(url: Any) -> str:
    """The address of the server's WebSocket. Raises UserError."""
    remedy = "set url to, for example, http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https", "ws", "wss") and bool(parts.hostname) and parts.port != 0
    except (ValueError, AttributeError, TypeError):
        is_good = False
    if not is_good:
        raise UserError(
            "the value of the option `url` is not the address of a server", where=f"{OPTIONS}.url", remedy=remedy
        )
    path = parts.path.rstrip("/")
    path = path if path.endswith("/ws") else f"{path}/ws"
    return parts._replace(scheme={"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme), path=path).geturl()


def _words(data: Mapping[str, Any]) -> str:
    """The message of an error in one line; for wrong fields, their names and errors."""
    faults = data.get("errors")
    listed = [one for one in faults if isinstance(one, dict)] if isinstance(faults, list) else []
    said = [f"{'.'.join(map(str, one.get('loc') or ()))}: {one.get('msg')}" for one in listed]
    words = "; ".join(said) or str(data.get("message") or data.get("code") or "an error without a message")
    return " ".join(words.split())[:MAX_FAULT_CHARS]
