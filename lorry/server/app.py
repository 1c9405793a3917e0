"""The HTTP application: routes, models, health, and the one place where errors become HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from msgspec import UNSET
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from lorry.config import ServerConfig
from lorry.errors import EngineUnavailable, InvalidRequest, LorryError, ModelNotFound
from lorry.server import adapters, chat, completions
from lorry.server.client import EngineClient
from lorry.server.generate import Front
from lorry.server.keys import Guard
from lorry.server.protocol import ModelCard, ModelList
from lorry.server.responses import JsonResponse, error_body, lorry_error_body
from lorry.text import Tokenizer

UI_FOLDER = Path(__file__).parent / "ui"


ANSWER_SECONDS = 30.0
"""An engine that is alive but silent for so long, many times the longest step, is reported as unavailable."""


def create_app(config: ServerConfig, client: EngineClient, tokenizer: Tokenizer) -> FastAPI:
    """The application in front of an engine that was started; it ends the engine when it is shut down."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await client.close()

    app = FastAPI(title="Lorry", lifespan=lifespan)
    app.state.front = Front(config, client, tokenizer)
    app.state.created = int(time.time())
    for router in (chat.router, completions.router, adapters.router):
        app.include_router(router)
    app.add_api_route("/v1/models", list_models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", get_model, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"], include_in_schema=False)
    app.add_api_route("/", page, methods=["GET"], include_in_schema=False)
    app.mount("/ui", StaticFiles(directory=UI_FOLDER), name="ui")
    app.exception_handler(LorryError)(_on_lorry_error)
    app.exception_handler(RequestValidationError)(_on_validation_error)
    app.exception_handler(HTTPException)(_on_http_exception)
    app.exception_handler(Exception)(_on_unexpected_error)
    admin_paths = [route.path for route in adapters.router.routes if isinstance(route, APIRoute)]
    app.add_middleware(Guard, config=config, admin_paths=admin_paths)
    return app


async def page() -> Response:
    """The page on which adapters are tried side by side."""
    return FileResponse(UI_FOLDER / "index.html")


async def list_models(request: Request) -> Response:
    """The base and every adapter that can be asked for now."""
    return JsonResponse(ModelList(data=_model_cards(request)))


async def get_model(model_id: str, request: Request) -> Response:
    """One model, by its exact id."""
    for card in _model_cards(request):
        if card.id == model_id:
            return JsonResponse(card)
    raise ModelNotFound(f"the model {model_id!r} does not exist; /v1/models lists what is served")


def _model_cards(request: Request) -> list[ModelCard]:
    front: Front = request.app.state.front
    base, created = front.config.base_name, request.app.state.created
    cards = [ModelCard(id=base, created=created, root=front.config.model, parent=None)]
    for adapter in front.client.adapters.values():
        card = ModelCard(
            id=adapter.name,
            created=created,
            root=adapter.path,
            parent=base,
            rank=adapter.rank,
            description=adapter.description or UNSET,
            examples=adapter.examples or UNSET,
        )
        cards.append(card)
    return cards


async def metrics(request: Request) -> Response:
    """For Prometheus."""
    front: Front = request.app.state.front
    return Response(await front.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def health(request: Request) -> Response:
    """200 with the engine's live counts when requests can be taken, else 503 with the reason."""
    client: EngineClient = request.app.state.front.client
    reason = client.reason
    if reason is None:
        try:
            stats = await asyncio.wait_for(client.stats(), ANSWER_SECONDS)
            return JsonResponse({"status": "ok", "engine": msgspec.structs.asdict(stats)})
        except (EngineUnavailable, TimeoutError):
            reason = client.reason or f"the engine has not answered for {ANSWER_SECONDS:.0f} seconds"
    return JsonResponse({"status": "unavailable", "reason": reason}, status_code=503)


async def _on_lorry_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, LorryError)
    return JsonResponse(lorry_error_body(error), status_code=error.status)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    """The first thing that is wrong with a body, as a 400 that names the field."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = [str(part) for part in first["loc"][1:]]
    param = path[0] if path and first["type"] != "json_invalid" else None
    match first["type"]:
        case "json_invalid":
            message = f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}"
        case "extra_forbidden":
            message = f"unknown field {'.'.join(path)!r}"
        case "model_attributes_type" | "dict_type" if not path:
            message = "the body must be a JSON object, sent with Content-Type: application/json"
        case "missing":
            message = f"the field {'.'.join(path)!r} is missing" if path else "the body is missing"
        case _:
            message = f"{'.'.join(path) or 'body'}: {first['msg']}"
    return JsonResponse(error_body(message, 400, InvalidRequest.code, param), status_code=400)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = error_body(message, error.status_code, None)
    return JsonResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_unexpected_error(_: Request, error: Exception) -> Response:
    """A bug of ours; its traceback is logged by the server."""
    body = error_body(f"internal error ({type(error).__name__})", 500, LorryError.code)
    return JsonResponse(body, status_code=500)
