"""Calls to an etcd cluster: endpoints in turn, deadlines, and credentials.

Whoever does not answer in time is left for the next endpoint, by calls and streams alike. Only what may be
asked twice is asked twice; what became of a write that was not answered is for its writer to find out.
Invariant: a password goes over TLS or nowhere, and into no message.
"""

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_hieravg.errors import (
    LeaseLostError,
    Problem,
    StoreAwayError,
    StoreDeniedError,
    StoreError,
    UsageError,
    raise_if_any,
)
from elastic_hieravg.membership.etcd_stubs import etcd_stubs

CALL_TIMEOUT_S = 3.0
# How long one endpoint has to answer, if there is another to ask.
TRY_TIMEOUT_S = 1.0
RECONNECT_MS = 100
RECONNECT_MAX_MS = 1000
MESSAGE_BYTES_MAX = 64 * 1024 * 1024

_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS),
    ("grpc.min_reconnect_backoff_ms", RECONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)
# A member that lost its leader ends a stream rather than keep it silent.
_NEEDS_LEADER = ("hasleader", "true")


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """Where etcd is, `host:port` each, and how to be let in."""

    endpoints: tuple[str, ...]
    cacert: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        raise_if_any(UsageError, list(_problems(self)))


class EtcdClient:
    """`stubs` are etcd's messages. `on_move` callbacks run when the current endpoint was left."""

    def __init__(self, settings: EtcdSettings, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.stubs: Any = etcd_stubs()
        self.on_move: list[Callable[[], None]] = []
        self._settings = settings
        self._call_timeout_s = call_timeout_s
        self._grpc: Any = importlib.import_module("grpc")
        credentials = _channel_credentials(self._grpc, settings)
        self._endpoints = [_Endpoint(self._grpc, self.stubs, each, credentials) for each in settings.endpoints]
        self._lock = threading.Lock()
        self._index = 0
        self._token = ""
        self._is_closed = False

    @property
    def endpoint(self) -> str:
        """The endpoint that is asked now."""
        return self._endpoints[self._index].name

    def call(self, stub: str, method: str, request: Any, *, is_repeatable: bool = True) -> Any:
        """Ask and return the answer, within the call's time. Errors of gRPC come out as ours."""
        if self._is_closed:
            raise StoreAwayError(Problem("the store's client was closed", "open another one"))
        deadline_s = time.monotonic() + self._call_timeout_s
        has_renewed = False
        while True:
            endpoint = self._endpoints[self._index]
            left_s = deadline_s - time.monotonic()
            try_s = min(left_s, TRY_TIMEOUT_S) if is_repeatable and len(self._endpoints) > 1 else left_s
            try:
                metadata = self._metadata(endpoint, timeout_s=try_s)
                return endpoint.ask(stub, method, request, timeout_s=try_s, metadata=metadata)
            except self._grpc.RpcError as exc:
                error = self._translate(endpoint, exc)
                if isinstance(error, _TokenExpiredError) and not has_renewed:
                    has_renewed, self._token = True, ""
                    continue
                is_away = isinstance(error, StoreAwayError)
                if is_away:
                    self.leave(endpoint.name)
                if is_away and is_repeatable and time.monotonic() + RECONNECT_MS / 1000 < deadline_s:
                    # One endpoint alone is asked again too, not at once.
                    time.sleep(RECONNECT_MS / 1000 if len(self._endpoints) == 1 else 0.0)
                    continue
                raise error from exc

    def stream(self, stub: str, method: str, requests: Iterator[Any]) -> "EtcdStream":
        """A stream of answers from the current endpoint, without a deadline: cancel it to end it."""
        endpoint = self._endpoints[self._index]
        try:
            metadata = (*self._metadata(endpoint, timeout_s=TRY_TIMEOUT_S), _NEEDS_LEADER)
            return EtcdStream(self, endpoint.name, endpoint.method(stub, method)(requests, metadata=metadata))
        except self._grpc.RpcError as exc:
            raise self.failed(endpoint.name, exc) from exc

    def failed(self, endpoint_name: str, exc: Any) -> StoreError:
        """What a stream's error means; its endpoint is left, its token renewed, as after a call."""
        endpoint = next(each for each in self._endpoints if each.name == endpoint_name)
        error = self._translate(endpoint, exc)
        is_ours = exc.code() is self._grpc.StatusCode.CANCELLED
        if isinstance(error, _TokenExpiredError):
            self._token = ""
        elif isinstance(error, StoreAwayError) and not is_ours:
            self.leave(endpoint_name)
        return error

    def leave(self, endpoint_name: str) -> None:
        """Ask another endpoint from now on, if this one is the current one."""
        with self._lock:
            if self._endpoints[self._index].name != endpoint_name or len(self._endpoints) == 1:
                return
            self._index = (self._index + 1) % len(self._endpoints)
            callbacks = list(self.on_move)
        for callback in callbacks:
            callback()

    def close(self) -> None:
        self._is_closed = True
        for endpoint in self._endpoints:
            endpoint.channel.close()

    @property
    def rpc_error(self) -> type[Exception]:
        error: type[Exception] = self._grpc.RpcError
        return error

    def _metadata(self, endpoint: "_Endpoint", *, timeout_s: float) -> tuple[tuple[str, str], ...]:
        if self._settings.user is None:
            return ()
        with self._lock:
            if not self._token:
                request = self.stubs.AuthenticateRequest(
                    name=self._settings.user, password=self._settings.password
                )
                answer = endpoint.ask("Auth", "Authenticate", request, timeout_s=timeout_s, metadata=())
                self._token = str(answer.token)
            return (("token", self._token),)

    def _translate(self, endpoint: "_Endpoint", exc: Any) -> StoreError:
        code, details = exc.code(), str(exc.details())
        codes = self._grpc.StatusCode
        problem = Problem(
            f"etcd at {endpoint.name} cannot be used, {code.name}: {details}", _hint(code.name, details)
        )
        if code is codes.UNAUTHENTICATED or "invalid auth token" in details or "auth store is old" in details:
            return _TokenExpiredError(problem)
        if code is codes.NOT_FOUND and "lease" in details:
            return LeaseLostError(problem)
        if code in (codes.PERMISSION_DENIED, codes.INVALID_ARGUMENT, codes.FAILED_PRECONDITION):
            return StoreDeniedError(problem)
        return StoreAwayError(problem)


class _TokenExpiredError(StoreDeniedError):
    """The token is not valid any more; a new one may be."""


class EtcdStream:
    """Answers of a stream, one by one; errors come out as ours."""

    def __init__(self, client: EtcdClient, endpoint_name: str, call: Any) -> None:
        self._client = client
        self._endpoint_name = endpoint_name
        self._call = call

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._call
        except self._client.rpc_error as exc:
            raise self._client.failed(self._endpoint_name, exc) from exc

    def cancel(self) -> None:
        self._call.cancel()


class _Endpoint:
    def __init__(self, grpc: Any, stubs: Any, name: str, credentials: Any) -> None:
        self.name = name
        if credentials is None:
            self.channel = grpc.insecure_channel(name, options=_OPTIONS)
        else:
            self.channel = grpc.secure_channel(name, credentials, options=_OPTIONS)
        self._stubs = {
            kind: getattr(stubs, f"{kind}Stub")(self.channel)
            for kind in ("KV", "Lease", "Watch", "Auth", "Maintenance")
        }

    def method(self, stub: str, method: str) -> Any:
        return getattr(self._stubs[stub], method)

    def ask(self, stub: str, method: str, request: Any, *, timeout_s: float, metadata: Any) -> Any:
        if method == "LeaseKeepAlive":
            # A stream in etcd; one question and one answer of it are enough.
            answers = self.method(stub, method)(iter([request]), timeout=timeout_s, metadata=metadata)
            for answer in answers:
                return answer
            message = f"etcd at {self.name} ended a call without an answer"
            raise StoreAwayError(Problem(message, "look for a proxy between this node and etcd"))
        return self.method(stub, method)(request, timeout=timeout_s, metadata=metadata)


def _channel_credentials(grpc: Any, settings: EtcdSettings) -> Any:
    if settings.cacert is None:
        return None
    contents = [_read(each) for each in (settings.cacert, settings.key, settings.cert)]
    return grpc.ssl_channel_credentials(*contents)


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as exc:
        raise UsageError(
            Problem(
                f"{path} cannot be read: {exc.strerror}",
                "give PEM files as cacert, cert and key in --rdzv-conf",
            )
        ) from exc


def _hint(code: str, details: str) -> str:
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT", "FAILED_PRECONDITION"):
        return "give user and password_file of a user that may read and write under /hieravg/ in --rdzv-conf"
    if "handshake" in details.lower() or "certificate" in details.lower():
        return (
            "check cacert, cert and key in --rdzv-conf, and that the server's certificate names this endpoint"
        )
    return "check that etcd runs at --rdzv-endpoint and can be reached from here"


def _problems(settings: EtcdSettings) -> Iterator[Problem]:
    if not settings.endpoints:
        yield Problem("there is no --rdzv-endpoint", "give one or more, for example h1:2379,h2:2379,h3:2379")
    for endpoint in settings.endpoints:
        if not _is_endpoint(endpoint):
            hint = (
                "write host:port, for example h1:2379 or [fd00::1]:2379, without http://; "
                "TLS comes with cacert in --rdzv-conf"
            )
            yield Problem(f"--rdzv-endpoint has {endpoint!r}", hint)
    if (settings.cert is None) != (settings.key is None):
        missing, given = ("key", "cert") if settings.key is None else ("cert", "key")
        yield Problem(f"--rdzv-conf has {given} and no {missing}", "give both cert and key, or neither")
    if settings.cert is not None and settings.cacert is None:
        yield Problem("--rdzv-conf has cert and no cacert", "give cacert too: without it there is no TLS")
    if (settings.user is None) != (settings.password is None):
        missing, given = ("password_file", "user") if settings.password is None else ("user", "password_file")
        yield Problem(
            f"--rdzv-conf has {given} and no {missing}", "give both user and password_file, or neither"
        )
    if settings.user is not None and settings.cacert is None:
        yield Problem(
            f"--rdzv-conf has user {settings.user} and no cacert, without which there is no TLS",
            "give cacert: a password is not sent over a connection that anybody can read",
        )


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    is_port = port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16
    # An IPv6 address stands in brackets; a URL is no host.
    is_host = bool(host) and "/" not in host and (":" not in host or (host[0] == "[" and host[-1] == "]"))
    return is_port and is_host
