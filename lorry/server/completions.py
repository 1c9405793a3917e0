"""`POST /v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from lorry.server.answer import Answer
from lorry.server.chat import MIN_LOGPROB
from lorry.server.generate import Front, Piece, Token
from lorry.server.protocol import CompletionBody, CompletionChoice, CompletionLogprobs
from lorry.text import Tokenizer

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one or several texts; the choices of the first prompt come first."""
    front: Front = request.app.state.front
    await front.find(body.model)  # an unknown name is refused before any work is done
    params = body.sampling()
    prompts = await front.encode_prompts(body.prompts())
    generation = front.start(body.model, prompts, params, "cmpl", "prompt")
    return await Answer(request, body, generation, CompletionShape(front.tokenizer)).respond()


class CompletionShape:
    """Choices of text completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, index: int) -> None:
        return None

    def delta(self, piece: Piece) -> CompletionChoice:
        return self.whole(piece)

    def whole(self, piece: Piece) -> CompletionChoice:
        return CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=self._logprobs(piece.tokens),
            finish_reason=piece.finish_reason,
        )

    def _logprobs(self, tokens: tuple[Token, ...]) -> CompletionLogprobs | None:
        if not tokens:
            return None
        return CompletionLogprobs(
            tokens=[self._tokenizer.token_text(token.token_id) for token in tokens],
            token_logprobs=[max(token.logprobs.logprob, MIN_LOGPROB) for token in tokens],
            top_logprobs=[self._top(token) for token in tokens],
            text_offset=[token.offset for token in tokens],
        )

    def _top(self, token: Token) -> dict[str, float]:
        """The most likely tokens and the sampled one; of tokens with the same text the likelier stays."""
        top: dict[str, float] = {}
        for token_id, logprob in (*token.logprobs.top, (token.token_id, token.logprobs.logprob)):
            top.setdefault(self._tokenizer.token_text(token_id), max(logprob, MIN_LOGPROB))
        return top
