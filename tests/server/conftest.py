"""Fixtures of the server's tests."""

from tests.server.harness import model, server, shared_server, tokenizer

__all__ = ["model", "server", "shared_server", "tokenizer"]
