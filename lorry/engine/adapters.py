"""Takes adapters in: from files or bytes to registered versions, and to their weights again when these are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lorry.config import EngineConfig
from lorry.engine.build import Parts
from lorry.errors import AdapterCapacity, AdapterFormatError, InvalidRequest, LorryError
from lorry.lora.adapter import FilesStamp, files_stamp, load_adapter, weights_from_bytes
from lorry.lora.card import AdapterCard, read_card
from lorry.lora.packed import PackedAdapter
from lorry.lora.residency import HostLimits, Residency
from lorry.lora.store import AdapterStore, Version
from lorry.types import AdapterInfo, AdapterUid


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter that has been read and checked; `stamp` tells its files from others, None where it has none."""

    name: str
    path: str
    packed: PackedAdapter
    rank: int
    target_modules: tuple[str, ...]
    base_model_name: str | None
    warnings: tuple[str, ...]
    card: AdapterCard
    stamp: FilesStamp | None


class AdapterDesk:
    """All but `prepare` is for the engine's thread. Without LoRA there is no `residency`, and nothing is taken in."""

    def __init__(self, parts: Parts, config: EngineConfig, on_forget: Callable[[AdapterUid], None]) -> None:
        """`on_forget` is told of every version that does not come again."""
        self._on_forget = on_forget
        self.store = AdapterStore(self._forget, config.lora_eviction_policy)
        self.residency: Residency | None = None
        self._parts = parts
        self._config = config
        self._stamps: dict[AdapterUid, FilesStamp] = {}
        if parts.lora.arena is not None:
            limits = HostLimits(config.max_loaded_loras, config.lora_host_memory)
            self.residency = Residency(parts.lora.arena, self.store, self._read_again, limits)
        for dummy in parts.dummies:
            info = dummy.info(self.store.next_uid())
            self.store.add(info, has_files=False)
            self.store.place(info.uid, dummy.slot)

    def prepare(self, name: str, path: str, content: bytes | None = None) -> PreparedAdapter:
        """Read and check an adapter; on any thread."""
        if not name or len(name) > 256 or not name.isprintable():
            raise InvalidRequest(f"adapter name {name!r} must have 1 to 256 printable characters", "lora_name")
        if self.residency is None:
            raise AdapterCapacity("this engine was started with --no-enable-lora: start it without that flag")
        return self._read(name, path, content)

    def register(self, prepared: PreparedAdapter, replace: bool, pinned: bool) -> AdapterInfo:
        """Make it known, and bring it to the device where there is room."""
        residency = self.residency
        assert residency is not None
        if not replace:
            self.store.check_name_is_free(prepared.name)
        try:
            self._parts.lora.check_rank(prepared.rank)
            residency.check(prepared.name, prepared.packed, prepared.stamp is not None, pinned)
        except LorryError as error:
            raise type(error)(f"adapter {prepared.name!r}: {error}") from None
        info = AdapterInfo(
            name=prepared.name,
            uid=self.store.next_uid(),
            path=prepared.path,
            rank=prepared.rank,
            num_bytes=prepared.packed.num_bytes,
            target_modules=prepared.target_modules,
            base_model_name=prepared.base_model_name,
            warnings=prepared.warnings,
            description=prepared.card.description,
            examples=prepared.card.examples,
        )
        version = self.store.add(info, prepared.stamp is not None, replace)
        version.pinned = version.pinned or pinned
        if prepared.stamp is not None:
            self._stamps[info.uid] = prepared.stamp
        residency.put_on_host(info.uid, prepared.packed)
        if version.pinned or residency.has_room(prepared.packed):
            residency.want(info.uid)
        return info

    def pin(self, name: str, pinned: bool) -> AdapterInfo:
        """Keep an adapter on the device, or let it go again; `AdapterCapacity` where too many would stay."""
        version = self.store.named(name)
        if pinned and not version.pinned:
            assert self.residency is not None
            self.residency.check_pins([*(other for other in self.store if other.pinned), version])
            self.residency.want(version.info.uid)
        version.pinned = pinned
        return version.info

    def counts(self) -> dict[str, int]:
        """The part of `EngineStats` that is about homes."""
        return {} if self.residency is None else self.residency.counts()

    def _read(self, name: str, path: str, content: bytes | None) -> PreparedAdapter:
        config = self._config
        limits = (self._parts.sites, self._parts.loaded.dtype, config.max_lora_rank, config.lora_target_modules)
        if content is None:
            stamp = files_stamp(name, path)
            weights, card = load_adapter(name, path, *limits), read_card(path)
            if files_stamp(name, path) != stamp:
                raise AdapterFormatError(
                    f"adapter {name!r} at {path!r}: the files changed while they were read: load it again"
                )
        else:
            stamp, weights, card = None, weights_from_bytes(name, content, *limits), AdapterCard()
        return PreparedAdapter(
            name=name,
            path=path,
            packed=PackedAdapter.of(weights, pin=self._parts.loaded.device.type == "cuda"),
            rank=weights.rank,
            target_modules=weights.target_modules,
            base_model_name=weights.base_model_name,
            warnings=weights.warnings,
            card=card,
            stamp=stamp,
        )

    def _read_again(self, info: AdapterInfo) -> PackedAdapter:
        """The weights of a registered adapter; runs on a thread."""
        prepared = self._read(info.name, info.path, None)
        if prepared.stamp != self._stamps.get(info.uid):
            raise AdapterFormatError(
                f"adapter {info.name!r}: the files at {info.path!r} are not those that were loaded: load it again"
            )
        return prepared.packed

    def _forget(self, version: Version) -> None:
        assert self.residency is not None
        self._stamps.pop(version.info.uid, None)
        self._on_forget(version.info.uid)
        self.residency.forget(version)
