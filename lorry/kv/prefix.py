"""Pages of the KV pool: reference counts, and reuse of pages whose tokens (and adapter) are known. No tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from lorry.types import BASE_UID, AdapterUid

_Key = tuple[int, tuple[int, ...]]
"""Node of the parent page (or minus the adapter's uid at the root), and the tokens of this page."""


class OutOfPages(Exception):
    """There are not enough free pages; the scheduler makes room or waits."""


@dataclass(frozen=True)
class PrefixHit:
    """Pages that already hold the beginning of a prompt, and the node under which its next page belongs."""

    pages: tuple[int, ...]
    node: int


class PagePool:
    """Hands out pages by number and remembers full ones by what they hold.

    A page is in use (one reference for each sequence that holds it), cached (no reference, but its tokens are known
    and may be hit again) or free. Cached pages are taken for new use when no free ones are left, least recently used
    first. A page is known by the exact chain (adapter uid, tokens of every page before it, its own tokens): no hash,
    so no collision, and never shared between adapters or with the base. Uids are never reused, hence nothing stale.
    """

    def __init__(self, num_pages: int, page_size: int, enable_cache: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_cache = enable_cache
        self.hit_tokens: Counter[AdapterUid] = Counter()
        self.query_tokens: Counter[AdapterUid] = Counter()
        self._free = deque(range(num_pages))
        self._references = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[_Key, tuple[int, int]] = {}
        self._key_of: dict[int, _Key] = {}
        self._next_node = 1

    @property
    def num_available(self) -> int:
        """Pages that can be handed out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each, or `OutOfPages` and nothing changed."""
        if count > self.num_available:
            raise OutOfPages(f"{count} pages needed, {self.num_available} of {self.num_pages} are available")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.popleft()
            else:
                page, _ = self._cached.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference of each page; the last pages of a sequence are the first to be reused."""
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def match(self, uid: AdapterUid, token_ids: Sequence[int]) -> PrefixHit:
        """Longest known prefix of a prompt in whole pages, always leaving at least one token to compute.

        The pages of the answer carry a new reference: release them like allocated ones.
        """
        node, pages = self.root(uid), list[int]()
        if self.enable_cache:
            for start in range(0, len(token_ids) - self.page_size, self.page_size):
                found = self._page_of.get((node, tuple(token_ids[start : start + self.page_size])))
                if found is None:
                    break
                page, node = found
                self._references[page] += 1
                self._cached.pop(page, None)
                pages.append(page)
        return PrefixHit(tuple(pages), node)

    def record_hit(self, uid: AdapterUid, hit_tokens: int, query_tokens: int) -> None:
        """Count one admitted prompt: `hit_tokens` of its `query_tokens` were known."""
        self.hit_tokens[uid] += hit_tokens
        self.query_tokens[uid] += query_tokens

    def forget_hits(self, uid: AdapterUid) -> None:
        """Count what was recorded of a uid that does not come again as the base's, so that sums stay."""
        for counter in (self.hit_tokens, self.query_tokens):
            counter[BASE_UID] += counter.pop(uid, 0)

    def insert(self, node: int, token_ids: Sequence[int], page: int) -> int:
        """Say that `page`, under `node`, now holds exactly these `page_size` tokens; returns the page's node.

        When another page holds the same already, that one stays the known one.
        """
        if not self.enable_cache:
            return node
        key = (node, tuple(token_ids))
        found = self._page_of.get(key)
        if found is not None:
            return found[1]
        self._next_node += 1
        self._page_of[key] = (page, self._next_node)
        self._key_of[page] = key
        return self._next_node

    @staticmethod
    def root(uid: AdapterUid) -> int:
        """The node above the first page of every prompt of `uid`."""
        return -uid
