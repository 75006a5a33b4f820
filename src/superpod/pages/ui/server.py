"""Tornado server of `recipes ui`: checks and routes requests, and runs slow work in threads."""

from __future__ import annotations

import asyncio
import html
import json
import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tornado.httpserver import HTTPServer
from tornado.web import Application, HTTPError, RequestHandler

from superpod.errors import UserError
from superpod.pages.ui import access

Given = Mapping[str, str]
"""Query arguments of a request."""
T = TypeVar("T")
MAX_CACHED_PLANS, MAX_WAITING_PLANS = 8, 6
"""Maximum number of cached plan pages, about 3 MB each, and of waiting requests for plans."""
MAX_CHARS = 300
"""Maximum length of a query argument."""
NO_ENTRY = "The address has no valid token. `recipes ui` printed the full address in the terminal where it runs.\n"
FAILED = "Internal error; see the terminal where `recipes ui` runs.\n"


@dataclass(frozen=True)
class Sources:
    """Functions that provide the data of the page. They are called in threads, not in the event loop of the server."""

    page: Callable[[], str]
    """Returns the HTML page."""
    plan: Callable[[Given], str]
    """Returns the HTML page of a plan for the values of the controls; raises UserError."""
    runs: Callable[[], Mapping[str, Any]]
    """Returns the states of all runs; raises UserError."""
    run: Callable[[Given], Mapping[str, Any]]
    """Returns the state of one run; raises UserError if it does not exist."""
    failed: Callable[[BaseException], None]
    """Reports an internal error in the terminal."""


class Plans:
    """Computes plans in a thread, one at a time because two would slow each other down, and caches the latest ones.

    `render` returns the HTML page of a plan for the query arguments of a request.
    """

    def __init__(self, render: Callable[[Given], str]) -> None:
        self._render, self._lock, self._waiting = render, asyncio.Lock(), 0
        self._cache: OrderedDict[tuple[tuple[str, str], ...], str] = OrderedDict()

    async def page(self, parameters: Given) -> str:
        """Return the HTML page of a plan for query arguments, or a page with the message of a `UserError`."""
        key = tuple(sorted(parameters.items()))
        if key not in self._cache:
            if self._waiting > MAX_WAITING_PLANS:
                return render_error("too many plans are waiting", "try again when the plans in other windows are done")
            self._waiting += 1
            try:
                async with self._lock:
                    if key not in self._cache:
                        self._cache[key] = await run_in_thread(self._render, parameters)
            except UserError as error:
                return render_error(str(error), error.hint)
            finally:
                self._waiting -= 1
        self._cache.move_to_end(key)
        page = self._cache[key]
        while len(self._cache) > MAX_CACHED_PLANS:
            self._cache.popitem(last=False)
        return page


async def run_in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a daemon thread, which does not delay shutdown; return its result, or raise its exception."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*arguments)
        except Exception as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:  # the server has ended
            return

    threading.Thread(target=work, name=function.__name__, daemon=True).start()
    return await future


class Page(RequestHandler):
    """Handles all requests: `/TOKEN/` and the paths below it."""

    SUPPORTED_METHODS = ("GET",)

    def initialize(self, token: str, sources: Sources, plans: Plans, lock: asyncio.Lock) -> None:
        """Store the arguments that `create_application` passes to each handler."""
        self._token, self._sources, self._plans, self._read_lock = token, sources, plans, lock

    def set_default_headers(self) -> None:
        """Set the security headers of all responses, including errors."""
        self.clear_header("Server")
        for name, value in access.HEADERS.items():
            self.set_header(name, value)

    def prepare(self) -> None:
        """Reject a request without the token or from another page."""
        refusal = access.find_problem(self.request.headers)
        token, slash, _ = self.request.path.removeprefix("/").partition("/")
        if refusal or not (access.is_token(token, self._token) and slash):
            self.set_status(403)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(refusal + "\n" if refusal else NO_ENTRY)

    async def get(self) -> None:
        """Send the page, a plan, or the state of runs.

        Raises:
            HTTPError: a query argument is too long, or there is no such path.
        """
        path = self.request.path.partition(self._token + "/")[2]
        arguments = {name: self.get_query_argument(name).strip() for name in self.request.query_arguments}
        if any(len(value) > MAX_CHARS for value in arguments.values()):
            raise HTTPError(400)
        if path in ("", "plan"):
            self.set_header("Content-Type", "text/html; charset=utf-8")
            text = await (self._plans.page(arguments) if path else run_in_thread(self._sources.page))
        elif path in ("runs.json", "run.json"):
            self.set_header("Content-Type", "application/json")
            text = json.dumps(await self._read_runs(path, arguments), allow_nan=False)
        else:
            raise HTTPError(404)
        self.finish(text)

    async def _read_runs(self, path: str, arguments: Given) -> Mapping[str, Any]:
        """Return the state of one run or of all runs, or an error message; one request at a time reads the files."""
        async with self._read_lock:
            try:
                if path == "run.json":
                    return await run_in_thread(self._sources.run, arguments)
                return await run_in_thread(self._sources.runs)
            except UserError as error:
                return {"problem": str(error), "hint": error.hint}

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Send a one-line error message, without details of internal errors."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(FAILED if status_code >= 500 else f"{status_code}: {self._reason}\n")

    def log_exception(self, kind: object, error: BaseException | None, at: object) -> None:
        """Report an internal error in the terminal, without the address of the request, which contains the token."""
        if error is not None and not isinstance(error, HTTPError):
            self._sources.failed(error)


def render_error(text: str, hint: str) -> str:
    """Return an HTML page with the message and the hint of a user error."""
    hint_html = f"<p>next: {html.escape(hint)}</p>" if hint else ""
    return (
        '<!doctype html><html lang="en" data-ready="yes"><head><meta charset="utf-8"><title>refused</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        "<style>:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;margin:1.5rem;"
        'overflow-wrap:anywhere}</style></head><body><main id="refused" role="alert">'
        f"<p><b>{html.escape(text)}</b></p>{hint_html}</main></body></html>"
    )


def create_application(token: str, sources: Sources) -> Application:
    """Return the Tornado application of the page, which accepts only requests with the token."""
    handler_arguments = {"token": token, "sources": sources, "plans": Plans(sources.plan), "lock": asyncio.Lock()}
    return Application([(r".*", Page, handler_arguments)], log_function=lambda handler: None)


async def serve(sockets: Sequence[socket.socket], token: str, sources: Sources) -> None:
    """Serve the page on these sockets until cancelled.

    Tornado's logs are discarded, because they contain the address with its token.
    """
    for name in ("tornado.access", "tornado.general", "tornado.application"):
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    server = HTTPServer(
        create_application(token, sources),
        max_header_size=16384,
        max_body_size=4096,
        body_timeout=10,
        idle_connection_timeout=75,
    )
    server.add_sockets(sockets)
    try:
        await asyncio.Event().wait()
    finally:
        server.stop()
