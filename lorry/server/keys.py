"""Who may call which route: keys for inference and for administration."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lorry.config import ServerConfig
from lorry.server.responses import JsonResponse, error_body


class Guard:
    """ASGI middleware. The page, its files and /health are open; all else needs `--api-key`, where one is set.

    Routes of administration can make the server read any folder. They need `--admin-api-key`; where none is set,
    they are off, unless the server listens to this machine alone: then they are like the others.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, admin_paths: Collection[str]) -> None:
        self._app = app
        self._config = config
        self._admin_paths = frozenset(admin_paths)
        self._admin_is_off = config.admin_api_key is None and not is_loopback(config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JsonResponse | None:
        path = scope["path"]
        if _is_open(path):
            return None
        is_admin = path in self._admin_paths
        if is_admin and self._admin_is_off:
            message = (
                f"{path} is off: this server listens beyond its own machine and has no key for administration; "
                "start it with --admin-api-key"
            )
            return JsonResponse(error_body(message, 403, "admin_is_off"), status_code=403)
        key, name = self._config.api_key, "API key"
        if is_admin and self._config.admin_api_key is not None:
            key, name = self._config.admin_api_key, "key for administration (--admin-api-key)"
        given = Headers(scope=scope).get("authorization", "")
        if key is None or secrets.compare_digest(given.encode("latin-1"), f"Bearer {key}".encode()):
            return None
        body = error_body(f"the {name} is missing or wrong: send it as bearer token", 401, "invalid_api_key")
        return JsonResponse(body, status_code=401, headers={"www-authenticate": "Bearer"})


def is_loopback(host: str) -> bool:
    """Whether a server that listens there is reached from its own machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_open(path: str) -> bool:
    return path in ("/", "/health") or path.startswith("/ui/")
