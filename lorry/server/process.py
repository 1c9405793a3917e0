"""One life of the engine's process: start it, talk to it, notice its end, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from lorry.config import EngineConfig
from lorry.engine.messages import Codec, Command, Event, Shutdown
from lorry.engine.worker import Bootstrap
from lorry.errors import EngineUnavailable

MAX_ADDRESS_LEN = 90
"""Unix socket paths are limited to about 104 bytes; longer temporary folders are replaced by /tmp."""

DRAIN_SECONDS = 0.1
"""How long messages of a process that has ended may still be on their way."""


class EngineProcess:
    """A running worker. Its sockets live in a private folder, so messages of one life never reach another."""

    def __init__(self, process: Process, folder: str, context: Any, commands: Any, events: Any) -> None:
        self._process = process
        self._folder = folder
        self._context = context
        self._commands = commands
        self._events = events
        self._codec = Codec()
        self._exited: asyncio.Future[Any] = asyncio.create_task(process.wait())

    @classmethod
    async def start(cls, config: EngineConfig, factory: str, log_level: str) -> EngineProcess:
        """Start a worker; it loads the model and then says `Ready`."""
        folder = _private_folder()
        context = zmq.Context()
        try:
            commands = context.socket(zmq.PUSH)
            events = zmq.asyncio.Socket(context, zmq.PULL)
            for end in (commands, events):
                end.set_hwm(0)
                end.linger = 0
            bootstrap = Bootstrap(
                config=config.model_dump(mode="json", include=set(EngineConfig.model_fields)),
                folder=folder,
                factory=factory,
                log_level=log_level,
            )
            commands.bind(bootstrap.commands_address)
            events.bind(bootstrap.events_address)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "lorry.engine.worker"),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal reaches the server alone, which then ends us
            )
        except BaseException:
            context.destroy(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(bootstrap) + b"\n")
        return cls(process, folder, context, commands, events)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._exited.done()

    @property
    def exit_text(self) -> str:
        """How the process ended, for a person."""
        code = self._process.returncode
        if code is None:
            return "is running"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def send(self, command: Command) -> None:
        """Hand over a command at once; raises `EngineUnavailable` where the process is gone."""
        try:
            self._commands.send(self._codec.encode(command), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineUnavailable("the engine's process has ended") from error

    async def events(self) -> AsyncIterator[Event]:
        """All that the process says, until it has ended."""
        while True:
            message: asyncio.Future[Any] = self._events.recv()
            if not message.done() and not self._exited.done():
                await asyncio.wait({message, self._exited}, return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                await asyncio.wait({message}, timeout=DRAIN_SECONDS)
            if not message.done():
                message.cancel()
                return
            yield self._codec.decode_event(message.result())

    def kill(self) -> None:
        """End the process by force, without waiting."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self, grace: float) -> None:
        """End the process, by force after `grace` seconds, and free its sockets and folder."""
        try:
            if grace > 0 and not self._exited.done():
                with contextlib.suppress(EngineUnavailable):
                    self.send(Shutdown())
                await asyncio.wait({self._exited}, timeout=grace)
        finally:
            self.kill()
            self._events.close(0)
            self._commands.close(0)
            self._context.term()
            shutil.rmtree(self._folder, ignore_errors=True)
        await self._exited


def _private_folder() -> str:
    folder = tempfile.mkdtemp(prefix="lorry-")
    if len(os.fsencode(folder)) > MAX_ADDRESS_LEN:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="lorry-", dir="/tmp")
    return folder
