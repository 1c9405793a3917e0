"""Names, versions and references of adapters: who may use which weights, and when they may go. No tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lorry.errors import AdapterExists, ModelNotFound
from lorry.types import BASE_SLOT, BASE_UID, AdapterInfo, AdapterUid


@dataclass
class _Version:
    info: AdapterInfo
    slot: int
    references: int = 0
    retired: bool = False


class AdapterStore:
    """Each load is a version with its own uid, never reused. A name points to at most one version.

    Running requests hold references; an unloaded version keeps its slot until the last of them ends, then
    `release_slot` is called with it. New requests are refused from the moment of the unload.
    """

    def __init__(self, release_slot: Callable[[int], None]) -> None:
        self._release_slot = release_slot
        self._versions: dict[AdapterUid, _Version] = {}
        self._names: dict[str, AdapterUid] = {}
        self._next_uid = BASE_UID + 1

    @property
    def num_references(self) -> int:
        return sum(version.references for version in self._versions.values())

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Adapters that new requests can name, in the order of their loads."""
        return tuple(self._versions[uid].info for uid in self._names.values())

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

    def add(self, info: AdapterInfo, slot: int) -> None:
        """Make a version known under its name, which must be free."""
        self.check_name_is_free(info.name)
        self._versions[info.uid] = _Version(info, slot)
        self._names[info.name] = info.uid

    def unload(self, name: str) -> AdapterInfo:
        """Forget a name; its version goes when no request uses it any more."""
        if name not in self._names:
            known = ", ".join(sorted(self._names)) or "none"
            raise ModelNotFound(f"no adapter {name!r} is loaded (loaded: {known})")
        version = self._versions[self._names.pop(name)]
        version.retired = True
        self._drop_if_unused(version)
        return version.info

    def acquire(self, uid: AdapterUid) -> int:
        """Take a reference for one request and return the slot; the base has no slot and no references."""
        if uid == BASE_UID:
            return BASE_SLOT
        version = self._versions.get(uid)
        if version is None or version.retired:
            raise ModelNotFound(f"the adapter of this request (uid {uid}) has been unloaded")
        version.references += 1
        return version.slot

    def release(self, uid: AdapterUid) -> None:
        """Give back the reference of a request that ended."""
        if uid != BASE_UID:
            version = self._versions[uid]
            assert version.references > 0, f"adapter uid {uid} is released twice"
            version.references -= 1
            self._drop_if_unused(version)

    def _drop_if_unused(self, version: _Version) -> None:
        if version.retired and version.references == 0:
            del self._versions[version.info.uid]
            self._release_slot(version.slot)
