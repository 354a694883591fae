"""A live page of runs: a read-only server that follows events files. It needs the extra `dashboard`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from dynamix.errors import ConfigError
from dynamix.telemetry.page import page_data, page_html
from dynamix.telemetry.sources import RunSource

MIN_TOKEN = 16  # characters
LOOPBACK = ["localhost", "127.0.0.1", "["]  # "[" is how starlette parses [::1]
_SLICE_BYTES = 2**22  # read at once, so that pages can be served in between
_BEAT_S = 15.0
_COOKIE = "dynamix_token"

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class LiveRuns:
    """Reads runs in its own thread while they are written; `version` counts updates.

    every_s   seconds between two reads of the files
    """

    def __init__(self, sources: Sequence[RunSource], *, every_s: float = 1.0) -> None:
        self.sources, self.every_s = list(sources), every_s
        self.version = 0
        self._lock = threading.Lock()
        self._made: tuple[int, bytes] = (-1, b"")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="dynamix-dashboard", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        self._thread.join(10.0)

    def data(self) -> bytes:
        """The page's data as JSON; built once for each version."""
        with self._lock:
            if self._made[0] != self.version:
                told = page_data(self.sources) | {"version": self.version}
                self._made = self.version, json.dumps(told, allow_nan=False, separators=(",", ":")).encode()
            return self._made[1]

    def _follow(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                changed = [source.refresh(_SLICE_BYTES) for source in self.sources]
                self.version += any(changed)
                behind = any(source.follower.behind_bytes for source in self.sources if not source.absent)
            # Release the lock for a moment, even while a long file is read, so that pages are served.
            self._stop.wait(0.01 if behind and any(changed) else self.every_s)


class TokenRequired:
    """Admits requests with the token: once as `?token=`, then by a cookie, or as a bearer token."""

    def __init__(self, app: _App, token: str) -> None:
        self.app, self._digest = app, hashlib.sha256(token.encode()).hexdigest()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        brought = [hashlib.sha256(text.encode()).hexdigest() for text in (given, bearer) if text]
        if not any(hmac.compare_digest(one, self._digest) for one in [*brought, request.cookies.get(_COOKIE, "")]):
            await Response("this dashboard needs its token: add ?token=...\n", 401)(scope, receive, send)
        elif given:
            answer = Response(status_code=303, headers={"location": "./"})
            answer.set_cookie(_COOKIE, self._digest, httponly=True, secure=True, samesite="strict")
            await answer(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def make_app(runs: LiveRuns, *, token: str = "") -> Starlette:
    """The server's app: the page, its data, and a stream that announces new data. It only reads.

    Without a token it answers only under this machine's own names, so that no page of another site can read it.
    """
    page = page_html(None, live=True)

    async def show(request: Request) -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    async def data(request: Request) -> Response:
        content = await asyncio.to_thread(runs.data)
        return Response(content, media_type="application/json", headers=_HEADERS)

    async def news(request: Request) -> Response:
        return StreamingResponse(_news(runs, request), media_type="text/event-stream", headers=_HEADERS)

    routes = [Route("/", show), Route("/data.json", data), Route("/news", news)]
    needs_token: Any = TokenRequired
    guard = Middleware(needs_token, token=token) if token else Middleware(TrustedHostMiddleware, LOOPBACK)
    return Starlette(routes=routes, middleware=[guard])


_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


async def _news(runs: LiveRuns, request: Request) -> AsyncIterator[str]:
    """A line for each update, and one from time to time, so that a lost connection is noticed."""
    told, quiet_s = -1, 0.0
    while not await request.is_disconnected():
        if runs.version != told or quiet_s >= _BEAT_S:
            told, quiet_s = runs.version, 0.0
            yield f"data: {told}\n\n"
        await asyncio.sleep(0.25)
        quiet_s += 0.25


def serve(
    runs: LiveRuns,
    *,
    host: str = "127.0.0.1",
    port: int = 8642,
    token: str = "",
    certificate: Path | None = None,
    key: Path | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve until interrupted, by Ctrl-C or SIGTERM; `tell` gets the address. `port` 0 chooses a free one.

    Raises `ConfigError` if it cannot listen, or if others can reach the host without a token and a certificate.
    """
    import uvicorn

    check_host(host, token, certificate)
    try:
        sock = uvicorn.Config("", host=host, port=port, log_level="critical").bind_socket()
        sock.listen()  # before the address is announced, so that early visitors wait instead of being refused
    except (OSError, SystemExit) as error:
        raise ConfigError("port", port, f"a free port of {host}", "choose another, or 0 for any") from error
    files: dict[str, Any] = {"ssl_certfile": certificate, "ssl_keyfile": key} if certificate else {}
    app = make_app(runs, token=token)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, **files)
    where = f"[{host}]" if ":" in host else host
    runs.start()
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(runs):  # uvicorn repeats the signal that ended it
        tell(f"{'https' if certificate else 'http'}://{where}:{sock.getsockname()[1]}/{'?token=...' if token else ''}")
        uvicorn.Server(config).run(sockets=[sock])


def check_host(host: str, token: str, certificate: Path | None) -> None:
    """Raise `ConfigError` unless `host` is loopback, or protected by a token and a certificate.

    >>> check_host("127.0.0.1", "", None)
    """
    if token and len(token) < MIN_TOKEN:
        raise ConfigError("token", f"{len(token)} characters", f"{MIN_TOKEN} or more", "make a longer one")
    try:
        own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        own = False
    if not own and not (token and certificate):
        fix = "look through a tunnel (ssh -L), or give --token-file, --certificate and --key"
        raise ConfigError("host", host, "127.0.0.1 or ::1 without a token and TLS", fix)
