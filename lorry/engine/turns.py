"""In which order waiting requests have their turn: by arrival, or so that every adapter has its share."""

from __future__ import annotations

from typing import Protocol

from lorry.types import AdapterUid


class Turns(Protocol):
    """Gives each arriving request its turn: the smallest goes first."""

    def next(self, uid: AdapterUid, cost: int, now: float) -> float:
        """The turn of a request of an adapter (or the base) that costs so many tokens; `now` is the last turn that
        was taken."""
        ...


class ByArrival:
    """First come, first served."""

    def __init__(self) -> None:
        self._count = 0.0

    def next(self, uid: AdapterUid, cost: int, now: float) -> float:
        self._count += 1.0
        return self._count


class FairShare:
    """Adapters that have requests waiting get equal numbers of tokens, whoever came first and however many they sent.

    Source: start-time fair queueing (Goyal, Vin, Cheng 1996). A turn is the adapter's own virtual time at which the
    request starts; an adapter that comes back after a pause starts at the time of the others, with no credit.
    """

    def __init__(self) -> None:
        self._ends: dict[AdapterUid, float] = {}

    def next(self, uid: AdapterUid, cost: int, now: float) -> float:
        self._ends = {known: end for known, end in self._ends.items() if end > now}
        start = max(now, self._ends.get(uid, 0.0))
        self._ends[uid] = start + cost
        return start
