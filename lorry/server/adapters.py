"""Loading and unloading adapters while the server runs, in vLLM's shapes."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from lorry.errors import AdapterExists, InvalidRequest
from lorry.server.generate import Front
from lorry.server.names import check_adapter_name
from lorry.server.protocol import LoadAdapterBody, UnloadAdapterBody

router = APIRouter()

log = logging.getLogger(__name__)


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadAdapterBody, request: Request) -> PlainTextResponse:
    """Read, validate and register an adapter; with the answer it is in `/v1/models` and can be asked for."""
    front: Front = request.app.state.front
    _need_lora(front)
    check_adapter_name(body.lora_name, front.config)
    if (loaded := front.client.adapters.get(body.lora_name)) is not None:
        raise AdapterExists(f"an adapter {loaded.name!r} is loaded already, from {loaded.path}: unload it first")
    info = await front.client.load_adapter(body.lora_name, body.lora_path)
    log.info("adapter %r loaded from %s: rank %d, %d bytes", info.name, info.path, info.rank, info.num_bytes)
    return PlainTextResponse(f"Success: LoRA adapter '{info.name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadAdapterBody, request: Request) -> PlainTextResponse:
    """Forget an adapter; requests that are running with it finish."""
    front: Front = request.app.state.front
    _need_lora(front)
    info = await front.client.unload_adapter(body.lora_name)
    log.info("adapter %r unloaded", info.name)
    return PlainTextResponse(f"Success: LoRA adapter '{info.name}' removed successfully.")


def _need_lora(front: Front) -> None:
    if not front.config.enable_lora:
        raise InvalidRequest("this server was started with LoRA switched off (enable-lora: false)")
