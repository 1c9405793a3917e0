"""Names, versions, references and homes of adapters: who may use which weights, and which may go. No tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from lorry.errors import AdapterExists, ModelNotFound
from lorry.types import BASE_UID, AdapterInfo, AdapterUid

EvictionPolicy = Literal["lru", "fifo"]


@dataclass(eq=False)
class Version:
    """One immutable load of an adapter.

    `references` are requests from arrival to end: they keep the version alive when its name is gone. `users` are
    those of them that may be in a step: they keep it on the device. `slot` is its place there, `host_bytes` its size
    in the host's memory (0: not there). With `has_files` it can be read again. `used` and `placed` are times of the
    store's clock; `used_at` is that of the last request in seconds.
    """

    info: AdapterInfo
    has_files: bool
    references: int = 0
    users: int = 0
    slot: int | None = None
    host_bytes: int = 0
    pinned: bool = False
    retired: bool = False
    used: int = 0
    placed: int = 0
    num_requests: int = 0
    used_at: float = field(default_factory=time.monotonic)

    @property
    def residency(self) -> Literal["device", "host", "registered"]:
        """The best place that holds the weights."""
        if self.slot is not None:
            return "device"
        return "host" if self.host_bytes else "registered"

    @property
    def recoverable(self) -> bool:
        """Whether its weights are anywhere but on the device."""
        return self.has_files or self.host_bytes > 0


class AdapterStore:
    """Each load is a version with its own uid, never reused. A name points to at most one version.

    A version whose name is gone, or names a later version, is *retired*: no new request gets it, and when the last
    of its own has ended, `drop` is called with it.
    """

    def __init__(self, drop: Callable[[Version], None], policy: EvictionPolicy = "lru") -> None:
        self._drop = drop
        self._policy = policy
        self._versions: dict[AdapterUid, Version] = {}
        self._names: dict[str, AdapterUid] = {}
        self._next_uid = BASE_UID + 1
        self._clock = 0

    @property
    def num_references(self) -> int:
        return sum(version.references for version in self._versions.values())

    @property
    def host_bytes(self) -> int:
        return sum(version.host_bytes for version in self._versions.values())

    def __iter__(self) -> Iterator[Version]:
        """All versions, those that are retired too, in the order of their loads."""
        return iter(self._versions.values())

    def __contains__(self, uid: AdapterUid) -> bool:
        return uid in self._versions

    def __getitem__(self, uid: AdapterUid) -> Version:
        return self._versions[uid]

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Adapters that new requests can name, in the order of their first loads."""
        return tuple(self._versions[uid].info for uid in self._names.values())

    def named(self, name: str) -> Version:
        """The version that a name points to; `ModelNotFound`."""
        if name not in self._names:
            known = ", ".join(sorted(self._names)[:20]) or "none"
            raise ModelNotFound(f"no adapter {name!r} is loaded (loaded: {known})")
        return self._versions[self._names[name]]

    def next_uid(self) -> AdapterUid:
        """A fresh uid."""
        uid = AdapterUid(self._next_uid)
        self._next_uid += 1
        return uid

    def check_name_is_free(self, name: str) -> None:
        """Raise `AdapterExists` when the name is taken."""
        if name in self._names:
            path = self._versions[self._names[name]].info.path
            raise AdapterExists(f"adapter {name!r} is loaded already (from {path!r}): unload it first")

    def add(self, info: AdapterInfo, has_files: bool, replace: bool = False) -> Version:
        """Make a version known under its name, which must be free; or, to `replace`, may have another version."""
        if not replace:
            self.check_name_is_free(info.name)
        before = self._names.get(info.name)
        version = Version(info, has_files, used=self._tick())
        if before is not None:
            version.pinned, self._versions[before].pinned = self._versions[before].pinned, False
        self._versions[info.uid] = version
        self._names[info.name] = info.uid
        if before is not None:
            self._retire(self._versions[before])
        return version

    def unload(self, name: str) -> AdapterInfo:
        """Forget a name; its version goes when no request uses it any more."""
        version = self.named(name)
        del self._names[name]
        self._retire(version)
        return version.info

    # Requests

    def acquire(self, uid: AdapterUid) -> None:
        """Take a reference for one request; the base has none."""
        if uid == BASE_UID:
            return
        version = self._versions.get(uid)
        if version is None or version.retired:
            raise ModelNotFound(f"the adapter of this request (uid {uid}) has been unloaded")
        version.references += 1
        version.num_requests += 1
        version.used = self._tick()
        version.used_at = time.monotonic()

    def release(self, uid: AdapterUid) -> None:
        """Give back the reference of a request that ended."""
        if uid != BASE_UID:
            version = self._versions[uid]
            assert version.references > version.users, f"adapter uid {uid} is released twice"
            version.references -= 1
            self._drop_if_unused(version)

    def use(self, uid: AdapterUid) -> int:
        """Note that a request with a reference may be in steps from now on; the slot of its adapter."""
        version = self._versions[uid]
        assert version.slot is not None, f"adapter uid {uid} is not on the device"
        assert version.users < version.references
        version.users += 1
        version.used = self._tick()
        return version.slot

    def leave(self, uid: AdapterUid) -> None:
        """The opposite of `use`: no step of the request is under way any more."""
        version = self._versions[uid]
        assert version.users > 0, f"adapter uid {uid} is left twice"
        version.users -= 1

    # Homes

    def place(self, uid: AdapterUid, slot: int) -> None:
        """Note that a version is on the device."""
        version = self._versions[uid]
        version.slot = slot
        version.placed = self._tick()

    def device_victims(self) -> list[Version]:
        """Versions that may leave the device, in the order in which they should."""
        free = [v for v in self if v.slot is not None and not v.users and not v.pinned and v.recoverable]
        return sorted(free, key=lambda version: version.used if self._policy == "lru" else version.placed)

    def host_victims(self) -> list[Version]:
        """Versions that may leave the host's memory, in the order in which they should: those on the device first."""
        free = [v for v in self if v.host_bytes and v.has_files and (v.slot is not None or not v.references)]
        return sorted(free, key=lambda version: (version.slot is None, version.used))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _retire(self, version: Version) -> None:
        version.retired = True
        self._drop_if_unused(version)

    def _drop_if_unused(self, version: Version) -> None:
        if version.retired and version.references == 0:
            del self._versions[version.info.uid]
            self._drop(version)
