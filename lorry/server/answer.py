"""A generation as an HTTP answer, whole or streamed; how a choice looks is for the endpoint's `Shape` to say."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import Protocol

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from lorry.errors import LorryError
from lorry.server.generate import Generation, Piece
from lorry.server.protocol import ChatChoice, Completion, CompletionChoice, GenerationBody, Usage
from lorry.server.responses import (
    CLIENT_CLOSED_REQUEST,
    DONE_EVENT,
    ClientGone,
    EventStream,
    JsonResponse,
    error_body,
    event,
    lorry_error_body,
    unless_gone,
)

log = logging.getLogger(__name__)


class Shape(Protocol):
    """How the choices of one endpoint look."""

    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> ChatChoice | CompletionChoice | None:
        """What comes before the first text of a choice in a stream; None for nothing."""

    def delta(self, piece: Piece) -> ChatChoice | CompletionChoice:
        """A piece in a stream."""

    def whole(self, piece: Piece) -> ChatChoice | CompletionChoice:
        """All of a choice."""


class Answer:
    """Gives a generation to a client, and ends it when the client has gone."""

    def __init__(self, request: Request, body: GenerationBody, generation: Generation, shape: Shape) -> None:
        self._request = request
        self._body = body
        self._generation = generation
        self._shape = shape
        self._created = int(time.time())

    async def respond(self) -> Response:
        """The response; an error before the first token is raised, a later one of a stream is an event in it."""
        try:
            if not self._body.stream:
                return await unless_gone(self._request.receive, self._whole())
            first = await unless_gone(self._request.receive, self._generation.next_piece())
        except ClientGone:
            self._generation.close()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except BaseException:
            self._generation.close()
            raise
        return EventStream(self._events(first), self._generation.close)

    async def _whole(self) -> Response:
        pieces: list[list[Piece]] = [[] for _ in self._generation.choices]
        while (piece := await self._generation.next_piece()) is not None:
            pieces[piece.index].append(piece)
        choices = [self._shape.whole(_join(parts)) for parts in pieces]
        return JsonResponse(self._completion(self._shape.whole_object, choices, self._usage()))

    async def _events(self, piece: Piece | None) -> AsyncIterator[bytes]:
        opened: set[int] = set()
        try:
            while piece is not None:
                for choice in self._chunks(piece, opened):
                    yield self._chunk([choice], None)
                piece = await self._generation.next_piece()
        except LorryError as error:
            yield event(lorry_error_body(error))
            return
        except Exception:
            log.exception("a stream failed")
            yield event(error_body("internal error", 500, LorryError.code))
            return
        if self._body.include_usage:
            yield self._chunk([], self._usage())
        yield DONE_EVENT

    def _chunks(self, piece: Piece, opened: set[int]) -> list[ChatChoice | CompletionChoice]:
        choices: list[ChatChoice | CompletionChoice] = []
        if piece.index not in opened:
            opened.add(piece.index)
            if (opening := self._shape.opening(piece.index)) is not None:
                choices.append(opening)
        if piece.text or piece.tokens:
            choices.append(self._shape.delta(Piece(piece.index, piece.text, piece.tokens)))
        if piece.finish_reason is not None:
            choices.append(self._shape.delta(Piece(piece.index, "", (), piece.finish_reason)))
        return choices

    def _chunk(self, choices: list[ChatChoice | CompletionChoice], usage: Usage | None) -> bytes:
        return event(
            self._completion(self._shape.chunk_object, choices, usage if self._body.include_usage else UNSET)
        )

    def _completion(
        self, kind: str, choices: list[ChatChoice | CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._generation.response_id,
            object=kind,
            created=self._created,
            model=self._generation.target.id,
            system_fingerprint=self._generation.target.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _usage(self) -> Usage:
        return self._generation.usage(choices_per_prompt=self._body.n or 1)


def _join(pieces: list[Piece]) -> Piece:
    return Piece(
        pieces[0].index,
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        pieces[-1].finish_reason,
    )
