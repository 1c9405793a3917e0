"""The HTTP server: OpenAI shapes in front of the engine's process."""
