"""The traffic of a soak: requests and changes of adapters, drawn at random, and how each request ends."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.soak_adapters import Variants, Weights
from bench.soak_answers import Answers, Question, greedy
from bench.soak_watch import Watch
from lorry.engine.adapters import PreparedAdapter
from lorry.engine.engine import Engine
from lorry.engine.llm import Completion
from lorry.errors import AdapterCapacity, ModelNotFound
from lorry.types import BASE_UID, AdapterUid, EngineRequest, TokenOutput

MOST_OPEN = 48
BURSTS = (0, 1, 1, 2, 3, 24)
MAX_TOKENS, MAX_TOKENS_WEIGHTS = (3, 8, 16, 40), (8, 8, 3, 1)
SHARE_OF_BASE = 0.1


class Room(NamedTuple):
    """Adapters in all, and those for which there is room."""

    num_adapters: int
    on_host: int
    on_device: int


@dataclass(eq=False)
class Load:
    """One version. Where its files are gone or are others now, requests may end with an error."""

    weights: Weights
    uid: AdapterUid
    has_files: bool
    lost: bool = False


@dataclass(eq=False)
class Asked:
    """A request that has not ended."""

    load: Load | None
    prompt: int
    max_tokens: int
    completion: Completion = field(default_factory=Completion)
    aborted: bool = False


class Soak:
    """`faults` are what must not happen."""

    def __init__(
        self,
        engine: Engine,
        variants: Variants,
        prompts: Sequence[Sequence[int]],
        room: Room,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.answers = Answers()
        self.faults: list[str] = []
        self._engine, self._variants, self._prompts, self._room = engine, variants, prompts, room
        self._rng = random.Random(seed)
        self._popularity = list(itertools.accumulate(1 / (k + 1) for k in range(room.num_adapters)))
        self._loads: dict[int, Load] = {}
        self._sent: deque[int] = deque()
        self._pinned: deque[int] = deque()
        self._open: dict[str, Asked] = {}
        self._recent: deque[str] = deque(maxlen=MOST_OPEN)
        self._thread = ThreadPoolExecutor(1)
        self._counts: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._watch = Watch(engine, say)

    # Traffic

    def register_all(self) -> None:
        for number in range(self._room.num_adapters):
            self._register(Weights(number, 0), None)
            self._watch.look(self._line)
        self._counts.clear()

    def run(self, seconds: float) -> None:
        """Rounds of some requests, perhaps a change, and some steps; at times, steps until nothing is left."""
        changes = {self._refresh_files: 4, self._refresh_bytes: 3, self._unload: 3, self._load: 6, self._pin: 2}
        changes |= {self._unload_and_abort: 1, self._lose_files: 1, self._abort: 6}
        self._watch.begin()
        while self._watch.seconds < seconds:
            for _ in range(self._rng.choice(BURSTS)):
                self._ask()
            for _ in range(self._rng.randrange(3)):
                change = self._rng.choices(list(changes), list(changes.values()))[0]
                change()
            for _ in range(self._rng.randrange(6)):
                self._step()
            if self._rng.random() < 0.02:
                self._drain()
        self._drain()
        grown = self._watch.growth()
        self.faults += [] if grown is None else [grown]
        self._record = self._watch.record()

    def finish(self) -> None:
        """Unload everything."""
        for number in list(self._loads):
            self._watch.call(self._engine.unload_adapter, f"adapter-{number}")
        self._drain()
        self.faults += [f"request {name} never ended" for name in self._open]
        self._thread.shutdown()

    def _draw(self) -> int:
        return self._rng.choices(range(self._room.num_adapters), cum_weights=self._popularity)[0]

    def _ask(self) -> None:
        while len(self._open) >= MOST_OPEN:
            self._step()
        number = None if self._rng.random() < SHARE_OF_BASE else self._draw()
        prompt = self._rng.choices(range(len(self._prompts)), range(len(self._prompts), 0, -1))[0]
        max_tokens = self._rng.choices(MAX_TOKENS, MAX_TOKENS_WEIGHTS)[0]
        load = None if number is None else self._loads.get(number)
        uid = BASE_UID if number is None else AdapterUid(-1) if load is None else load.uid
        self._counts["requests"] += 1
        name = str(self._counts["requests"])
        params = greedy(max_tokens, self._engine.info.device != "cpu")
        request = EngineRequest(
            request_id=name, token_ids=tuple(self._prompts[prompt]), params=params, adapter_uid=uid
        )
        try:
            self._engine.add_request(request)
        except ModelNotFound:
            self._outcomes["refused"] += 1
            if number is None or load is not None:
                self.faults.append(f"request {name} was refused, but adapter {number} is loaded")
            return
        self._open[name] = Asked(load, prompt, max_tokens)
        self._recent.append(name)

    # Changes

    def _register(self, weights: Weights, content: bytes | None) -> None:
        """Prepared on a thread, while steps go on."""
        name, path = f"adapter-{weights.number}", str(self._variants.path(weights.number))
        future = self._thread.submit(self._engine.prepare_adapter, name, path, content)
        while not future.done():
            if self._engine.has_work:
                self._step(loading=True)
            else:
                wait([future])
        self._take_in(weights, future.result(), content is None)

    def _take_in(self, weights: Weights, prepared: PreparedAdapter, has_files: bool) -> None:
        info = self._watch.call(self._engine.register_adapter, prepared, True)
        self._counts["refreshes" if weights.number in self._loads else "loads"] += 1
        self._loads[weights.number] = Load(weights, info.uid, has_files)

    def _refresh_files(self) -> None:
        self._replace(self._draw(), sent=False)

    def _refresh_bytes(self) -> None:
        """Such adapters never leave the host: of too many, the first becomes one with files."""
        self._replace(number := self._draw(), sent=True)
        self._sent.append(number)
        if len(self._sent) > self._room.on_host // 5:
            first = self._sent.popleft()
            if first in self._loads and not self._loads[first].has_files:
                self._replace(first, sent=False)

    def _replace(self, number: int, sent: bool) -> None:
        if number not in self._loads:
            return
        weights = Weights(number, 1 - self._loads[number].weights.generation)
        if not sent:
            self._lose(number)
            self._variants.write(weights)
        self._register(weights, self._variants.content(weights) if sent else None)

    def _lose(self, number: int) -> None:
        """All versions that were read from these files cannot be read again."""
        for load in [self._loads.get(number), *(asked.load for asked in self._open.values())]:
            if load is not None and load.weights.number == number and load.has_files:
                load.lost = True

    def _lose_files(self) -> None:
        number = self._draw()
        self._lose(number)
        self._variants.remove(number)
        self._counts["lost"] += 1

    def _load(self) -> None:
        missing = [number for number in range(self._room.num_adapters) if number not in self._loads]
        if missing:
            weights = Weights(self._rng.choice(missing), self._rng.randrange(2))
            self._lose(weights.number)
            self._variants.write(weights)
            self._register(weights, None)

    def _unload(self, abort: bool = False) -> None:
        number = self._draw()
        load = self._loads.pop(number, None)
        if load is None:
            return
        for asked in self._open.values():
            asked.aborted |= abort and asked.load is load
        self._watch.call(self._engine.unload_adapter, f"adapter-{number}", abort)
        self._counts["unloads"] += 1

    def _unload_and_abort(self) -> None:
        self._unload(abort=True)

    def _pin(self) -> None:
        number = self._draw()
        if number not in self._loads:
            return
        with suppress(AdapterCapacity):
            self._watch.call(self._engine.pin_adapter, f"adapter-{number}")
        self._pinned.append(number)
        self._counts["pins"] += 1
        if len(self._pinned) > self._room.on_device // 4:
            first = self._pinned.popleft()
            if first in self._loads and first not in self._pinned:
                self._watch.call(self._engine.pin_adapter, f"adapter-{first}", False)

    def _abort(self) -> None:
        name = self._rng.choice(self._recent or ["none"])
        if name in self._open:
            self._open[name].aborted = True
        self._watch.call(self._engine.abort, name)

    # Steps

    def _drain(self) -> None:
        while self._engine.has_work:
            self._step()

    def _step(self, loading: bool = False) -> None:
        if not self._engine.has_work:
            return
        for output in self._watch.step(loading):
            self._take(output)
        self._watch.look(self._line)

    def _take(self, output: TokenOutput) -> None:
        asked = self._open.get(output.request_id)
        if asked is None:
            self.faults.append(f"{output} belongs to no open request")
            return
        asked.completion.token_ids += output.token_ids
        asked.completion.logprobs += output.logprobs
        if output.finish_reason is not None:
            del self._open[output.request_id]
            self._outcomes[output.finish_reason] += 1
            self._end(asked, output)

    def _end(self, asked: Asked, output: TokenOutput) -> None:
        reason, load = output.finish_reason, asked.load
        if reason == "abort" and not asked.aborted:
            self.faults.append(f"request {output.request_id} was aborted by nobody")
        elif reason == "error" and not (load is not None and load.lost):
            self.faults.append(f"request {output.request_id} ended with: {output.error}")
        elif reason in ("stop", "length"):
            question = Question(None if load is None else load.weights, asked.prompt)
            self.answers.add(question, asked.max_tokens, asked.completion)

    # Reports

    def _line(self) -> str:
        counts = self._counts
        requests = f"{counts['requests']} requests, {len(self._open)} open"
        return f"{requests}; {counts['loads']} loads, {counts['refreshes']} refreshes"

    def record(self) -> dict[str, Any]:
        """The part of the line of JSON that is about what happened."""
        counts = {name: self._counts[name] for name in ("loads", "refreshes", "unloads", "pins", "lost")}
        outcomes = dict(sorted(self._outcomes.items()))
        return {"requests": self._counts["requests"], "outcomes": outcomes} | counts | self._record
