"""Decides what the next step computes: continuous batching, chunked prefill, preemption when pages run out."""

from __future__ import annotations

from bisect import insort, insort_left
from collections import deque

from lorry.config import PAGE_SIZE
from lorry.engine.sequence import ScheduledChunk, Sequence, StepPlan
from lorry.kv.prefix import PagePool


class Scheduler:
    """Everything here is plain Python, and nothing here knows of tensors.

    Running sequences go first, oldest first, then waiting ones are admitted by their turns while rows, pages and
    places are left. When pages run out, the youngest running sequence gives up its pages and returns to the queue, by
    its old turn; its tokens are kept and computed again later (from the prefix cache where they survive).
    The oldest is never preempted for another, and any one sequence fits into the pool, so something always ends.

    A step may be planned while the one before is in flight: launched, its tokens not read. Pending tokens count like
    known ones for pages and positions. Nothing is preempted meanwhile: the plan is empty then, and the next one is
    made when nothing is in flight. Pages come back when no step in flight writes to them.
    """

    def __init__(self, pool: PagePool, max_running: int, max_step_tokens: int) -> None:
        self.pool = pool
        self.num_preemptions = 0
        self.turn = 0.0
        """The last turn that was taken."""
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._num_in_flight = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_turn)

    def remove(self, sequence: Sequence) -> bool:
        """Forget a sequence that ended or was aborted; whether it is gone at once, and its pages are back.

        Otherwise a step in flight still works on it, and `landed` will name it.
        """
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.ended = True
        if sequence.num_in_flight:
            return False
        self._release(sequence)
        return True

    def schedule(self) -> StepPlan:
        """The next step; empty only when there is no work that could start before the step in flight is read."""
        budget = self._max_step_tokens
        chunks: list[ScheduledChunk] = []
        preempted = False
        num_complete = 0
        queue = deque(self._running)
        while queue and budget:
            sequence = queue.popleft()
            length = sequence.num_tokens
            if length >= sequence.max_length:
                num_complete += 1
                continue
            count = min(length - sequence.num_computed, budget)
            while not self._has_room(sequence, count):
                if self._num_in_flight:
                    return StepPlan(())
                victim = self._running[-1]
                preempted = True
                self._preempt(victim)
                if victim is sequence:
                    break
                queue.remove(victim)
            else:
                chunks.append(self._take(sequence, count))
                budget -= count
        while self._waiting and budget and not preempted and len(self._running) - num_complete < self._max_running:
            chunk = self._admit(self._waiting[0], budget)
            if chunk is None:
                break
            chunks.append(chunk)
            budget -= chunk.num_tokens
        return StepPlan(tuple(chunks))

    def launched(self, plan: StepPlan) -> None:
        """Note that a plan is in flight: later steps find its keys and values, and the tokens that it samples."""
        self._num_in_flight += 1
        row = 0
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_tokens
            sequence.num_in_flight += 1
            if chunk.samples:
                sequence.num_pending += 1
                sequence.pending_row = row
                row += 1
            self._publish(sequence)

    def landed(self, plan: StepPlan) -> list[Sequence]:
        """Note that a plan has run; the sequences that had ended before and are gone only now, with their pages."""
        self._num_in_flight -= 1
        gone = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_in_flight -= 1
            if sequence.ended and not sequence.num_in_flight:
                self._release(sequence)
                gone.append(sequence)
        return gone

    def append(self, sequence: Sequence, token: int) -> None:
        """The oldest pending token of a sequence is known now."""
        sequence.num_pending -= 1
        sequence.token_ids.append(token)
        self._publish(sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Make full pages of known tokens known to the prefix cache."""
        stop = (sequence.num_cached_pages + 1) * PAGE_SIZE
        while stop <= sequence.num_computed and stop <= len(sequence.token_ids):
            tokens = sequence.token_ids[stop - PAGE_SIZE : stop]
            page = sequence.pages[sequence.num_cached_pages]
            sequence.node = self.pool.insert(sequence.node, tokens, page)
            sequence.num_cached_pages += 1
            stop += PAGE_SIZE

    def _admit(self, sequence: Sequence, budget: int) -> ScheduledChunk | None:
        """Start a waiting sequence when pages for all of its known tokens are there, so that it can get going."""
        hit = self.pool.match(sequence.adapter_uid, sequence.token_ids)
        sequence.pages = list(hit.pages)
        if not self._has_room(sequence, len(sequence.token_ids)):
            self.pool.release(sequence.pages)
            sequence.pages = []
            return None
        del self._waiting[0]
        self.turn = max(self.turn, sequence.turn)
        self._running.append(sequence)
        sequence.node = hit.node
        sequence.num_cached_pages = len(hit.pages)
        sequence.num_computed = len(hit.pages) * PAGE_SIZE
        if not sequence.num_output:
            sequence.num_hit_tokens = sequence.num_computed
        self.pool.record_hit(sequence.adapter_uid, sequence.num_computed, len(sequence.token_ids))
        return self._take(sequence, min(sequence.num_tokens - sequence.num_computed, budget))

    def _has_room(self, sequence: Sequence, num_new: int) -> bool:
        """Whether pages for `num_new` tokens behind the computed ones are there or can be had."""
        missing = sequence.pages_for(sequence.num_computed + num_new)
        return missing <= 0 or missing <= self.pool.num_available

    def _take(self, sequence: Sequence, count: int) -> ScheduledChunk:
        start, pending = sequence.num_computed, sequence.num_pending
        missing = sequence.pages_for(start + count)
        if missing > 0:
            sequence.pages += self.pool.allocate(missing)
        assert pending == 0 or pending == count == 1, "a step is planned too far ahead"
        samples = start + count == sequence.num_tokens
        return ScheduledChunk(sequence, start, count, samples, sequence.pending_row if pending else -1)

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.num_in_flight
        self._running.remove(sequence)
        self._release(sequence)
        insort_left(self._waiting, sequence, key=_turn)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.num_computed = 0
        sequence.num_cached_pages = 0


def _turn(sequence: Sequence) -> float:
    return sequence.turn
