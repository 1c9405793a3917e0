"""The server's side of the engine: requests, adapters by name, and an engine process that is kept alive."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import msgspec

from lorry.config import EngineConfig
from lorry.engine.messages import (
    Abort,
    Add,
    Answer,
    Done,
    Event,
    Failed,
    GetStats,
    ListAdapters,
    LoadAdapter,
    Outputs,
    PinAdapter,
    Progress,
    Ready,
    StartFailed,
    UnloadAdapter,
)
from lorry.engine.worker import ENGINE_FACTORY
from lorry.errors import EngineUnavailable, LorryError, ModelNotFound, from_code
from lorry.server.process import EngineProcess
from lorry.server.saved import SavedAdapter, SavedAdapters
from lorry.types import AdapterInfo, AdapterList, EngineInfo, EngineRequest, EngineStats, TokenOutput

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""How long an engine that is told to end may take before it is killed."""

OnOutput = Callable[[TokenOutput], None]
Call = LoadAdapter | UnloadAdapter | PinAdapter | ListAdapters | GetStats


@dataclass(frozen=True)
class RestartPolicy:
    """After the n-th failure in a row wait `delay * 2 ** (n - 1)` seconds, at most `max_delay`.

    A process that was ready for `stable_seconds` starts the count anew; at `max_failures` the client gives up.
    """

    delay: float = 0.5
    max_delay: float = 30.0
    max_failures: int = 5
    stable_seconds: float = 60.0


class EngineClient:
    """Starts the engine's process, speaks to it, and starts it again, with its adapters, when it dies.

    Everything here runs on one event loop. `adapters` is the truth about names: it is up to date before a call that
    changes it returns, and it survives the death of the process.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None] = log.info,
        factory: str = ENGINE_FACTORY,
        restart: RestartPolicy | None = None,
        log_level: str = "info",
        saved: SavedAdapters | None = None,
    ) -> None:
        """`saved` is kept up to date with what is loaded and unloaded here; see `load_saved`."""
        self.adapters: dict[str, AdapterInfo] = {}
        self.reason: str | None = "the engine has not been started"
        """Why no request can be taken now; None when the engine is ready."""
        self._config = config
        self._progress = progress
        self._factory = factory
        self._restart = restart or RestartPolicy()
        self._log_level = log_level
        self._info: EngineInfo | None = None
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._start_error: LorryError | None = None
        self._ready_since: float | None = None
        self._sources: dict[str, LoadAdapter | None] = {}  # what users asked for last, by name; None: it has no files
        self._saved = saved
        self._requests: dict[str, OnOutput] = {}
        self._calls: dict[int, tuple[Call, asyncio.Future[Answer]]] = {}
        self._call_ids = itertools.count(1)

    @property
    def ready(self) -> bool:
        return self.reason is None

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it was last ready."""
        if self._info is None:
            raise EngineUnavailable(self.reason or "the engine is starting")
        return self._info

    @property
    def pid(self) -> int | None:
        """Of the engine's process, while there is one."""
        return self._process.pid if self._process else None

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready; raises what kept it from starting."""
        self._started = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        try:
            return await asyncio.shield(self._started)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the engine's process and all requests. Safe to call again."""
        if self._supervisor is not None:
            self._lose("the server is shutting down")
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
            self._supervisor = None

    # Requests

    def submit(self, request: EngineRequest, on_output: OnOutput) -> None:
        """Hand over a request; `on_output` gets its outputs on the event loop, of which the last is terminal.

        Nothing happens between the call and the hand-over, so an `adapter_uid` that was just looked up is valid.
        """
        self._running_process().send(Add(request))
        self._requests[request.request_id] = on_output

    def abort(self, request_id: str) -> None:
        """End a request early: no more of its outputs are passed on. One that has ended is ignored."""
        if self._requests.pop(request_id, None) is not None and self._process is not None:
            try:
                self._process.send(Abort(request_id))
            except EngineUnavailable:
                log.debug("request %s ended with its engine", request_id)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """Outputs of a request up to its terminal one; closing the iterator early aborts the request."""
        outputs: asyncio.Queue[TokenOutput] = asyncio.Queue()
        self.submit(request, outputs.put_nowait)
        try:
            while True:
                output = await outputs.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self.abort(request.request_id)

    # Calls

    async def load_adapter(
        self, name: str, path: str, replace: bool = False, pinned: bool = False, content: bytes | None = None
    ) -> AdapterInfo:
        """Load an adapter, from its folder or from `content`; when this returns, requests may name it.

        To `replace`: where the name has an adapter, running requests finish on its weights, later ones get the new.
        """
        command = LoadAdapter(next(self._call_ids), name, path, replace, pinned, content)
        return await self._call_adapter(command)

    async def load_saved(self) -> None:
        """Load what was loaded when the server ended; what cannot be loaded is logged, and stays saved."""
        for adapter in self._saved.read() if self._saved is not None else []:
            command = LoadAdapter(next(self._call_ids), adapter.name, adapter.path, True, adapter.pinned)
            try:
                await self._call_adapter(command)
            except LorryError as error:
                log.error("adapter %r of --lora-state cannot be loaded: %s", adapter.name, error)
                self._sources[adapter.name] = command

    async def unload_adapter(self, name: str, abort: bool = False) -> AdapterInfo:
        """Forget an adapter; its running requests finish, or with `abort` end."""
        self._check_known(name)
        return await self._call_adapter(UnloadAdapter(next(self._call_ids), name, abort))

    async def pin_adapter(self, name: str, pinned: bool = True) -> AdapterInfo:
        """Keep an adapter on the device, or let it go when others need the room."""
        self._check_known(name)
        return await self._call_adapter(PinAdapter(next(self._call_ids), name, pinned))

    async def adapter_list(self) -> AdapterList:
        """Every adapter, and where it is now."""
        result = await self._call(self._running_process(), ListAdapters(next(self._call_ids)))
        assert isinstance(result, AdapterList)
        return result

    def _check_known(self, name: str) -> None:
        if name not in self.adapters:
            raise ModelNotFound(f"no adapter {name!r} is loaded")

    async def stats(self) -> EngineStats:
        """The engine's live counts."""
        result = await self._call(self._running_process(), GetStats(next(self._call_ids)))
        assert isinstance(result, EngineStats)
        return result

    async def _call_adapter(self, command: LoadAdapter | UnloadAdapter | PinAdapter) -> AdapterInfo:
        result = await self._call(self._running_process(), command)
        assert isinstance(result, AdapterInfo)
        return result

    async def _call(self, process: EngineProcess, command: Call) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        process.send(command)
        self._calls[command.call_id] = command, answer
        return await answer

    def _running_process(self) -> EngineProcess:
        if self.reason is not None or self._process is None:
            raise EngineUnavailable(self.reason or "the engine is starting")
        return self._process

    # What the engine says

    def _handle(self, event: Event) -> None:
        match event:
            case Outputs():
                for output in event.outputs:
                    self._pass_on(output)
            case Done():
                self._record(*self._calls.pop(event.call_id), event.result)
            case Failed():
                _, answer = self._calls.pop(event.call_id)
                if not answer.done():
                    answer.set_exception(from_code(event.code, event.message))
            case Progress():
                self._progress(event.text)
            case StartFailed():
                self._start_error = from_code(event.code, event.message)

    def _pass_on(self, output: TokenOutput) -> None:
        on_output = self._requests.get(output.request_id)
        if on_output is None:  # aborted
            return
        if output.finish_reason is not None:
            del self._requests[output.request_id]
        on_output(output)

    def _record(self, command: Call, answer: asyncio.Future[Answer], result: Answer) -> None:
        """Let the registry follow the engine, also where the caller has gone meanwhile."""
        if isinstance(command, LoadAdapter) and isinstance(result, AdapterInfo):
            self.adapters[command.name] = result
            self._sources[command.name] = command if command.content is None else None
            self._save()
        elif isinstance(command, PinAdapter) and isinstance(result, AdapterInfo):
            source = self._sources.get(command.name, LoadAdapter(0, command.name, result.path))
            self._sources[command.name] = source and msgspec.structs.replace(source, pinned=command.pinned)
            self._save()
        elif isinstance(command, UnloadAdapter):
            self.adapters.pop(command.name, None)
            self._sources.pop(command.name, None)
            self._save()
        if not answer.done():
            answer.set_result(result)

    def _save(self) -> None:
        if self._saved is not None:
            known = [source for source in self._sources.values() if source is not None]
            self._saved.write(SavedAdapter(source.name, source.path, source.pinned) for source in known)

    # Life and death of the process

    async def _supervise(self) -> None:
        """Run one process after the other, until closed or until too many fail in a row."""
        failures = 0
        try:
            while True:
                ended = await self._live()
                if self._started is not None and not self._started.done():
                    self._started.set_exception(self._start_error or EngineUnavailable(ended))
                    return
                stable = self._ready_since is not None and (
                    time.monotonic() - self._ready_since >= self._restart.stable_seconds
                )
                failures = 1 if stable else failures + 1
                if failures >= self._restart.max_failures:
                    self.reason = f"{ended}; given up after {failures} failures in a row, restart the server"
                    log.critical("%s", self.reason)
                    return
                delay = min(self._restart.delay * 2 ** (failures - 1), self._restart.max_delay)
                log.error("%s; starting it again in %.1f s (failure %d)", ended, delay, failures)
                await asyncio.sleep(delay)
        except Exception:
            self._lose("the server has lost its engine through an internal error")
            log.critical("%s", self.reason, exc_info=True)
        finally:
            if self._started is not None:
                self._started.cancel()

    async def _live(self) -> str:
        """One process, from its start to its end; gives the reason of the end."""
        self._ready_since = None
        self._start_error = None
        try:
            process = await EngineProcess.start(self._config, self._factory, self._log_level)
        except OSError as error:
            return f"the engine's process cannot be started: {error}"
        self._process = process
        restore: asyncio.Task[None] | None = None
        try:
            async for event in process.events():
                if not isinstance(event, Ready):
                    self._handle(event)
                elif self._info is None:
                    self.adapters = {adapter.name: adapter for adapter in event.info.adapters}
                    self._become_ready(event.info)
                else:
                    restore = asyncio.create_task(self._restore(process, event.info))
            ended = f"the engine's process {process.exit_text}"
            if self._start_error is not None:
                ended += f" ({self._start_error})"
            self._lose(f"{ended} and is being started again")
            if restore is not None:
                await restore
            return ended
        finally:
            if restore is not None:
                restore.cancel()
            self._process = None
            await process.close(grace=STOP_SECONDS if self._ready_since is not None else 0)

    def _become_ready(self, info: EngineInfo) -> None:
        self._info = info
        self._ready_since = time.monotonic()
        self.reason = None
        if self._started is not None and not self._started.done():
            self._started.set_result(info)

    async def _restore(self, process: EngineProcess, info: EngineInfo) -> None:
        """Give a new process the adapters that the last one had; only then is it ready."""
        wanted = dict(self.adapters)
        present = {adapter.name: adapter for adapter in info.adapters}
        try:
            for name, adapter in present.items():
                if name in wanted and wanted[name].path == adapter.path and name not in self._sources:
                    self.adapters[name] = adapter
                    del wanted[name]
                else:
                    await self._call(process, UnloadAdapter(next(self._call_ids), name))
            for name, adapter in wanted.items():
                source = self._sources.get(name, LoadAdapter(0, name, adapter.path))
                if source is None:
                    log.error("adapter %r is lost with the engine: it was sent in a request", name)
                    self.adapters.pop(name, None)
                    continue
                try:
                    await self._call(process, msgspec.structs.replace(source, call_id=next(self._call_ids)))
                except EngineUnavailable:
                    raise
                except LorryError as error:
                    log.error("adapter %r is lost, it cannot be loaded again from %s: %s", name, source.path, error)
                    self.adapters.pop(name, None)
        except EngineUnavailable as error:
            self.adapters = wanted | self.adapters  # the next process gets another try
            log.debug("adapters were not restored: %s", error)
            return
        if not process.alive:
            return
        log.info("the engine is ready again, with %d adapters", len(self.adapters))
        self._become_ready(info)

    def _lose(self, reason: str) -> None:
        """Nothing can be taken any more: end all that is under way."""
        self.reason = reason
        requests, self._requests = self._requests, {}
        for request_id, on_output in requests.items():
            on_output(
                TokenOutput(
                    request_id=request_id, finish_reason="error", error=reason, error_code=EngineUnavailable.code
                )
            )
        calls, self._calls = self._calls, {}
        for _, answer in calls.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable(reason))
