"""One address for engines that come and go: every request goes, whole, to the engine that is current when it arrives.

aiohttp runs on a thread of its own; engines listen on Unix sockets that nobody else can open. Bodies pass both ways as
they come, so that streams stay streams. Status and headers are the engine's, which also checks keys. A client that
disconnects cancels its request.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.serve.server import cannot_listen

if TYPE_CHECKING:
    from aiohttp import ClientSession, web

# Headers of the connection, not of the message (RFC 9110, section 7.6.1); the client library writes its own.
_HOP_BY_HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"}
_HOP_BY_HOP |= {"transfer-encoding", "upgrade"}


class Proxy:
    """A proxy that listens once it has an engine; the end of its `with` block lets running requests finish."""

    def __init__(self, host: str, port: int, drain_s: float) -> None:
        """Args: address to listen on, and the time limit for requests that run at the end of the block, in seconds."""
        self._host = host
        self._port = port
        self._drain_s = drain_s
        self._current: Path | None = None
        self._in_flight: Counter[Path] = Counter()
        self._sessions: dict[Path, ClientSession] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._loop.call_soon_threadsafe(importlib.import_module, "aiohttp.web")  # meanwhile: it takes half a second
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self._wait(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    def switch_to(self, socket: Path) -> None:
        """Send new requests to the engine behind a socket; raise BadInput if the address cannot be listened on."""
        self._wait(self._switch(socket))

    def in_flight(self, socket: Path) -> int:
        """Return the number of an engine's unfinished requests."""
        return self._in_flight[socket]

    def forget(self, socket: Path) -> None:
        """Close the connections to an engine that has ended."""
        session = self._sessions.pop(socket, None)
        if session:
            self._wait(session.close())

    def _wait(self, work: Coroutine) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _switch(self, socket: Path) -> None:
        import aiohttp

        if socket not in self._sessions:
            # One connection a request: an engine closes idle ones after seconds, and a request sent just then is lost.
            connector = aiohttp.UnixConnector(str(socket), limit=0, force_close=True)
            self._sessions[socket] = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        is_first = self._current is None
        self._current = socket
        if is_first:
            await self._listen()

    async def _listen(self) -> None:
        from aiohttp import web

        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a client that disconnects is not an error
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(
            app, shutdown_timeout=self._drain_s, handler_cancellation=True, access_log=None, auto_decompress=False
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port, backlog=1024).start()
        except OSError as error:
            raise cannot_listen(self._host, self._port, error) from None

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        import aiohttp
        from aiohttp import web
        from yarl import URL

        engine = self._current  # this request's engine, even if another becomes current
        self._in_flight[engine] += 1
        answer = None
        try:
            async with self._sessions[engine].request(
                request.method,
                URL(f"http://engine{request.raw_path}", encoded=True),
                headers=_message_headers(request.headers),
                data=request.content if request.can_read_body else None,
                allow_redirects=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            ) as reply:
                headers = _message_headers(reply.headers)
                answer = web.StreamResponse(status=reply.status, reason=reply.reason, headers=headers)
                await answer.prepare(request)
                async for chunk in reply.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
                return answer
        except (aiohttp.ClientError, ConnectionError) as error:
            if answer is not None:
                raise  # half an answer is out, or the client left: the connection breaks, as it would without a proxy
            message = f"The engine behind this address does not answer ({error})."
            body = {"message": message, "type": "BadGateway", "param": None, "code": 502}
            return web.json_response({"error": body}, status=502)
        finally:
            self._in_flight[engine] -= 1

    async def _end(self) -> None:
        if self._current is not None:
            await self._runner.cleanup()
        for session in self._sessions.values():
            await session.close()


def _message_headers(headers) -> list[tuple[str, str]]:
    """Return the headers of the message itself, in order, with repeated ones."""
    of_connection = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    dropped = _HOP_BY_HOP | of_connection
    return [(name, value) for name, value in headers.items() if name.lower() not in dropped]
