"""Moves adapters between their homes: files, the host's memory, the device. Nobody waits but who asks for them.

Files are read on threads, copies to the device run on a stream of their own. `advance`, called in every step, takes
up what is done and starts what is next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from lorry.errors import AdapterCapacity
from lorry.lora.arena import Arena
from lorry.lora.packed import PackedAdapter
from lorry.lora.store import AdapterStore, Version
from lorry.types import AdapterInfo, AdapterUid

PARALLEL_READS = 2
"""Adapters whose files are read at the same time: each may hold gigabytes of host memory meanwhile."""

MAX_STAGED = 4
"""Adapters that are read and kept on the host because they are next: others follow as these reach the device."""

Reader = Callable[[AdapterInfo], PackedAdapter]
"""Reads a registered adapter's files again, on any thread; raises where they are not what they were."""


@dataclass(frozen=True)
class HostLimits:
    """What the host's memory holds at most; None: no limit. Adapters that are needed stay beyond it."""

    num_adapters: int | None
    num_bytes: int | None


@dataclass(frozen=True)
class _Copy:
    uid: AdapterUid
    slot: int
    done: torch.cuda.Event | None


class Residency:
    """Call everything on the engine's thread and on the stream of the steps."""

    def __init__(self, arena: Arena, store: AdapterStore, read: Reader, limits: HostLimits) -> None:
        self._arena = arena
        self._store = store
        self._read = read
        self._limits = limits
        self._host: dict[AdapterUid, PackedAdapter] = {}
        self._wanted: dict[AdapterUid, None] = {}
        self._reads: dict[AdapterUid, Future[PackedAdapter]] = {}
        self._copies: deque[_Copy] = deque()
        self._arrived: set[AdapterUid] = set()  # on the device just now: who waits for them has not been let in yet
        self._threads = ThreadPoolExecutor(PARALLEL_READS, thread_name_prefix="read-adapter")
        self._has_read = threading.Event()
        cuda = arena.data.device.type == "cuda"
        self._stream = torch.cuda.Stream(arena.data.device) if cuda else None  # type: ignore[no-untyped-call]
        self.num_evictions = 0
        self.num_reads = 0
        self.num_copies = 0

    @property
    def is_copying(self) -> bool:
        return bool(self._copies)

    @property
    def is_reading(self) -> bool:
        return bool(self._reads)

    def counts(self) -> dict[str, int]:
        """The part of `EngineStats` that is about homes."""
        return {
            "adapters_registered": sum(1 for _ in self._store),
            "adapters_on_host": len(self._host),
            "adapters_on_device": sum(version.slot is not None for version in self._store),
            "adapter_host_bytes": self._store.host_bytes,
            "adapter_device_bytes": self._arena.num_bytes - self._arena.num_free_bytes,
            "num_adapter_reads": self.num_reads,
            "num_adapter_copies": self.num_copies,
            "num_adapter_evictions": self.num_evictions,
        }

    def check(self, name: str, packed: PackedAdapter, has_files: bool, pinned: bool) -> None:
        """`AdapterCapacity` where an adapter finds no room even if no other has any, but for those that stay.

        It is to be `pinned` also where it takes the name of one that is.
        """
        others = [version for version in self._store if version.info.name != name]
        staying = [version for version in others if version.pinned or not version.recoverable]
        self._arena.check(packed.num_bytes, sum(version.info.num_bytes for version in staying))
        if pinned or any(v.pinned and not v.retired and v.info.name == name for v in self._store):
            self._check_pins(
                [packed.num_bytes, *_sizes(v for v in others if v.pinned)], _sizes(v for v in others if not v.pinned)
            )
        if not has_files:
            sizes = [version.host_bytes for version in others if version.host_bytes and not version.has_files]
            self._check_host([*sizes, packed.num_bytes])

    def _check_host(self, sizes: Sequence[int]) -> None:
        """Whether adapters of these sizes, none of which can be read again, may all stay in the host's memory."""
        limits = self._limits
        total = f"{len(sizes)} adapters without files would take {sum(sizes):,} bytes of the host's memory"
        if limits.num_adapters is not None and len(sizes) > limits.num_adapters:
            raise AdapterCapacity(
                f"{total}, which may hold {limits.num_adapters} adapters: unload one, or raise --max-loaded-loras"
            )
        if limits.num_bytes is not None and sum(sizes) > limits.num_bytes:
            raise AdapterCapacity(
                f"{total}, which may hold {limits.num_bytes:,} bytes: unload one, or raise --lora-host-memory"
            )

    def check_pins(self, versions: Sequence[Version]) -> None:
        """`AdapterCapacity` where these cannot all be on the device beside any one of the others."""
        self._check_pins(_sizes(versions), _sizes(v for v in self._store if v not in versions))

    def _check_pins(self, pinned: Sequence[int], others: Sequence[int]) -> None:
        size = sum(pinned)
        if size + max(others, default=0) > self._arena.num_bytes or len(pinned) >= self._arena.num_slots:
            raise AdapterCapacity(
                f"{len(pinned)} pinned adapters would take {size:,} of {self._arena.num_bytes:,} bytes and "
                f"{len(pinned)} of {self._arena.num_slots} places on the device, and leave no room for every other:"
                " unpin one, or raise --lora-memory or --max-loras-per-batch"
            )

    def has_room(self, packed: PackedAdapter) -> bool:
        """Whether an adapter finds room without another having to go."""
        return self._arena.num_free_slots > 0 and self._arena.num_free_bytes >= packed.num_bytes

    def put_on_host(self, uid: AdapterUid, packed: PackedAdapter) -> None:
        """Give a version its weights in the host's memory; others leave where they are too many."""
        self._host[uid] = packed
        self._store[uid].host_bytes = packed.num_bytes
        self._trim_host()

    def want(self, uid: AdapterUid) -> None:
        """Bring a version to the device as soon as there is room, behind those that were wanted before."""
        self._wanted.setdefault(uid, None)

    def forget(self, version: Version) -> None:
        """Give back everything that a version has; no step of it is under way."""
        uid = version.info.uid
        self._wanted.pop(uid, None)
        self._host.pop(uid, None)
        read = self._reads.pop(uid, None)
        if read is not None:
            read.cancel()
        if version.slot is not None:
            self._arena.release(version.slot)

    def advance(self) -> dict[AdapterUid, Exception]:
        """Take up what threads and copies have done, and start what is next; returns reads that failed."""
        self._has_read.clear()
        self._arrived.clear()
        failed = self._finish_reads()
        self._finish_copies()
        blocked = False
        wanted = [uid for uid in self._wanted if self._store[uid].slot is None]
        self._wanted = dict.fromkeys(wanted)
        for uid in wanted[:MAX_STAGED]:
            if uid not in self._host:
                self._start_read(uid)
            elif not blocked and all(copy.uid != uid for copy in self._copies):
                blocked = not self._start_copy(uid)  # first come, first served: a large one must find room some time
        return failed

    def wait(self, seconds: float) -> None:
        """Until a copy is done or a file is read, where there is nothing else to do."""
        if self._copies:
            done = self._copies[0].done
            if done is not None:
                done.synchronize()
        elif self._reads:
            self._has_read.wait(seconds)

    def evict(self, version: Version) -> None:
        """Free a version's place on the device; no row uses it."""
        assert version.slot is not None
        assert not version.users
        self._arena.release(version.slot)
        version.slot = None
        self.num_evictions += 1

    def _finish_reads(self) -> dict[AdapterUid, Exception]:
        failed: dict[AdapterUid, Exception] = {}
        for uid, read in list(self._reads.items()):
            if not read.done():
                continue
            del self._reads[uid]
            error = read.exception()
            if error is None:
                self.put_on_host(uid, read.result())
            elif isinstance(error, Exception):
                failed[uid] = error
                self._wanted.pop(uid, None)
            else:
                raise error
        return failed

    def _finish_copies(self) -> None:
        while self._copies:
            copy = self._copies[0]
            if copy.done is not None and not copy.done.query():  # type: ignore[no-untyped-call]
                return
            self._copies.popleft()
            self._arena.publish(copy.slot)
            if copy.uid not in self._store:  # unloaded meanwhile
                self._arena.release(copy.slot)
                continue
            self._store.place(copy.uid, copy.slot)
            self._arrived.add(copy.uid)
            self._wanted.pop(copy.uid, None)
            self._trim_host()

    def _start_read(self, uid: AdapterUid) -> None:
        if uid in self._reads:
            return
        self.num_reads += 1
        read = self._threads.submit(self._read, self._store[uid].info)
        read.add_done_callback(lambda _: self._has_read.set())
        self._reads[uid] = read

    def _start_copy(self, uid: AdapterUid) -> bool:
        """Whether there is room for the version, other versions evicted where it takes that."""
        packed = self._host[uid]
        slot = self._arena.reserve(packed)
        if slot is None and not self._make_room(packed):
            return False
        slot = self._arena.reserve(packed) if slot is None else slot
        if slot is None:  # the room is in pieces, and what is being copied cannot be moved
            return False
        self.num_copies += 1
        if self._stream is None:
            self._arena.copy(slot, packed)
            self._copies.append(_Copy(uid, slot, None))
            self._finish_copies()
            return True
        self._stream.wait_stream(torch.cuda.current_stream())  # what is done to the arena there comes first
        with torch.cuda.stream(self._stream):
            self._arena.copy(slot, packed)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        self._copies.append(_Copy(uid, slot, done))
        return True

    def _make_room(self, packed: PackedAdapter) -> bool:
        """Evict what it takes, or nothing where that is not enough."""
        victims = [version for version in self._store.device_victims() if version.info.uid not in self._arrived]
        slots, free = self._arena.num_free_slots, self._arena.num_free_bytes
        chosen = []
        for victim in victims:
            if slots and free >= packed.num_bytes:
                break
            assert victim.slot is not None
            chosen.append(victim)
            slots += 1
            free += self._arena.blob_bytes(victim.slot)
        if not slots or free < packed.num_bytes:
            return False
        for victim in chosen:
            self.evict(victim)
        return True

    def _trim_host(self) -> None:
        limits = self._limits
        for victim in self._store.host_victims():
            few = limits.num_adapters is None or len(self._host) <= limits.num_adapters
            if few and (limits.num_bytes is None or self._store.host_bytes <= limits.num_bytes):
                return
            uid = victim.info.uid
            if uid in self._wanted or any(copy.uid == uid for copy in self._copies):
                continue
            del self._host[uid]
            victim.host_bytes = 0


def _sizes(versions: Iterable[Version]) -> list[int]:
    return [version.info.num_bytes for version in versions]
