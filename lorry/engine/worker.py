"""The engine's process: takes commands from the server, steps the engine, and sends back what each step gave.

The server starts it as `python -m lorry.engine.worker` and writes one line of JSON (`Bootstrap`) to its standard
input. That pipe stays open as long as the server lives: its end is the sign to end too, however the server died.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, cast

import msgspec
import zmq

from lorry.config import EngineConfig
from lorry.engine import messages
from lorry.errors import LorryError
from lorry.types import AdapterInfo, AdapterList, EngineInfo, EngineRequest, EngineStats, TokenOutput

log = logging.getLogger(__name__)

ENGINE_FACTORY = "lorry.engine.engine:Engine"
"""Where the engine's class is, as `module:attribute`."""

PARALLEL_LOADS = 2
"""Adapters whose files are read at the same time: each may hold gigabytes of host memory."""

LINGER_MS = 2000
"""How long an ending worker waits for its last messages to leave."""


class EngineLike(Protocol):
    """What the worker needs of an engine. All but `prepare_adapter` are called on one thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]: ...

    @property
    def has_work(self) -> bool: ...

    def add_request(self, request: EngineRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def prepare_adapter(self, name: str, path: str, content: bytes | None = None) -> Any: ...

    def register_adapter(self, prepared: Any, replace: bool = False, pinned: bool = False) -> AdapterInfo: ...

    def unload_adapter(self, name: str, abort: bool = False) -> AdapterInfo: ...

    def pin_adapter(self, name: str, pinned: bool = True) -> AdapterInfo: ...

    def adapter_list(self) -> AdapterList: ...

    def stats(self) -> EngineStats: ...

    def step(self) -> list[TokenOutput]: ...


EngineFactory = Callable[[EngineConfig, Callable[[str], None]], EngineLike]


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """What the server tells a new worker; `config` holds the settings of an `EngineConfig`.

    `folder` is private to the two: it holds their sockets, and the worker removes it where the server cannot.
    """

    config: dict[str, Any]
    folder: str
    factory: str = ENGINE_FACTORY
    log_level: str = "info"

    @property
    def commands_address(self) -> str:
        return f"ipc://{self.folder}/commands"

    @property
    def events_address(self) -> str:
        return f"ipc://{self.folder}/events"


class Worker:
    """The loop: take commands, step, send outputs. With no work it sleeps until a command or a read adapter comes."""

    def __init__(self, engine: EngineLike, commands: Any, events: Any, codec: messages.Codec) -> None:
        self._engine = engine
        self._commands = commands
        self._events = events
        self._codec = codec
        self._ended = False
        self._outputs: list[TokenOutput] = []
        self._load_permits = threading.Semaphore(PARALLEL_LOADS)
        self._loaded: deque[tuple[messages.LoadAdapter, Any]] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(commands, zmq.POLLIN)
        self._poller.register(self._wake_receiver, zmq.POLLIN)

    def run(self) -> None:
        """Until `Shutdown`. An exception of `step` is not caught: the engine's state is unknown then."""
        adapters = tuple(self._engine.adapters.values())
        self._send(messages.Ready(msgspec.structs.replace(self._engine.info, adapters=adapters)))
        while not self._ended:
            self._take_commands(wait=not self._engine.has_work)
            self._register_loaded()
            if self._engine.has_work and not self._ended:
                self._outputs += self._engine.step()
            if self._outputs:
                self._send(messages.Outputs(tuple(self._outputs)))
                self._outputs.clear()

    def _send(self, event: messages.Event) -> None:
        self._events.send(self._codec.encode(event))

    def _take_commands(self, wait: bool) -> None:
        self._poller.poll(None if wait else 0)
        while not self._ended:
            try:
                data = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._execute(self._codec.decode_command(data))

    def _execute(self, command: messages.Command) -> None:
        match command:
            case messages.Add():
                self._add(command.request)
            case messages.Abort():
                self._engine.abort(command.request_id)
            case messages.LoadAdapter():
                threading.Thread(target=self._prepare, args=(command,), name="load-adapter", daemon=True).start()
            case messages.UnloadAdapter():
                self._answer(command.call_id, lambda: self._engine.unload_adapter(command.name, command.abort))
            case messages.PinAdapter():
                self._answer(command.call_id, lambda: self._engine.pin_adapter(command.name, command.pinned))
            case messages.ListAdapters():
                self._answer(command.call_id, self._engine.adapter_list)
            case messages.GetStats():
                self._answer(command.call_id, self._engine.stats)
            case messages.Shutdown():
                self._ended = True

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add_request(request)
        except Exception as error:
            code, message = _describe(error)
            self._outputs.append(
                TokenOutput(request_id=request.request_id, finish_reason="error", error=message, error_code=code)
            )

    def _answer(self, call_id: int, call: Callable[[], messages.Answer]) -> None:
        try:
            self._send(messages.Done(call_id, call()))
        except Exception as error:
            self._send(messages.Failed(call_id, *_describe(error)))

    def _prepare(self, command: messages.LoadAdapter) -> None:
        """Read an adapter's files; runs on a thread of its own and leaves the result, or the error, to the loop."""
        with self._load_permits:
            try:
                result = self._engine.prepare_adapter(command.name, command.path, command.content)
            except Exception as error:
                result = error
        self._loaded.append((command, result))
        with contextlib.suppress(BlockingIOError):  # full of wake-ups: one more says nothing new
            self._wake_sender.send(b"1")

    def _register_loaded(self) -> None:
        if not self._loaded:
            return
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(4096):
                pass
        while self._loaded:
            command, prepared = self._loaded.popleft()
            self._answer(command.call_id, partial(self._register, command, prepared))

    def _register(self, command: messages.LoadAdapter, prepared: Any) -> AdapterInfo:
        if isinstance(prepared, Exception):
            raise prepared
        return self._engine.register_adapter(prepared, command.replace, command.pinned)


def _describe(error: Exception) -> tuple[str, str]:
    """Code and message for the one who asked; what is not a `LorryError` is our bug, and its traceback is logged."""
    if isinstance(error, LorryError):
        return error.code, str(error)
    log.error("unexpected error", exc_info=error)
    return LorryError.code, f"{type(error).__name__}: {error}"


def run_worker(
    config: EngineConfig, commands_address: str, events_address: str, factory: str = ENGINE_FACTORY
) -> None:
    """Make the engine and run it until `Shutdown`; raises `SystemExit(1)` where it cannot start or a step fails."""
    context = zmq.Context()
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for end, address in ((commands, commands_address), (events, events_address)):
        end.set_hwm(0)  # never block on the server: what is under way is bounded by the requests
        end.linger = LINGER_MS
        end.connect(address)
    codec = messages.Codec()
    try:
        try:
            make_engine = _find_factory(factory)
            engine = make_engine(config, lambda text: events.send(codec.encode(messages.Progress(text))))
        except Exception as error:
            events.send(codec.encode(messages.StartFailed(*_describe(error))))
            raise SystemExit(1) from None
        try:
            Worker(engine, commands, events, codec).run()
        except Exception:
            log.critical("the engine failed and ends; all its requests are lost", exc_info=True)
            raise SystemExit(1) from None
    finally:
        context.destroy(linger=LINGER_MS)


def _find_factory(factory: str) -> EngineFactory:
    module, _, attribute = factory.partition(":")
    return cast(EngineFactory, getattr(importlib.import_module(module), attribute))


def _end_with_server(folder: str) -> None:
    """Block until the server's end of our standard input closes, then end at once: nobody is left to serve."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Entry of the process."""
    bootstrap = msgspec.json.decode(_read_line(), type=Bootstrap)
    threading.Thread(target=_end_with_server, args=(bootstrap.folder,), daemon=True).start()
    logging.basicConfig(
        level=bootstrap.log_level.upper(), format="%(asctime)s %(levelname)s [engine] %(name)s: %(message)s"
    )
    config = EngineConfig.parse(**bootstrap.config)
    run_worker(config, bootstrap.commands_address, bootstrap.events_address, bootstrap.factory)


def _read_line() -> bytes:
    """The first line of standard input, read without a buffer that would swallow what follows."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            raise SystemExit("the engine's process is started by the server, which tells it what to do on its input")
        line += byte
    return bytes(line)


if __name__ == "__main__":
    main()
