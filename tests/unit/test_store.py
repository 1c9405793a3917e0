"""Names, versions, references and homes of adapters, without any tensors."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorry.errors import AdapterExists, ModelNotFound
from lorry.lora.store import AdapterStore, Version
from lorry.types import BASE_UID, AdapterInfo, AdapterUid


def add(store: AdapterStore, name: str, slot: int | None = None, replace: bool = False) -> AdapterUid:
    info = AdapterInfo(name=name, uid=store.next_uid(), path=f"/{name}", rank=1, num_bytes=1, target_modules=())
    store.add(info, has_files=True, replace=replace)
    if slot is not None:
        store.place(info.uid, slot)
    return info.uid


def uids(versions: list[Version]) -> list[AdapterUid]:
    return [version.info.uid for version in versions]


def test_the_base_needs_no_reference():
    store = AdapterStore(lambda version: None)
    store.acquire(BASE_UID)
    store.release(BASE_UID)
    assert store.num_references == 0


def test_an_unloaded_version_lives_until_its_last_request_ends():
    freed: list[Version] = []
    store = AdapterStore(freed.append)
    uid = add(store, "x", 3)
    for _ in range(2):
        store.acquire(uid)
    assert store.use(uid) == 3
    store.unload("x")
    assert store.infos() == ()
    with pytest.raises(ModelNotFound, match="unloaded"):
        store.acquire(uid)
    store.release(uid)
    assert freed == []
    store.leave(uid)
    store.release(uid)
    assert uids(freed) == [uid]
    assert store.num_references == 0


def test_uids_are_never_used_again():
    store = AdapterStore(lambda version: None)
    first = add(store, "x")
    store.unload("x")
    assert add(store, "x") != first


def test_a_taken_name_and_an_unknown_one():
    store = AdapterStore(lambda version: None)
    add(store, "x")
    with pytest.raises(AdapterExists, match="'x' is loaded already .from '/x'."):
        add(store, "x")
    with pytest.raises(ModelNotFound, match="no adapter 'y' is loaded .loaded: x."):
        store.unload("y")


def test_a_new_version_takes_the_name_and_the_old_one_stays_for_its_requests():
    freed: list[Version] = []
    store = AdapterStore(freed.append)
    old = add(store, "x", 0)
    store.acquire(old)
    store.named("x").pinned = True
    new = add(store, "x", replace=True)
    assert store.named("x").info.uid == new
    assert store.named("x").pinned
    assert store.use(old) == 0
    store.leave(old)
    store.release(old)
    assert uids(freed) == [old]


def test_who_leaves_the_device_first():
    for policy, expected in (("lru", ["b", "a"]), ("fifo", ["a", "b"])):
        store = AdapterStore(lambda version: None, policy)
        named = {name: add(store, name, slot) for slot, name in enumerate("abcd")}
        for name in "ba":
            store.acquire(named[name])
            store.release(named[name])
        store.acquire(named["c"])
        store.use(named["c"])
        store.named("d").pinned = True
        assert [version.info.name for version in store.device_victims()] == expected


def test_what_is_nowhere_else_does_not_leave():
    store = AdapterStore(lambda version: None)
    info = AdapterInfo(name="x", uid=store.next_uid(), path="", rank=1, num_bytes=1, target_modules=())
    version = store.add(info, has_files=False)
    store.place(info.uid, 0)
    assert store.device_victims() == []
    version.host_bytes = 7
    assert store.device_victims() == [version]
    assert store.host_victims() == []


def test_who_leaves_the_host_first():
    """Those that are on the device too, then the least recently used; never one that a request waits for."""
    store = AdapterStore(lambda version: None)
    named = {name: add(store, name) for name in "abcd"}
    for version in store:
        version.host_bytes = 5
    store.place(named["c"], 0)
    store.acquire(named["a"])
    store.release(named["a"])
    store.acquire(named["d"])
    assert [version.info.name for version in store.host_victims()] == ["c", "b", "a"]
    assert store.host_bytes == 20


class Store(RuleBasedStateMachine):
    """Any sequence of operations against a plain model: what each request holds, and which names there are."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[AdapterUid] = []
        self.store = AdapterStore(lambda version: self.dropped.append(version.info.uid))
        self.names: dict[str, AdapterUid] = {}
        self.requests: list[tuple[AdapterUid, bool]] = []
        self.alive: set[AdapterUid] = set()
        self.slots = iter(range(10**6))

    @rule(name=st.sampled_from("abc"), replace=st.booleans())
    def load(self, name: str, replace: bool) -> None:
        if name in self.names and not replace:
            with pytest.raises(AdapterExists):
                add(self.store, name)
            return
        self.names[name] = add(self.store, name, replace=replace)
        self.alive.add(self.names[name])

    @rule(name=st.sampled_from("abc"))
    def unload(self, name: str) -> None:
        if name in self.names:
            assert self.store.unload(name).uid == self.names.pop(name)
        else:
            with pytest.raises(ModelNotFound):
                self.store.unload(name)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        uid = self.names[data.draw(st.sampled_from(sorted(self.names)))]
        self.store.acquire(uid)
        self.requests.append((uid, False))

    @precondition(lambda self: any(not inside for _, inside in self.requests))
    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from([i for i, (_, inside) in enumerate(self.requests) if not inside]))
        uid = self.requests[i][0]
        if self.store[uid].slot is None:
            self.store.place(uid, next(self.slots))
        assert self.store.use(uid) == self.store[uid].slot
        self.requests[i] = uid, True

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        uid, inside = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        if inside:
            self.store.leave(uid)
        self.store.release(uid)

    @rule()
    def evict(self) -> None:
        for victim in self.store.device_victims()[:1]:
            assert (victim.info.uid, True) not in self.requests
            victim.slot = None

    @invariant()
    def agrees(self) -> None:
        held = {uid for uid, _ in self.requests}
        living = held | set(self.names.values())
        assert {version.info.uid for version in self.store} == living
        assert sorted(self.dropped) == sorted(self.alive - living)
        assert {info.name: info.uid for info in self.store.infos()} == self.names
        assert self.store.num_references == len(self.requests)
        for version in self.store:
            of_version = [inside for uid, inside in self.requests if uid == version.info.uid]
            assert (version.references, version.users) == (len(of_version), sum(of_version))


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
