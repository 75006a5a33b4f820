"""The server of the page, on Tornado: it routes, guards, and keeps what takes long out of the way of other requests."""

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
from superpod.pages.ui import guard

Given = Mapping[str, str]
"""What a request gives, by name."""
T = TypeVar("T")
KEPT_PLANS, WAITING_PLANS = 8, 6
"""Pages of plans that are kept, and plans that may wait for another; a page is some 3 MB."""
MOST_CHARS = 300
"""Of a value in a request."""
NO_ENTRY = "The address lacks its token. `recipes ui` has printed the whole of it in the terminal where it runs.\n"
FAILED = "This failed on our side; the terminal where `recipes ui` runs has the reason.\n"


@dataclass(frozen=True)
class Sources:
    """What the page is made of. None of these is called in the thread that serves."""

    page: Callable[[], str]
    """the page itself, HTML"""
    plan: Callable[[Given], str]
    """the page of a plan for the values of the controls, HTML; raises UserError"""
    runs: Callable[[], Mapping[str, Any]]
    """all runs"""
    run: Callable[[Given], Mapping[str, Any]]
    """one run; raises UserError for one that is not among them"""
    failed: Callable[[BaseException], None]
    """says in the terminal what failed"""


class Plans:
    """Plans one after the other, in a thread: a second would only slow the first down. The newest are kept."""

    def __init__(self, make: Callable[[Given], str]) -> None:
        self._make, self._turn, self._waiting = make, asyncio.Lock(), 0
        self._kept: OrderedDict[tuple[tuple[str, str], ...], str] = OrderedDict()

    async def page(self, given: Given) -> str:
        """The page for these values; that of a `UserError` says what is wrong, as the command does."""
        key = tuple(sorted(given.items()))
        if key not in self._kept:
            if self._waiting > WAITING_PLANS:
                return message("too many plans wait", "try again when those of other windows are done")
            self._waiting += 1
            try:
                async with self._turn:
                    if key not in self._kept:
                        self._kept[key] = await in_thread(self._make, given)
            except UserError as error:
                return message(str(error), error.hint)
            finally:
                self._waiting -= 1
        self._kept.move_to_end(key)
        page = self._kept[key]
        while len(self._kept) > KEPT_PLANS:
            self._kept.popitem(last=False)
        return page


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """What a function returns or raises, called in a thread that nobody waits for when the server ends."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if ended.cancelled():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(result)  # type: ignore[arg-type]

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
    return await ended


class Page(RequestHandler):
    """Every request: `/TOKEN/` and what is below it."""

    SUPPORTED_METHODS = ("GET",)

    def initialize(self, token: str, sources: Sources, plans: Plans, looking: asyncio.Lock) -> None:
        """What Tornado passes on."""
        self._token, self._sources, self._plans, self._looking = token, sources, plans, looking

    def set_default_headers(self) -> None:
        """Of errors too."""
        self.clear_header("Server")
        for name, value in guard.HEADERS.items():
            self.set_header(name, value)

    def prepare(self) -> None:
        """Refuse whoever may not read the page, before anything is looked up."""
        refused = guard.problem(self.request.headers)
        token, slash, _ = self.request.path.removeprefix("/").partition("/")
        if refused or not (guard.is_token(token, self._token) and slash):
            self.set_status(403)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(refused + "\n" if refused else NO_ENTRY)

    async def get(self) -> None:
        """The page, a plan, or runs."""
        place = self.request.path.partition(self._token + "/")[2]
        given = {name: self.get_query_argument(name).strip() for name in self.request.query_arguments}
        if any(len(value) > MOST_CHARS for value in given.values()):
            raise HTTPError(400)
        if place in ("", "plan"):
            self.set_header("Content-Type", "text/html; charset=utf-8")
            text = await (self._plans.page(given) if place else in_thread(self._sources.page))
        elif place in ("runs.json", "run.json"):
            self.set_header("Content-Type", "application/json")
            text = json.dumps(await self._look(place, given), allow_nan=False)
        else:
            raise HTTPError(404)
        self.finish(text)

    async def _look(self, place: str, given: Given) -> Mapping[str, Any]:
        """Facts of runs; one window after the other looks at files."""
        async with self._looking:
            try:
                return await (
                    in_thread(self._sources.run, given) if place == "run.json" else in_thread(self._sources.runs)
                )
            except UserError as error:
                return {"problem": str(error), "hint": error.hint}

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """A line; nothing of what failed goes to the browser."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(FAILED if status_code >= 500 else f"{status_code}: {self._reason}\n")

    def log_exception(self, kind: object, error: BaseException | None, at: object) -> None:
        """Say it in the terminal, without the address, which holds the token."""
        if error is not None and not isinstance(error, HTTPError):
            self._sources.failed(error)


def message(text: str, hint: str) -> str:
    """A page that says what a user's mistake is, and the next move."""
    following = f"<p>next: {html.escape(hint)}</p>" if hint else ""
    return (
        '<!doctype html><html lang="en" data-ready="yes"><head><meta charset="utf-8"><title>refused</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        "<style>:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;margin:1.5rem;"
        'overflow-wrap:anywhere}</style></head><body><main id="refused" role="alert">'
        f"<p><b>{html.escape(text)}</b></p>{following}</main></body></html>"
    )


def application(token: str, sources: Sources) -> Application:
    """The page as Tornado serves it."""
    kept = {"token": token, "sources": sources, "plans": Plans(sources.plan), "looking": asyncio.Lock()}
    return Application([(r".*", Page, kept)], log_function=lambda handler: None)


async def serve(sockets: Sequence[socket.socket], token: str, sources: Sources) -> None:
    """Serve until cancelled; what Tornado would log has addresses in it, and goes nowhere."""
    for name in ("tornado.access", "tornado.general", "tornado.application"):
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    server = HTTPServer(
        application(token, sources),
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
