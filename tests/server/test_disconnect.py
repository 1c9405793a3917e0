"""A client that goes leaves nothing running behind."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.harness import RunningServer, wait_until


def send(server: RunningServer, path: str, body: dict[str, Any]) -> socket.socket:
    """A raw connection with a request on its way."""
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_chat(server: RunningServer, stream: bool, n: int):
    messages = [{"role": "user", "content": "slowly, please"}]
    body = {"model": "french", "messages": messages, "stream": stream, "n": n, "ignore_eos": True}
    with send(server, "/v1/chat/completions", body) as connection:
        wait_until(lambda: server.stats().num_running == n)
        assert server.stats().adapter_references == n
        if stream:
            assert connection.recv(4096)
    wait_until(server.is_idle, seconds=1.5)  # all of it takes more than two seconds


def test_completions_of_several_prompts(server: RunningServer):
    body = {"prompt": ["slowly one", "slowly two"], "ignore_eos": True}
    with send(server, "/v1/completions", body):
        wait_until(lambda: server.stats().num_running == 2)
    wait_until(server.is_idle, seconds=1.5)


def test_a_stream_that_is_closed_by_the_openai_client(server: RunningServer):
    stream = server.openai.chat.completions.create(
        model="french", messages=[{"role": "user", "content": "slowly"}], stream=True
    )
    next(iter(stream))
    stream.close()
    wait_until(server.is_idle, seconds=1.5)


def test_a_stop_string_frees_the_engine(server: RunningServer):
    assert server.chat("slowly now", stop=["work"]).json()["choices"][0]["message"]["content"] == "[base] all "
    wait_until(server.is_idle, seconds=1.0)
