"""Adapters come and go between files, host and device while requests run: every answer is that of its own version."""

from __future__ import annotations

import gc
import json
import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from lorry.engine import adapters as desk
from lorry.engine.engine import Engine
from lorry.errors import AdapterCapacity, AdapterFormatError, ModelNotFound
from lorry.lora import residency
from lorry.types import AdapterStatus, EngineRequest, TokenOutput
from tests.adapters import make_peft_adapter
from tests.engines import make_engine, request, run_engine, tokens_of
from tests.models import random_tokens, tiny_model

FACTORY = partial(tiny_model, "llama")
NAMES = "abcdef"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of one rank, so of one size."""
    folder = tmp_path_factory.mktemp("residency")
    return {
        name: make_peft_adapter(folder / name, FACTORY, ["q_proj", "v_proj"], rank=4, seed=i, spread=0.5)
        for i, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def alone(paths: dict[str, Path]) -> dict[str | None, list[int]]:
    """What each adapter, and the base, says to `PROMPT`."""
    engine = make_engine(FACTORY(), paths)
    answers = {name: tokens_of(run_engine(engine, [ask("x", engine, name)])["x"]) for name in (None, *NAMES)}
    assert len({tuple(answer) for answer in answers.values()}) == len(answers)
    return answers


PROMPT = random_tokens(21, 5)[0].tolist()


def ask(name: str, engine: Engine, adapter: str | None, **params: object) -> EngineRequest:
    return request(name, PROMPT, engine, adapter, **params)


def small(paths: dict[str, Path], room: float = 2, **settings: object) -> Engine:
    """An engine whose device has room for so many of the adapters."""
    probe = make_engine(FACTORY(), {"probe": next(iter(paths.values()))})
    each = probe.adapters["probe"].num_bytes
    return make_engine(FACTORY(), paths, lora_memory=int(room * each), **settings)


def status(engine: Engine, name: str) -> AdapterStatus:
    return next(found for found in engine.adapter_list().adapters if found.info.name == name)


def homes(engine: Engine) -> dict[str, str]:
    return {found.info.name: found.residency for found in engine.adapter_list().adapters}


def steps(engine: Engine) -> Iterator[TokenOutput]:
    while engine.has_work:
        yield from engine.step()


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_for_adapter, stats.pages_in_use) == (0, 0, 0, 0)
    assert stats.adapter_references == 0
    assert all(found.num_running == 0 for found in engine.adapter_list().adapters)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_more_adapters_than_there_is_room_for_all_answer_as_alone(paths, alone, policy):
    engine = small(paths, 2.5, lora_eviction_policy=policy, max_loaded_loras=3)
    assert sorted(homes(engine).values()) == ["device"] * 2 + ["host"] * 3 + ["registered"]
    order = [None, *NAMES] * 3
    random.Random(1).shuffle(order)
    outputs = run_engine(engine, [ask(str(i), engine, name) for i, name in enumerate(order)])
    for i, name in enumerate(order):
        assert tokens_of(outputs[str(i)]) == alone[name], name
    stats = engine.stats()
    assert stats.num_adapter_evictions > 3
    assert stats.num_adapter_reads > 0
    assert stats.adapters_on_device <= 2
    assert stats.adapters_on_host <= 3
    assert_idle(engine)


def test_p05_who_has_no_room_waits_aside_and_others_pass(paths, alone):
    engine = small(paths, 1)
    first = homes(engine)
    assert list(first.values()).count("device") == 1
    resident = next(name for name, home in first.items() if home == "device")
    absent = next(name for name in NAMES if name != resident)
    engine.add_request(ask("long", engine, resident, max_tokens=40))
    engine.step()
    engine.add_request(ask("aside", engine, absent))
    engine.add_request(ask("base", engine, None))
    engine.add_request(ask("behind", engine, resident))
    ended = [output.request_id for output in steps(engine) if output.finish_reason]
    assert ended == ["base", "behind", "long", "aside"]
    assert_idle(engine)


class SlowReads:
    """Reading files takes until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.started = threading.Event(), threading.Event()
        load = desk.load_adapter

        def slow(*args):
            self.started.set()
            assert self.go.wait(20)
            return load(*args)

        monkeypatch.setattr(desk, "load_adapter", slow)


def test_reading_files_stalls_nobody(paths, alone, monkeypatch):
    engine = small(paths, 2, max_loaded_loras=2)
    absent = next(name for name, home in homes(engine).items() if home == "registered")
    slow = SlowReads(monkeypatch)
    engine.add_request(ask("cold", engine, absent))
    engine.add_request(ask("base", engine, None, max_tokens=12))
    outputs = []
    while not any(output.request_id == "base" and output.finish_reason for output in outputs):
        outputs += engine.step()
    assert slow.started.wait(5)
    assert {output.request_id for output in outputs} == {"base"}
    slow.go.set()
    cold = [output for output in steps(engine) if output.request_id == "cold"]
    assert tokens_of(cold) == alone[absent]
    assert_idle(engine)


def test_what_waits_for_room_is_not_all_read_ahead(paths, monkeypatch):
    monkeypatch.setattr(residency, "MAX_STAGED", 2)
    engine = small(paths, 1, max_loaded_loras=1)
    resident = next(name for name, home in homes(engine).items() if home == "device")
    engine.add_request(ask("long", engine, resident, max_tokens=60))
    for name in NAMES:
        if name != resident:
            engine.add_request(ask(name, engine, name))
    ended, most = [], 0
    for output in steps(engine):
        most = max(most, engine.stats().adapters_on_host)
        ended += [output.request_id] if output.finish_reason else []
    assert most <= 3  # the resident one may be there too
    assert ended == ["long", *(name for name in NAMES if name != resident)]


def test_l13_files_that_have_changed_end_the_requests_that_need_them_and_no_other(paths, alone, tmp_path):
    copies = {name: Path(shutil.copytree(path, tmp_path / name)) for name, path in paths.items()}
    engine = small(copies, 1, max_loaded_loras=1)
    gone, changed, *_ = [name for name, home in homes(engine).items() if home == "registered"]
    shutil.rmtree(copies[gone])
    shutil.copytree(paths["f" if changed != "f" else "e"], copies[changed], dirs_exist_ok=True)
    (copies[changed] / "adapter_model.safetensors").touch()
    outputs = run_engine(engine, [ask(str(name), engine, name) for name in (gone, changed, None)])
    assert outputs[gone][-1].finish_reason == outputs[changed][-1].finish_reason == "error"
    assert "no folder" in str(outputs[gone][-1].error)
    assert "are not those that were loaded: load it again" in str(outputs[changed][-1].error)
    assert outputs[changed][-1].error_code == AdapterFormatError.code
    assert tokens_of(outputs["None"]) == alone[None]
    assert_idle(engine)
    engine.register_adapter(engine.prepare_adapter(changed, str(copies[changed])), replace=True)
    again = run_engine(engine, [ask("x", engine, changed)])["x"]
    assert tokens_of(again) == alone["f" if changed != "f" else "e"]


def test_l03_aborted_and_unloaded_while_they_wait(paths, alone):
    engine = small(paths, 1)
    resident = next(name for name, home in homes(engine).items() if home == "device")
    waiting = [name for name in NAMES if name != resident][:2]
    engine.add_request(ask("long", engine, resident, max_tokens=30))
    engine.step()
    for name in waiting:
        engine.add_request(ask(name, engine, name))
    engine.step()
    assert engine.stats().num_waiting_for_adapter == 2
    engine.abort(waiting[0])
    engine.unload_adapter(waiting[1])
    late = ask("late", engine, None)
    with pytest.raises(ModelNotFound):
        engine.add_request(
            EngineRequest(request_id="l", token_ids=late.token_ids, params=late.params, adapter_uid=99)
        )
    outputs: dict[str, list[TokenOutput]] = {}
    for output in steps(engine):
        outputs.setdefault(output.request_id, []).append(output)
    assert outputs[waiting[0]][-1].finish_reason == "abort"
    assert tokens_of(outputs[waiting[1]]) == alone[waiting[1]]  # it had arrived before the unload
    assert waiting[1] not in homes(engine)
    assert_idle(engine)


def test_unload_can_end_the_requests_too(paths):
    engine, name = small({"a": paths["a"], "b": paths["b"]}, 3), "a"
    before = engine.stats().adapter_device_bytes
    size = status(engine, name).info.num_bytes
    for i in range(3):
        if i == 2:  # what runs on the version before goes too
            engine.register_adapter(engine.prepare_adapter(name, str(paths[name])), replace=True)
        engine.add_request(ask(f"r{i}", engine, name, max_tokens=40))
        engine.step()
    engine.unload_adapter(name, abort=True)
    outputs = list(steps(engine))
    assert [o.finish_reason for o in outputs if o.finish_reason] == ["abort"] * 3
    assert_idle(engine)
    assert engine.stats().adapter_device_bytes == before - size


def test_l15_running_requests_end_on_their_weights_and_later_ones_get_the_new(paths, alone):
    engine = make_engine(FACTORY(), {"x": paths["a"]})
    engine.add_request(ask("old", engine, "x"))
    first = engine.step()
    old = engine.adapters["x"].uid
    info = engine.register_adapter(engine.prepare_adapter("x", str(paths["b"])), replace=True)
    assert info.uid != old
    engine.add_request(ask("new", engine, "x"))
    outputs = first + list(steps(engine))
    assert tokens_of([o for o in outputs if o.request_id == "old"]) == alone["a"]
    new = [o for o in outputs if o.request_id == "new"]
    assert tokens_of(new) == alone["b"]
    assert new[0].num_cached_tokens == 0
    assert engine.stats().adapters_registered == 1
    assert_idle(engine)


def in_memory(path: Path) -> bytes:
    tensors = safetensors.torch.load_file(path / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    return safetensors.torch.save(tensors, {"adapter_config": json.dumps(config)})


def test_an_adapter_sent_as_bytes_is_the_one_in_the_files_and_is_never_lost(paths, alone):
    engine = small({name: paths[name] for name in "abcd"}, 1, max_loaded_loras=1)
    engine.register_adapter(engine.prepare_adapter("sent", "bytes", in_memory(paths["e"])))
    for name in ("a", "sent", "b", "c", "sent"):
        outputs = run_engine(engine, [ask("x", engine, name)])["x"]
        assert tokens_of(outputs) == alone["e" if name == "sent" else name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "safetensors"),
        (b"\x10\0\0\0\0\0\0\0{}", "adapter_config"),
        (safetensors.torch.save({}), "adapter_config"),
    ],
)
def test_bytes_without_a_config_say_what_is_missing(paths, content, message):
    engine = make_engine(FACTORY())
    with pytest.raises(AdapterFormatError, match=message):
        engine.prepare_adapter("x", "bytes", content)


def test_a07_a_thousand_refreshes_leave_memory_flat(paths, alone):
    engine = small({"x": paths["a"]}, 2)
    contents = [in_memory(paths[name]) for name in "ab"]

    def refresh(i: int) -> None:
        engine.register_adapter(engine.prepare_adapter("x", "bytes", contents[i % 2]), replace=True)
        if i % 50 == 0:
            answer = tokens_of(run_engine(engine, [ask("r", engine, "x")])["r"])
            assert answer == alone["ab"[i % 2]]

    for i in range(100):
        refresh(i)
    gc.collect()
    before = len(gc.get_objects()), engine.stats().adapter_host_bytes, engine.stats().adapter_device_bytes
    for i in range(900):
        refresh(i)
    gc.collect()
    assert len(gc.get_objects()) <= before[0] + 200
    assert (engine.stats().adapter_host_bytes, engine.stats().adapter_device_bytes) == before[1:]
    assert engine.stats().adapters_registered == 1


def test_l08_pinned_adapters_stay(paths, alone):
    engine = small(paths, 3.5)
    resident = [name for name, home in homes(engine).items() if home == "device"]
    absent, other, third = [name for name in NAMES if name not in resident]
    engine.pin_adapter(absent)
    run_engine(engine, [ask("x", engine, absent)])
    assert homes(engine)[absent] == "device"
    for name in NAMES:
        assert tokens_of(run_engine(engine, [ask("x", engine, name)])["x"]) == alone[name]
    assert homes(engine)[absent] == "device"
    engine.pin_adapter(other)
    with pytest.raises(AdapterCapacity, match="3 pinned adapters would take .* no room for every other: unpin one"):
        engine.pin_adapter(third)
    assert not status(engine, third).pinned
    engine.pin_adapter(absent, pinned=False)
    engine.pin_adapter(third)
    with pytest.raises(ModelNotFound):
        engine.pin_adapter("nobody")


def test_l14_a_load_whose_pin_is_refused_changes_nothing(paths, alone):
    engine = small(paths, 1.5)
    before = homes(engine), engine.adapters
    for replace, name in ((True, "a"), (False, "new")):
        prepared = engine.prepare_adapter(name, str(paths["b"]))
        with pytest.raises(AdapterCapacity, match="1 pinned adapters would take"):
            engine.register_adapter(prepared, replace, pinned=True)
    assert (homes(engine), engine.adapters) == before
    assert tokens_of(run_engine(engine, [ask("x", engine, "a")])["x"]) == alone["a"]
    roomy = small(paths, 2.5)
    roomy.register_adapter(roomy.prepare_adapter("a", str(paths["b"])), replace=True, pinned=True)
    assert status(roomy, "a").pinned


def test_an_adapter_that_can_never_fit_is_refused_with_the_flag(paths):
    engine = make_engine(FACTORY(), lora_memory=64)
    with pytest.raises(AdapterCapacity, match=r"'a': the adapter needs .* the arena has 64: raise --lora-memory"):
        engine.register_adapter(engine.prepare_adapter("a", str(paths["a"])))
    assert homes(engine) == {}


def test_each_adapter_has_its_own_counts(paths):
    engine = make_engine(FACTORY(), {"a": paths["a"], "b": paths["b"]})
    for name in ("a", "a", "b", None):
        run_engine(engine, [ask("x", engine, name)])
    a, b = status(engine, "a"), status(engine, "b")
    assert (a.num_requests, a.prefix_hit_tokens, a.prefix_query_tokens) == (2, 16, 42)
    assert (b.num_requests, b.prefix_hit_tokens, b.prefix_query_tokens) == (1, 0, 21)
    assert 0 <= b.idle_seconds <= a.idle_seconds < 60
    engine.unload_adapter("a")
    assert (engine.stats().prefix_hit_tokens, engine.stats().prefix_query_tokens) == (16, 84)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def keep_busy(engine: Engine, clock: Clock, name: str, waiting: str, most_steps: int) -> int:
    """Steps until the waiting adapter's request ends, while new requests of another keep coming."""
    engine.add_request(ask("busy-0", engine, name, max_tokens=10))
    engine.step()
    engine.add_request(ask("waiting", engine, waiting, max_tokens=2))
    for step in range(1, most_steps):
        clock.now += 1.0
        if step % 4 == 0:
            engine.add_request(ask(f"busy-{step}", engine, name, max_tokens=10))
        if any(output.request_id == "waiting" and output.finish_reason for output in engine.step()):
            return step
    return most_steps


def test_a_waiting_adapter_makes_another_drain(paths, alone):
    found = {}
    for threshold in (None, 5.0):
        engine = small(paths, 1, lora_drain_wait_threshold=threshold, max_total_tokens=4096)
        clock = Clock()
        engine._gate._clock = clock
        resident = next(name for name, home in homes(engine).items() if home == "device")
        absent = next(name for name in NAMES if name != resident)
        found[threshold] = keep_busy(engine, clock, resident, absent, 60)
        outputs = list(steps(engine))
        assert (engine.stats().num_adapter_drains > 0) == (threshold is not None)
        assert all(tokens_of([o])[:1] for o in outputs if o.token_ids)
        assert_idle(engine)
    assert found[None] == 60
    assert found[5.0] < 25


def test_a_draining_adapter_lets_in_what_ends_before_the_drain(paths):
    engine = small(paths, 1, lora_drain_wait_threshold=1.0)
    clock = Clock()
    engine._gate._clock = clock
    resident = next(name for name, home in homes(engine).items() if home == "device")
    absent = next(name for name in NAMES if name != resident)
    engine.add_request(ask("long", engine, resident, max_tokens=30))
    engine.step()
    engine.add_request(ask("waiting", engine, absent, max_tokens=2))
    engine.step()
    clock.now = 2.0
    engine.step()
    assert status(engine, resident).draining
    engine.add_request(ask("short", engine, resident, max_tokens=5))
    engine.add_request(ask("too long", engine, resident, max_tokens=40))
    ended = [output.request_id for output in steps(engine) if output.finish_reason]
    assert ended == ["short", "long", "waiting", "too long"]
    assert_idle(engine)


def test_one_adapter_has_at_most_so_many_requests_in_steps(paths, alone):
    engine = small(paths, 2, max_requests_per_lora=2)
    name = next(name for name, home in homes(engine).items() if home == "device")
    for i in range(5):
        engine.add_request(ask(f"r{i}", engine, name))
    engine.add_request(ask("base", engine, None))
    most, outputs = 0, []
    while engine.has_work:
        outputs += engine.step()
        most = max(most, status(engine, name).num_running)
    assert most == 2
    for i in range(5):
        assert tokens_of([o for o in outputs if o.request_id == f"r{i}"]) == alone[name]
    assert_idle(engine)


def order_of_ends(engine: Engine, names: Sequence[str | None]) -> list[str]:
    for i, name in enumerate(names):
        engine.add_request(ask(f"{name}{i}", engine, name))
    return [output.request_id for output in steps(engine) if output.finish_reason]


def test_a_fair_share_for_who_comes_behind_a_crowd(paths):
    names = ["a"] * 8 + ["b", None]
    for fair, place in ((False, 8), (True, 2)):
        engine = make_engine(FACTORY(), paths, max_running_requests=1, lora_fair_share=fair)
        ended = order_of_ends(engine, names)
        assert ended.index("b8") == place - fair
        assert ended.index("None9") == place + 1 - fair
        assert [name for name in ended if name.startswith("a")] == [f"a{i}" for i in range(8)]
        assert_idle(engine)


Answer = tuple[str, Sequence[int]]


def soak(engine: Engine, paths: dict[str, Path], rng: random.Random, rounds: int) -> list[Answer]:
    """Random traffic, loads, unloads, refreshes, pins and aborts.

    Returns the answers of the requests that ended by themselves, each with the folder whose weights it must be of.
    """
    source = {name: name for name in engine.adapters}
    asked: dict[str, str] = {}
    tokens: dict[str, list[int]] = {}
    ended: list[Answer] = []
    for i in range(rounds):
        name = rng.choice(NAMES)
        known = name in engine.adapters
        match rng.randrange(10):
            case 0 if known:
                engine.unload_adapter(name)
                del source[name]
            case 1:
                source[name] = rng.choice(NAMES)
                engine.register_adapter(engine.prepare_adapter(name, str(paths[source[name]])), replace=True)
            case 2 if known:
                with suppress(AdapterCapacity):
                    engine.pin_adapter(name, pinned=rng.random() < 0.3)
            case 3 if asked:
                engine.abort(rng.choice(sorted(asked)))
            case _ if known:
                engine.add_request(ask(f"r{i}", engine, name))
                asked[f"r{i}"] = source[name]
        for _ in range(rng.randrange(3)) if i < rounds - 1 else iter(lambda: engine.has_work, False):
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason == "length":
                    ended.append((asked[output.request_id], tokens[output.request_id]))
                if output.finish_reason:
                    asked.pop(output.request_id)
    assert not asked
    return ended


@pytest.mark.parametrize("seed", range(3))
def test_soak_every_answer_is_that_of_its_version(paths, alone, seed):
    engine = small(paths, 2.5, max_loaded_loras=3, lora_drain_wait_threshold=0.01, max_requests_per_lora=3)
    ended = soak(engine, paths, random.Random(seed), 300)
    assert len(ended) > 50
    for folder, answer in ended:
        assert list(answer) == alone[folder]
    assert_idle(engine)
    for name in list(engine.adapters):
        engine.unload_adapter(name)
    stats = engine.stats()
    assert (stats.adapters_registered, stats.adapter_host_bytes, stats.adapter_device_bytes) == (0, 0, 0)
    assert torch.count_nonzero(engine._parts.lora.arena.rank) == 0
