"""What goes back over HTTP: JSON, errors in the OpenAI shape, event streams, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorry.errors import LorryError

T = TypeVar("T")

_encoder = msgspec.json.Encoder()

DONE_EVENT = b"data: [DONE]\n\n"

CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that nobody waits for; it is seen in the access log only."""


class ClientGone(Exception):
    """The client has closed its connection."""


class JsonResponse(Response):
    """Any msgspec struct or plain data as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _encoder.encode(content)


def error_body(message: str, status: int, code: str | None, param: str | None = None) -> dict[str, Any]:
    """An error in the OpenAI shape."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def lorry_error_body(error: LorryError) -> dict[str, Any]:
    return error_body(str(error), error.status, error.code, getattr(error, "param", None))


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(content) + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; where the client goes first, `work` is cancelled and `ClientGone` raised.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. `close` is called once the stream has ended, in whatever way."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientGone:
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
