"""`serve`: start the engine and the HTTP server, say what is served and where, run until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import shlex
import socket
from collections.abc import Iterable
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from lorry import __version__
from lorry.config import EngineConfig, ServerConfig
from lorry.engine.worker import ENGINE_FACTORY
from lorry.errors import ConfigError, InvalidRequest
from lorry.server.app import create_app
from lorry.server.client import EngineClient
from lorry.server.names import check_adapter_name
from lorry.server.saved import SavedAdapters
from lorry.text import Tokenizer
from lorry.types import AdapterInfo, EngineInfo

GRACE_SECONDS = 5
"""How long running answers may take when the server is told to stop."""


def serve(config: ServerConfig, factory: str = ENGINE_FACTORY) -> int:
    """Serve until SIGINT or SIGTERM, then return 0; raises `LorryError` where the start fails.

    `factory` is the engine's class as `module:attribute`.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if config.log_level == "info":  # the summary says what uvicorn would
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(config, factory, Console()))
    return 0


async def _serve(config: ServerConfig, factory: str, console: Console) -> None:
    _check_adapter_names(config)
    with bind(config.host, config.port) as listener:
        client = EngineClient(
            config,
            progress=lambda text: console.print(f"[dim]{escape(text)}[/dim]", highlight=False),
            factory=factory,
            log_level=config.log_level,
            saved=None if config.lora_state is None else SavedAdapters(Path(config.lora_state)),
        )
        try:
            tokenizer, info = await _start(config, client)
            _listen(listener)
            print_summary(console, config, info, client.adapters.values(), _url(config.host, listener))
            server = uvicorn.Server(
                uvicorn.Config(
                    create_app(config, client, tokenizer),
                    log_config=None,
                    log_level=None,
                    timeout_graceful_shutdown=GRACE_SECONDS,
                )
            )
            await server.serve(sockets=[listener])
        finally:
            await client.close()


async def _start(config: ServerConfig, client: EngineClient) -> tuple[Tokenizer, EngineInfo]:
    """Load the tokenizer while the engine starts in its own process."""
    starting = asyncio.create_task(client.start())
    try:
        path = config.tokenizer_path or config.model
        tokenizer = await asyncio.to_thread(Tokenizer.load, path, config.chat_template)
        info = await starting
        await client.load_saved()
        return tokenizer, info
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        raise


def _check_adapter_names(config: ServerConfig) -> None:
    for name in config.lora_paths:
        try:
            check_adapter_name(name, config)
        except InvalidRequest as error:
            raise ConfigError(f"lora-paths: {error}") from None


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port while the model loads, so that a port in use is reported at once.

    asyncio switches Nagle's algorithm off only where the protocol is said to be TCP; with it, answers wait 40 ms.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _listen_error(host, port, error) from None
    return listener


def _listen(listener: socket.socket) -> None:
    try:
        listener.listen(2048)
    except OSError as error:  # two servers may have bound a port at which none listened yet
        host, port = listener.getsockname()[:2]
        raise _listen_error(host, port, error) from None


def _listen_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} of {host} is in use: choose another with --port, or 0 for a free one")
    return ConfigError(f"cannot listen on port {port} of {host!r}: {error.strerror or error}")


def _url(host: str, listener: socket.socket) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{listener.getsockname()[1]}"


def print_summary(
    console: Console, config: ServerConfig, info: EngineInfo, adapters: Iterable[AdapterInfo], url: str
) -> None:
    """What is served, with what, how much memory it takes, and how to try it."""
    adapters = list(adapters)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, text in _facts(config, info, adapters):
        rows.add_row(name, escape(text))
    rows.add_row("URL", f"[link={url}]{url}[/link]")
    title = f"Lorry {__version__}, ready in {info.load_seconds:.1f} s"
    console.print(Panel(rows, title=title, title_align="left", expand=False))
    if adapters:
        console.print(_adapter_table(adapters))
    for adapter in adapters:
        for warning in adapter.warnings:
            console.print(f"[yellow]{escape(adapter.name)}: {escape(warning)}[/yellow]", highlight=False)
    console.print(_try_it(config, adapters, url), markup=False, highlight=False, soft_wrap=True)


def _facts(config: EngineConfig, info: EngineInfo, adapters: list[AdapterInfo]) -> list[tuple[str, str]]:
    name = config.base_name if config.base_name == info.model else f"{config.base_name} ({info.model})"
    memory = [f"weights {_bytes(info.weight_bytes)}", f"KV {_bytes(info.kv_bytes)} ({info.kv_tokens:,} tokens)"]
    if config.enable_lora:
        used = sum(adapter.num_bytes for adapter in adapters)
        memory.append(f"LoRA {_bytes(info.lora_bytes)} ({_bytes(used)} in use)")
    backends = [f"attention {info.attention_backend}", f"LoRA {info.lora_backend}"]
    if info.experts_backend is not None:
        backends.append(f"experts {info.experts_backend}")
    lora = f"{len(adapters)} loaded, room for {info.max_loras}, {info.num_lora_sites:,} sites in the model"
    return [
        ("model", name),
        ("parameters", f"{_count(info.num_parameters)}, {info.architecture}, {info.dtype} on {info.device}"),
        ("context", f"{info.context_length:,} tokens"),
        ("memory", ", ".join(memory)),
        ("backends", ", ".join(backends)),
        ("adapters", lora if config.enable_lora else "switched off"),
    ]


def _adapter_table(adapters: list[AdapterInfo]) -> Table:
    table = Table("adapter", title=None)
    table.add_column("rank", justify="right")
    table.add_column("size", justify="right")
    table.add_column("modules", overflow="fold")
    table.add_column("from", overflow="fold")
    for adapter in adapters:
        texts = (adapter.name, str(adapter.rank), _bytes(adapter.num_bytes), " ".join(adapter.target_modules))
        table.add_row(*map(escape, texts), escape(adapter.path))
    return table


def _try_it(config: ServerConfig, adapters: list[AdapterInfo], url: str) -> str:
    """Lines to paste that show the server at work: an answer of the first adapter, or of the base."""
    model = adapters[0].name if adapters else config.base_name
    question = adapters[0].examples[0] if adapters and adapters[0].examples else "Hello!"
    messages = json.dumps([{"role": "user", "content": question}], ensure_ascii=False)
    name = json.dumps(model, ensure_ascii=False)
    body = f'{{"model": {name}, "messages": {messages}, "max_tokens": 80}}'
    key = "" if config.api_key is None else ' -H "Authorization: Bearer $API_KEY"'
    api_key = "none" if config.api_key is None else "YOUR KEY"
    return "\n".join(
        [
            f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}",
            "",
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{url}/v1", api_key="{api_key}")',
            f"answer = client.chat.completions.create(model={name}, messages={messages}, max_tokens=80)",
            "print(answer.choices[0].message.content)",
        ]
    )


def _bytes(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _count(number: int) -> str:
    for limit, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:,}"
