"""Settings of requests to servers that others run: an endpoint, and a model behind an OpenAI-compatible one.

Requests are made in http_client.py (attempts) and client.py (budget, records).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from areal_like import limits
from areal_like.settings import Settings

RecordMode = Literal["off", "write", "reuse", "replay"]
OnExhausted = Literal["end", "fail"]
OF_A_CALL = frozenset(
    {"model", "messages", "prompt", "temperature", "max_tokens", "max_completion_tokens", "stream", "n", "seed"}
)
"""Fields of a request that each call sets."""
MAX_PRICE = 1e6
"""Largest price of a million tokens."""
MAX_COST = 1e12
"""Largest budget, in the currency of the prices."""


def checked_url(url: str) -> str:
    """Return the address. Raises ValueError if it is not one, or contains a key."""
    try:
        parts = urlsplit(url)
        port_is_wrong = parts.port == 0
    except ValueError as error:
        raise ValueError(f"`{url}` is not a valid URL ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port_is_wrong:
        raise ValueError(f"`{url}` is not a valid URL; expected http://host:port/path or https://...")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a user name or password in the URL would be logged; set key_env or key_file instead")
    return url


class EndpointOptions(Settings):
    """Options of requests to a server. All attempts of one request, including pauses, end within `total_timeout_s`."""

    total_timeout_s: float = Field(8.0, gt=0, le=limits.SECONDS)
    """Seconds for all attempts together; of a scorer it must be below the service's timeout_s."""
    attempt_timeout_s: float | None = Field(None, gt=0, le=limits.SECONDS)
    """Seconds for one attempt, after which the next one begins; null: as long as `total_timeout_s`."""
    retries: int = Field(3, ge=0, le=limits.STEPS)
    """Number of further attempts after a failed or broken connection, or status 408, 425, 429 or 5xx."""
    backoff_s: float = Field(0.2, gt=0, le=limits.SECONDS)
    """Pause before the second attempt; each further one is twice as long, randomly shortened by up to a half. A longer
    `Retry-After` of the server is respected."""
    key_env: str | None = None
    """Environment variable with the key, which is sent as `Authorization: Bearer`."""
    key_file: str | None = None
    """File with the key."""
    max_reply_kb: int = Field(256, gt=0, le=limits.KILOBYTES)
    """Largest reply; a larger one is rejected."""

    ROOM_S: ClassVar[float] = 0.5
    """Longest time of a request beyond `total_timeout_s`."""

    @model_validator(mode="after")
    def _one_key(self) -> EndpointOptions:
        if self.key_env is not None and self.key_file is not None:
            raise ValueError("key_env and key_file are mutually exclusive; set only one of them")
        return self


class ModelEndpointOptions(EndpointOptions):
    """Options of a model behind an OpenAI-compatible endpoint, with its budget and its recorded answers."""

    base_url: str
    """Address up to the version, such as http://127.0.0.1:8000/v1; `/chat/completions` is added."""
    model: str = Field(min_length=1)
    """Name of the model at that endpoint."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, such as `response_format` or `chat_template_kwargs`; of a judge also `seed`."""
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Field of a chat request with the longest reply; some models accept only `max_completion_tokens`."""
    record: RecordMode = "reuse"
    """`reuse`: answers are recorded, and a request whose answer is recorded is not sent again (unless it samples
    without a seed). `write`: answers are recorded, every request is sent. `replay`: nothing is sent; a request without
    a recorded answer ends the run. `off`: only token counts are recorded."""
    records: str | None = None
    """File of the recorded answers (JSON Lines); null: in the run's folder `external`."""
    price_in: float = Field(0.0, ge=0, le=MAX_PRICE)
    """Price of a million prompt tokens, in any currency."""
    price_out: float = Field(0.0, ge=0, le=MAX_PRICE)
    """Price of a million tokens of replies."""
    max_cost: float | None = Field(None, gt=0, le=MAX_COST)
    """Budget of the run, in the currency of the prices: no request is sent once so much is spent. Requests that are
    under way then are still paid."""
    max_tokens_total: int | None = Field(None, gt=0, le=limits.ELEMENTS)
    """Budget of the run in tokens of prompts and replies."""
    on_exhausted: OnExhausted = "end"
    """When the budget is used up: `end` ends the run with one sentence, and it can be resumed with a larger budget;
    `fail` lets every further request fail, so that a judged sample gets the verdict `invalid`."""

    @field_validator("base_url")
    @classmethod
    def _base_url_is_one(cls, url: str) -> str:
        return checked_url(url).rstrip("/")

    @model_validator(mode="after")
    def _budget_can_be_counted(self) -> ModelEndpointOptions:
        if self.max_cost is not None and not (self.price_in or self.price_out):
            raise ValueError("max_cost requires a price per million tokens; set price_in, price_out or both")
        return self

    @property
    def has_budget(self) -> bool:
        """Whether tokens or costs are bounded."""
        return self.max_cost is not None or self.max_tokens_total is not None

    def cost(self, tokens_in: int, tokens_out: int) -> float:
        """Cost of so many tokens, in the currency of the prices."""
        return (tokens_in * self.price_in + tokens_out * self.price_out) / 1e6


class ExternalModelOptions(ModelEndpointOptions):
    """Options of an external model that a workflow calls, or that is the teacher (`rollout.models`)."""

    total_timeout_s: float = Field(120.0, gt=0, le=limits.SECONDS)
    """Seconds for all attempts of one request together."""
    max_reply_kb: int = Field(8192, gt=0, le=limits.KILOBYTES)
    """Largest reply; a larger one is rejected."""
    api: Literal["chat", "tokens"] = "chat"
    """`chat`: text through `/chat/completions`; the model may have any tokenizer. `tokens`: token ids through
    `/completions`, as vLLM offers; the model must have the policy's tokenizer. A teacher needs `tokens`."""
    max_concurrency: int = Field(16, gt=0, le=limits.PROCESSES)
    """Number of requests at once of each rollout worker; further ones wait."""
    system: str | None = None
    """System message of a chat request that has none."""
    send_seed: bool = True
    """Send a `seed` with each request, drawn from the sample's seed. If false, answers differ between runs unless they
    are replayed."""

    @model_validator(mode="after")
    def _fields_are_free(self) -> ExternalModelOptions:
        if found := sorted(OF_A_CALL & set(self.extra_body)):
            raise ValueError(
                f"extra_body must not contain `{found[0]}`, which areal_like sets; remove it from extra_body"
            )
        return self
