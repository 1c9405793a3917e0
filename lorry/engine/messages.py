"""What the server's process and the engine's process say to each other (msgpack over ZeroMQ)."""

from __future__ import annotations

from typing import Any

import msgspec

from lorry.types import AdapterInfo, AdapterList, EngineInfo, EngineRequest, EngineStats, TokenOutput


class Add(msgspec.Struct, frozen=True, tag=True):
    """Take up a request. It ends in exactly one `TokenOutput` with a finish reason, also when it is refused."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request early; one that is unknown or has ended already is ignored."""

    request_id: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter's files, or `content` (see `weights_from_bytes`); answered by `Done` with an `AdapterInfo`, or
    `Failed`. `replace`: the name may have an adapter, whose running requests finish on its weights.
    """

    call_id: int
    name: str
    path: str
    replace: bool = False
    pinned: bool = False
    content: bytes | None = None


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Forget a name: running requests finish, or end. Answered by `Done` with the `AdapterInfo`, or `Failed`."""

    call_id: int
    name: str
    abort: bool = False


class PinAdapter(msgspec.Struct, frozen=True, tag=True):
    """Keep an adapter on the device, or let it go. Answered by `Done` with the `AdapterInfo`, or `Failed`."""

    call_id: int
    name: str
    pinned: bool


class ListAdapters(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Done` with an `AdapterList`."""

    call_id: int


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Done` with an `EngineStats`."""

    call_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the engine process."""


Command = Add | Abort | LoadAdapter | UnloadAdapter | PinAdapter | ListAdapters | GetStats | Shutdown

Answer = AdapterInfo | AdapterList | EngineStats


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine has started: first message of every engine process that lives."""

    info: EngineInfo


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A line on what the engine does while it starts."""

    text: str


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start; the process ends after this."""

    code: str
    message: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one step."""

    outputs: tuple[TokenOutput, ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    """A call succeeded."""

    call_id: int
    result: Answer


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A call failed; `code` is a `LorryError.code`."""

    call_id: int
    code: str
    message: str


Event = Ready | Progress | StartFailed | Outputs | Done | Failed


class Codec:
    """Encodes any message and decodes commands (in the engine) or events (in the server)."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._commands = msgspec.msgpack.Decoder(Command)
        self._events = msgspec.msgpack.Decoder(Event)

    def encode(self, message: Any) -> bytes:
        return self._encoder.encode(message)

    def decode_command(self, data: bytes) -> Command:
        return self._commands.decode(data)

    def decode_event(self, data: bytes) -> Event:
        return self._events.decode(data)
