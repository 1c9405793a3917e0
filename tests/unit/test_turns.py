"""The order of waiting requests."""

from lorry.engine.turns import ByArrival, FairShare
from lorry.types import AdapterUid

A, B, C = (AdapterUid(i) for i in range(3))


def order(turns: list[tuple[str, float]]) -> str:
    return "".join(name for name, _ in sorted(turns, key=lambda item: item[1]))


def test_by_arrival():
    turns = ByArrival()
    assert order([(name, turns.next(A, 100 - i, 0.0)) for i, name in enumerate("xyz")]) == "xyz"


def test_shares_are_of_tokens():
    """One adapter sends requests of 10 tokens, the other of 20: it has two turns for each of the other's."""
    turns = FairShare()
    made = [("a", turns.next(A, 10, 0.0)) for _ in range(6)] + [("b", turns.next(B, 20, 0.0)) for _ in range(3)]
    assert order(made) == "abaabaaba"


def test_who_was_away_gets_no_credit():
    turns = FairShare()
    for _ in range(5):
        turns.next(A, 10, 0.0)
    assert turns.next(C, 10, 40.0) == 40.0
    assert turns.next(C, 10, 40.0) == 50.0
    assert turns.next(A, 10, 40.0) == 50.0
    assert turns.next(B, 10, 200.0) == 200.0
    assert len(turns._ends) == 1
