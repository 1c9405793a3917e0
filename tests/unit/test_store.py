"""Names, versions and references of adapters, without any tensors."""

import pytest

from lorry.errors import AdapterExists, ModelNotFound
from lorry.lora.store import AdapterStore
from lorry.types import BASE_SLOT, BASE_UID, AdapterInfo, AdapterUid


def add(store: AdapterStore, name: str, slot: int) -> AdapterUid:
    info = AdapterInfo(name=name, uid=store.next_uid(), path=f"/{name}", rank=1, num_bytes=1, target_modules=())
    store.add(info, slot)
    return info.uid


def test_the_base_needs_no_slot():
    store = AdapterStore(lambda slot: None)
    assert store.acquire(BASE_UID) == BASE_SLOT
    store.release(BASE_UID)
    assert store.num_references == 0


def test_an_unloaded_version_lives_until_its_last_request_ends():
    freed: list[int] = []
    store = AdapterStore(freed.append)
    uid = add(store, "x", 3)
    assert store.acquire(uid) == store.acquire(uid) == 3
    store.unload("x")
    assert store.infos() == ()
    with pytest.raises(ModelNotFound, match="unloaded"):
        store.acquire(uid)
    store.release(uid)
    assert freed == []
    store.release(uid)
    assert freed == [3]
    assert store.num_references == 0


def test_uids_are_never_used_again():
    store = AdapterStore(lambda slot: None)
    first = add(store, "x", 0)
    store.unload("x")
    assert add(store, "x", 0) != first


def test_a_taken_name_and_an_unknown_one():
    store = AdapterStore(lambda slot: None)
    add(store, "x", 0)
    with pytest.raises(AdapterExists, match="'x' is loaded already .from '/x'."):
        add(store, "x", 1)
    with pytest.raises(ModelNotFound, match="no adapter 'y' is loaded .loaded: x."):
        store.unload("y")
