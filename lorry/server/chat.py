"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from lorry.server.answer import Answer
from lorry.server.generate import Front, Piece, Token
from lorry.server.protocol import ChatBody, ChatChoice, ChatLogprob, ChatLogprobs, ChatMessage, TopLogprob
from lorry.text import Tokenizer

router = APIRouter()

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    front: Front = request.app.state.front
    await front.find(body.model)  # an unknown name is refused before any work is done
    params = body.sampling()
    prompt = await front.render_chat([message.model_dump(exclude_none=True) for message in body.messages])
    generation = front.start(body.model, [prompt], params, "chatcmpl", "messages")
    return await Answer(request, body, generation, ChatShape(front.tokenizer)).respond()


class ChatShape:
    """Choices of chat completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, index: int) -> ChatChoice:
        return ChatChoice(index=index, delta=ChatMessage(role="assistant", content=""))

    def delta(self, piece: Piece) -> ChatChoice:
        return ChatChoice(
            index=piece.index,
            delta=ChatMessage(content=piece.text) if piece.finish_reason is None else ChatMessage(),
            logprobs=self._logprobs(piece.tokens),
            finish_reason=piece.finish_reason,
        )

    def whole(self, piece: Piece) -> ChatChoice:
        return ChatChoice(
            index=piece.index,
            message=ChatMessage(role="assistant", content=piece.text),
            logprobs=self._logprobs(piece.tokens),
            finish_reason=piece.finish_reason,
        )

    def _logprobs(self, tokens: tuple[Token, ...]) -> ChatLogprobs | None:
        if not tokens:
            return None
        return ChatLogprobs(content=[self._logprob(token) for token in tokens])

    def _logprob(self, token: Token) -> ChatLogprob:
        top = [
            TopLogprob(
                token=self._tokenizer.token_text(token_id),
                logprob=max(logprob, MIN_LOGPROB),
                bytes=list(self._tokenizer.token_bytes(token_id)),
            )
            for token_id, logprob in token.logprobs.top
        ]
        return ChatLogprob(
            token=self._tokenizer.token_text(token.token_id),
            logprob=max(token.logprobs.logprob, MIN_LOGPROB),
            bytes=list(self._tokenizer.token_bytes(token.token_id)),
            top_logprobs=top,
        )
