"""Pages: counts, reuse, and that a prefix is shared exactly where adapter and tokens are the same."""

import pytest

from lorry.kv.prefix import OutOfPages, PagePool
from lorry.types import BASE_UID, AdapterUid

PAGE = 4
TOKENS = list(range(10, 10 + 3 * PAGE))
A, B = AdapterUid(1), AdapterUid(2)


def fill(pool: PagePool, uid: AdapterUid, tokens: list[int]) -> list[int]:
    """Compute a prompt's full pages and make them known."""
    hit = pool.match(uid, tokens)
    pages, node = list(hit.pages), hit.node
    for start in range(len(pages) * PAGE, len(tokens) - PAGE + 1, PAGE):
        pages += pool.allocate(1)
        node = pool.insert(node, tokens[start : start + PAGE], pages[-1])
    return pages


def test_allocate_and_release_balance():
    pool = PagePool(4, PAGE)
    pages = pool.allocate(3)
    assert (pool.num_in_use, pool.num_available) == (3, 1)
    with pytest.raises(OutOfPages, match="2 pages needed, 1 of 4"):
        pool.allocate(2)
    assert pool.num_available == 1
    pool.release(pages)
    assert pool.num_in_use == 0
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_releasing_twice_is_our_bug():
    pool = PagePool(2, PAGE)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


def test_a_prefix_is_shared_within_an_adapter_and_never_across():
    pool = PagePool(16, PAGE)
    pages = {uid: fill(pool, uid, TOKENS) for uid in (BASE_UID, A, B)}
    assert len({page for own in pages.values() for page in own}) == 9
    for uid, own in pages.items():
        assert list(pool.match(uid, [*TOKENS, 99]).pages) == own


def test_one_token_is_always_left_to_compute():
    pool = PagePool(16, PAGE)
    pages = fill(pool, A, TOKENS)
    assert list(pool.match(A, TOKENS).pages) == pages[:2]
    assert list(pool.match(A, TOKENS[:PAGE]).pages) == []


def test_a_page_is_known_by_all_tokens_before_it():
    pool = PagePool(16, PAGE)
    fill(pool, A, TOKENS)
    other = [1, *TOKENS[1:]]
    assert pool.match(A, [*other, 99]).pages == ()


def test_least_recently_used_prefix_goes_first_and_its_end_before_its_start():
    pool = PagePool(4, PAGE)
    first = fill(pool, A, TOKENS[: 2 * PAGE])
    second = fill(pool, B, TOKENS[: 2 * PAGE])
    pool.release(first)
    pool.release(second)
    assert pool.allocate(1) == [first[1]]
    assert list(pool.match(A, [*TOKENS[: 2 * PAGE], 0]).pages) == first[:1]
    assert list(pool.match(B, [*TOKENS[: 2 * PAGE], 0]).pages) == second


def test_pages_in_use_are_never_taken():
    pool = PagePool(2, PAGE)
    held = fill(pool, A, TOKENS[: 2 * PAGE])
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    pool.release(held[1:])
    assert pool.allocate(1) == held[1:]


def test_equal_pages_computed_twice_keep_the_first():
    pool = PagePool(8, PAGE)
    first = fill(pool, A, TOKENS[:PAGE])
    twin = pool.allocate(1)
    node = pool.insert(pool.root(A), TOKENS[:PAGE], twin[0])
    assert node == pool.match(A, TOKENS[: PAGE + 1]).node
    assert list(pool.match(A, TOKENS[: PAGE + 1]).pages) == first


def test_switched_off_nothing_is_known():
    pool = PagePool(8, PAGE, enable_cache=False)
    fill(pool, A, TOKENS)
    assert pool.match(A, TOKENS).pages == ()
