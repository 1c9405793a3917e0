"""Lets a request into the scheduler once its adapter is on the device; until then it waits aside, and others pass.

Where the device is full of adapters that never have nothing to do, a waiting one would wait for ever. So when one has
waited past the threshold, the resident adapter with the least work left *drains*: of its new requests only those are
let in that end before the drain does, and then it makes room.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lorry.engine.scheduler import Scheduler
from lorry.engine.sequence import Sequence
from lorry.engine.turns import Turns
from lorry.lora.residency import Residency
from lorry.lora.store import AdapterStore, Version
from lorry.types import BASE_UID, AdapterUid

log = logging.getLogger(__name__)


@dataclass
class _Queue:
    """Requests of one version that wait aside, and since when the first of them does."""

    since: float
    sequences: deque[Sequence] = field(default_factory=deque)


class Gate:
    """Every request comes in by `add` and goes out by `ended`."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: AdapterStore,
        residency: Residency | None,
        drain_threshold: float | None,
        max_per_adapter: int | None,
        turns: Turns,
        clock: Callable[[], float],
    ) -> None:
        """`drain_threshold` seconds, None: nothing drains; `max_per_adapter` requests of one adapter at a time."""
        self._turns = turns
        self._scheduler = scheduler
        self._store = store
        self._residency = residency
        self._threshold = drain_threshold
        self._max_per_adapter = max_per_adapter
        self._clock = clock
        self._queues: dict[AdapterUid, _Queue] = {}
        self._inside: dict[AdapterUid, set[Sequence]] = {}
        self._draining: set[AdapterUid] = set()
        self.num_drains = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(queue.sequences) for queue in self._queues.values())

    @property
    def is_moving(self) -> bool:
        """Whether requests wait for an adapter that is on its way."""
        return self._residency is not None and (self._residency.is_copying or self._residency.is_reading)

    def waiting(self, uid: AdapterUid) -> int:
        """Requests of a version that wait aside."""
        return len(self._queues[uid].sequences) if uid in self._queues else 0

    def is_draining(self, uid: AdapterUid) -> bool:
        return uid in self._draining

    def add(self, sequence: Sequence) -> None:
        """Take up a request that has a reference to its adapter."""
        uid = sequence.adapter_uid
        sequence.turn = self._turns.next(uid, sequence.max_length, self._scheduler.turn)
        if uid == BASE_UID:
            self._scheduler.add(sequence)
        elif uid not in self._queues and self._may_enter(sequence):
            self._enter(sequence)
        else:
            queue = self._queues.setdefault(uid, _Queue(self._clock()))
            queue.sequences.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Forget a request that ended or was aborted, as `Scheduler.remove`; one that waits aside is gone at once."""
        queue = self._queues.get(sequence.adapter_uid)
        if queue is not None and sequence in queue.sequences:
            queue.sequences.remove(sequence)
            self._tidy(sequence.adapter_uid)
            sequence.ended = True
            return True
        return self._scheduler.remove(sequence)

    def ended(self, sequence: Sequence) -> None:
        """No step of a request is under way any more: give back what it held of its adapter."""
        uid = sequence.adapter_uid
        if uid == BASE_UID:
            return
        inside = self._inside.get(uid)
        if inside is not None and sequence in inside:
            inside.remove(sequence)
            self._store.leave(uid)
            if not inside:
                del self._inside[uid]
        self._store.release(uid)

    def advance(self) -> list[tuple[Sequence, Exception]]:
        """Move adapters, and let in whom they let in; returns requests whose adapter cannot be read, and why.

        These are still to be removed.
        """
        if self._residency is None:
            return []
        self._let_in()  # before room is made of what they wait for
        for uid in self._absent():
            self._residency.want(uid)
        failed = []
        for uid, error in self._residency.advance().items():
            log.error("adapter %r cannot be read: %s", self._store[uid].info.name, error)
            failed += [(sequence, error) for sequence in self._queues[uid].sequences] if uid in self._queues else []
        self._let_in()
        self._drain()
        return failed

    def _absent(self) -> list[AdapterUid]:
        """Versions that requests wait for and that are not on the device, the longest wait first."""
        absent = [uid for uid in self._queues if self._store[uid].slot is None]
        return sorted(absent, key=lambda uid: self._queues[uid].since)

    def _let_in(self) -> None:
        for uid in list(self._queues):
            queue = self._queues[uid]
            while queue.sequences and self._may_enter(queue.sequences[0]):
                self._enter(queue.sequences.popleft())
            self._tidy(uid)

    def _may_enter(self, sequence: Sequence) -> bool:
        uid = sequence.adapter_uid
        if self._store[uid].slot is None:
            return False
        if self._max_per_adapter is not None and len(self._inside.get(uid, ())) >= self._max_per_adapter:
            return False
        return uid not in self._draining or _work_left([sequence]) <= _work_left(self._inside.get(uid, ()))

    def _enter(self, sequence: Sequence) -> None:
        uid = sequence.adapter_uid
        sequence.slot = self._store.use(uid)
        self._inside.setdefault(uid, set()).add(sequence)
        self._scheduler.add(sequence)

    def _tidy(self, uid: AdapterUid) -> None:
        if uid in self._queues and not self._queues[uid].sequences:
            del self._queues[uid]

    def _drain(self) -> None:
        """Where the longest wait for room is past the threshold, make a resident adapter yield."""
        absent = self._absent()
        waited = self._clock() - self._queues[absent[0]].since if absent else 0.0
        if self._threshold is None or waited <= self._threshold:
            self._draining.clear()
            return
        self._draining = {v.info.uid for v in self._store if v.slot is not None and v.info.uid in self._draining}
        if self._draining or self.is_moving:  # something moves: it is not room that is missing
            return
        candidates = [uid for uid in self._inside if _may_yield(self._store[uid])]
        if candidates:
            self._draining.add(min(candidates, key=lambda uid: _work_left(self._inside[uid])))
            self.num_drains += 1


def _may_yield(version: Version) -> bool:
    return version.slot is not None and not version.pinned and version.recoverable


def _work_left(sequences: Iterable[Sequence]) -> int:
    """The most tokens that any of them may still give."""
    return max((s.max_tokens - s.num_output - s.num_pending for s in sequences), default=0)
