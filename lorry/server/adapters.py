"""Loading, unloading and pinning adapters while the server runs, in the shapes of vLLM and SGLang."""

from __future__ import annotations

import logging

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from lorry.errors import AdapterExists, InvalidRequest
from lorry.server.generate import Front
from lorry.server.names import check_adapter_name
from lorry.server.protocol import LoadAdapterBody, PinAdapterBody, UnloadAdapterBody
from lorry.server.responses import JsonResponse
from lorry.types import AdapterInfo

router = APIRouter()

VERSION_HEADER = "x-lora-version"
"""The version that a load has made: a number that is never used again."""

IN_MEMORY = "(sent in a request)"
"""Stands for the path of an adapter that came without files."""

log = logging.getLogger(__name__)


@router.post("/v1/load_lora_adapter")
@router.post("/load_lora_adapter")
async def load_lora_adapter(body: LoadAdapterBody, request: Request) -> PlainTextResponse:
    """Read, validate and register an adapter; with the answer it is in `/v1/models` and can be asked for."""
    front = _front(request)
    _check_name(front, body.lora_name, body.load_inplace)
    info = await front.client.load_adapter(body.lora_name, body.lora_path, body.load_inplace, body.pinned)
    return _loaded(info)


@router.post("/v1/load_lora_adapter_from_tensors")
@router.post("/load_lora_adapter_from_tensors")
async def load_lora_adapter_from_tensors(
    request: Request, lora_name: str, load_inplace: bool = False, pinned: bool = False
) -> PlainTextResponse:
    """As `load_lora_adapter`, of the body: a safetensors file whose metadata has `adapter_config`, as JSON."""
    front = _front(request)
    _check_name(front, lora_name, load_inplace)
    content = await request.body()
    return _loaded(await front.client.load_adapter(lora_name, IN_MEMORY, load_inplace, pinned, content))


@router.post("/v1/unload_lora_adapter")
@router.post("/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadAdapterBody, request: Request) -> PlainTextResponse:
    """Forget an adapter; requests that are running with it finish, or with `abort` end."""
    front = _front(request)
    info = await front.client.unload_adapter(body.lora_name, body.abort)
    front.metrics.forget(info.name)
    log.info("adapter %r unloaded", info.name)
    return PlainTextResponse(f"Success: LoRA adapter '{info.name}' removed successfully.")


@router.post("/v1/pin_lora_adapter")
async def pin_lora_adapter(body: PinAdapterBody, request: Request) -> PlainTextResponse:
    """Keep an adapter on the device."""
    info = await _front(request).client.pin_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{info.name}' is pinned.")


@router.post("/v1/unpin_lora_adapter")
async def unpin_lora_adapter(body: PinAdapterBody, request: Request) -> PlainTextResponse:
    """Let an adapter leave the device when others need the room."""
    info = await _front(request).client.pin_adapter(body.lora_name, pinned=False)
    return PlainTextResponse(f"Success: LoRA adapter '{info.name}' is not pinned any more.")


@router.get("/v1/lora_adapters")
async def list_lora_adapters(request: Request) -> JsonResponse:
    """Every adapter: where it is, its size, rank and version, and the requests that run with it or wait for it."""
    listed = await _front(request).client.adapter_list()
    return JsonResponse({
        "object": "list",
        "data": [
            {
                "id": status.info.name,
                "version": status.info.uid,
                "path": status.info.path,
                "rank": status.info.rank,
                "bytes": status.info.num_bytes,
                "target_modules": status.info.target_modules,
                "warnings": status.info.warnings,
                **{k: v for k, v in msgspec.structs.asdict(status).items() if k != "info"},
            }
            for status in listed.adapters
        ],
    })  # fmt: skip


def _front(request: Request) -> Front:
    front: Front = request.app.state.front
    if not front.config.enable_lora:
        raise InvalidRequest("this server was started with LoRA switched off (enable-lora: false)")
    return front


def _check_name(front: Front, name: str, replace: bool) -> None:
    check_adapter_name(name, front.config)
    if not replace and (loaded := front.client.adapters.get(name)) is not None:
        raise AdapterExists(
            f"an adapter {loaded.name!r} is loaded already, from {loaded.path}: unload it first, or replace it with "
            "load_inplace"
        )


def _loaded(info: AdapterInfo) -> PlainTextResponse:
    log.info("adapter %r loaded from %s: rank %d, %d bytes", info.name, info.path, info.rank, info.num_bytes)
    answer = PlainTextResponse(f"Success: LoRA adapter '{info.name}' added successfully.")
    answer.headers[VERSION_HEADER] = str(info.uid)
    return answer
