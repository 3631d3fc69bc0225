"""Settings: where the server listens, who may ask, and how much one call may ask for."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field

LEAST = {  # whole numbers
    "port": 0, "max_body": 1, "max_n": 1, "max_stops": 0, "max_stop_len": 1, "default_max_tokens": 1, "max_waiting": 1,
}  # fmt: skip
SECONDS = ("slow_reader", "upload_timeout", "drain", "prediction_deadline", "starved_after")


@dataclass(frozen=True)
class Settings:
    """Raises ValueError, naming value and limit, for what no server can be told; so too a host that others can reach without
    an `api_key`.

    host, port: port 0 takes a free one. api_key: wanted as `Authorization: Bearer KEY` on all but the open routes.
    open_metrics: /metrics is open too. access_log: one more line a call, without its query. max_body: bytes. max_prompt_tokens:
    of one prompt; None: as the model takes. max_n: answers of one call, over all its prompts. max_stops, max_stop_len: stop
    strings, and characters of one. default_max_tokens: of a chat that does not say. slow_reader: s that a client may take
    nothing of what is ready for it before it is cut. upload_timeout: s that the headers of a call may take, and then its body,
    before it is cut. drain: s that live requests have when the server is told to stop. max_waiting: requests that may wait.
    prediction_deadline: s. starved_after: s of waiting from which on a request counts as starved. replay: clients may say how
    long their answers are to be. otlp_endpoint: where a span of each request is sent (OTLP over HTTP); None: nowhere.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    open_metrics: bool = False
    access_log: bool = False
    max_body: int = 2**20
    max_prompt_tokens: int | None = None
    max_n: int = 64
    max_stops: int = 16
    max_stop_len: int = 256
    default_max_tokens: int = 2048
    slow_reader: float = 30.0
    upload_timeout: float = 30.0
    drain: float = 30.0
    max_waiting: int = 256
    prediction_deadline: float = 0.05
    starved_after: float = 30.0
    replay: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"server.{name}={value!r}: a whole number of at least {least} is wanted")
        for name in SECONDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"server.{name}={value!r}: a finite number of seconds above 0 is wanted")
        if self.port > 65535:
            raise ValueError(f"server.port={self.port}, the greatest is 65535")
        most = self.max_prompt_tokens
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ValueError(f"server.max_prompt_tokens={most!r}: a whole number of at least 1, or null")
        if self.api_key is not None and (not isinstance(self.api_key, str) or not self.api_key.strip()):
            raise ValueError("server.api_key must be a string that is not empty, or null")
        endpoint = self.otlp_endpoint
        if endpoint is not None and not (isinstance(endpoint, str) and endpoint.startswith(("http://", "https://"))):
            raise ValueError(f"server.otlp_endpoint={endpoint!r}: a URL like http://localhost:4318/v1/traces, or null")
        if self.api_key is None and not is_loopback(self.host):
            raise ValueError(
                f"server.host={self.host}: without server.api_key only a loopback address is bound (127.0.0.1, ::1, localhost)"
            )


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
