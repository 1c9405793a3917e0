"""Who may call which route."""

import asyncio
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from lorry.config import ServerConfig
from lorry.server import adapters
from lorry.server.keys import Guard, is_loopback
from tests.server.harness import running_server, write_adapter

ADMIN, INFERENCE, OPEN = "/v1/load_lora_adapter", "/v1/models", "/health"


def statuses(key: str | None, **settings: str) -> dict[str, int]:
    """What each kind of route answers to a request with that key; 200: it was let through."""
    app = FastAPI(docs_url=None, openapi_url=None)
    for path in (ADMIN, INFERENCE, OPEN):
        app.add_api_route(path, lambda: "passed", methods=["GET"])
    guarded = Guard(app, ServerConfig(model="m", **settings), [ADMIN])
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def ask() -> dict[str, int]:
        transport = httpx.ASGITransport(guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            return {path: (await client.get(path)).status_code for path in (ADMIN, INFERENCE, OPEN)}

    return asyncio.run(ask())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("api_key", [None, "user"])
@pytest.mark.parametrize("admin_key", [None, "admin"])
@pytest.mark.parametrize("given", [None, "user", "admin", "wrong", ""])
def test_every_combination(host: str, api_key: str | None, admin_key: str | None, given: str | None):
    keys = {"api_key": api_key, "admin_api_key": admin_key}
    found = statuses(given, host=host, **{name: key for name, key in keys.items() if key is not None})
    assert found[OPEN] == 200
    assert found[INFERENCE] == (200 if api_key is None or given == api_key else 401)
    if admin_key is not None:
        assert found[ADMIN] == (200 if given == admin_key else 401)
    elif host == "0.0.0.0":
        assert found[ADMIN] == 403
    else:
        assert found[ADMIN] == found[INFERENCE]


def test_all_routes_of_adapters_are_of_administration():
    paths = {route.path for route in adapters.router.routes}
    assert {"/v1/load_lora_adapter", "/load_lora_adapter", "/v1/lora_adapters", "/v1/pin_lora_adapter"} <= paths


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("host.example", False),
    ],
)
def test_loopback(host: str, expected: bool):
    assert is_loopback(host) == expected


def test_a19_a_server_that_others_reach_has_no_administration_without_its_key(model: Path, tmp_path: Path):
    body = {"lora_name": "x", "lora_path": str(write_adapter(tmp_path / "x"))}
    with running_server(model, host="0.0.0.0") as server:
        for path in (ADMIN, "/load_lora_adapter", "/load_lora_adapter/"):
            refused = server.http.post(path, json=body, follow_redirects=True)
            assert refused.status_code == 403
            assert "--admin-api-key" in refused.json()["error"]["message"]
        assert server.http.get("/v1/lora_adapters").status_code == 403
        assert server.chat("who?").status_code == 200
    with running_server(model, host="0.0.0.0", api_key="user", admin_api_key="admin") as server:
        assert server.http.post(ADMIN, json=body).status_code == 401
        headers = {"Authorization": "Bearer admin"}
        assert server.http.post(ADMIN, json=body, headers=headers).status_code == 200
        assert server.says("x") == "x"
