"""The answers of a soak: what was given, and what should have been."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.equality import compare
from bench.soak_adapters import Variants, Weights
from lorry.engine.engine import Engine
from lorry.engine.llm import Completion
from lorry.types import BASE_UID, AdapterUid, EngineRequest, SamplingParams

NEAR = 0.25
"""Nats between two tokens that rounding may swap on a GPU, in bfloat16."""


class Question(NamedTuple):
    """Weights (None: the base) and the number of a prompt."""

    weights: Weights | None
    prompt: int


@dataclass
class Given:
    """One answer, and to how many requests it was given."""

    completion: Completion
    max_tokens: int
    times: int = 1


def greedy(max_tokens: int, logprobs: bool) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=4 if logprobs else None)


@dataclass
class Answers:
    """Keeps of equal answers to a question one, so that its size does not grow with time."""

    given: dict[Question, list[Given]] = field(default_factory=lambda: defaultdict(list))
    num_compared: int = 0
    num_parted: int = 0
    num_differed: int = 0
    largest_gap: float = 0.0
    references: dict[Question, Completion] = field(default_factory=dict)

    def add(self, question: Question, max_tokens: int, completion: Completion) -> None:
        for known in self.given[question]:
            if (known.max_tokens, known.completion.token_ids) == (max_tokens, completion.token_ids):
                known.times += 1
                return
        self.given[question].append(Given(completion, max_tokens))

    def judge(self, question: Question, reference: Completion) -> None:
        """Compare all answers to a question with what it should have been told."""
        self.references[question] = reference
        for given in self.given[question]:
            self.num_compared += given.times
            stop = given.max_tokens
            whole = Completion(token_ids=reference.token_ids[:stop], logprobs=reference.logprobs[:stop])
            if whole.token_ids == given.completion.token_ids:
                continue
            self.num_parted += given.times
            gap = gap_between(whole, given.completion)
            self.largest_gap = max(self.largest_gap, gap)
            if gap > NEAR:
                self.num_differed += given.times

    def record(self) -> dict[str, Any]:
        """`different_references` of all `references`: that adapters, and not the base alone, were told apart."""
        told = {(question.prompt, tuple(r.token_ids)) for question, r in self.references.items()}
        return {
            "compared": self.num_compared,
            "references": len(self.references),
            "different_references": len(told),
            "parted": self.num_parted,
            "largest_gap": round(self.largest_gap, 4) if self.largest_gap < float("inf") else None,
            "differed": self.num_differed,
        }


def gap_between(reference: Completion, given: Completion) -> float:
    """Nats by which either run preferred its own token where they part; infinite where nothing excuses it."""
    pairs = list(zip(reference.token_ids, given.token_ids, strict=False))
    if not given.logprobs or all(a == b for a, b in pairs):
        return float("inf")
    found = compare(0, reference, given)
    assert found is not None
    return max(found.gap_alone, found.gap_in_batch)


def compare_all(
    engine: Engine,
    variants: Variants,
    prompts: Sequence[Sequence[int]],
    answers: Answers,
    say: Callable[[str], None],
) -> None:
    """Ask all questions again, for some weights at a time: as many as the engine holds."""
    by_weights: dict[Weights | None, list[Question]] = defaultdict(list)
    for question in answers.given:
        by_weights[question.weights].append(question)
    said = time.perf_counter()
    for weights in _groups(sorted(by_weights, key=lambda w: w or Weights(-1, 0)), engine.info.max_loras):
        uids = {w: BASE_UID if w is None else _register(engine, variants, w) for w in weights}
        questions = [question for w in weights for question in by_weights[w]]
        _judge(engine, prompts, answers, questions, uids)
        for w in weights:
            if w is not None:
                engine.unload_adapter(str(w))
        if time.perf_counter() - said >= 10:
            said = time.perf_counter()
            say(f"{len(answers.references)} of {len(answers.given)} questions compared, {answers.num_parted} parted")


def _groups(weights: Sequence[Weights | None], size: int) -> Iterator[Sequence[Weights | None]]:
    return (weights[i : i + size] for i in range(0, len(weights), size))


def _register(engine: Engine, variants: Variants, weights: Weights) -> AdapterUid:
    name = str(weights)
    return engine.register_adapter(engine.prepare_adapter(name, "bytes", variants.content(weights))).uid


def _judge(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    answers: Answers,
    questions: Sequence[Question],
    uids: dict[Weights | None, AdapterUid],
) -> None:
    logprobs = engine.info.device != "cpu"
    requests = [
        EngineRequest(
            request_id=str(i),
            token_ids=tuple(prompts[question.prompt]),
            params=greedy(max(given.max_tokens for given in answers.given[question]), logprobs),
            adapter_uid=uids[question.weights],
        )
        for i, question in enumerate(questions)
    ]
    alone = _ask(engine, requests[:1])
    together = _ask(engine, requests)
    if not logprobs:
        assert alone["0"].token_ids == together["0"].token_ids, f"{questions[0]} depends on what is beside it"
    for i, question in enumerate(questions):
        answers.judge(question, together[str(i)])


def _ask(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, Completion]:
    completions = {request.request_id: Completion() for request in requests}
    for request in requests:
        engine.add_request(request)
    for output in itertools.chain.from_iterable(iter(lambda: engine.step() if engine.has_work else None, None)):
        completions[output.request_id].token_ids += output.token_ids
        completions[output.request_id].logprobs += output.logprobs
    return completions
