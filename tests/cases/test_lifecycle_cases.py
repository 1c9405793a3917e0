"""Faults that users met with adapters that come and go, one test each, on the engine with a tiny model."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from lorry.engine import adapters as desk
from lorry.engine.engine import Engine
from lorry.errors import AdapterCapacity, AdapterError, AdapterExists, AdapterFormatError, ModelNotFound
from lorry.types import AdapterInfo, EngineRequest, TokenOutput
from tests.adapters import make_peft_adapter, reference_logits
from tests.engines import make_engine, request, run_engine, tokens_of
from tests.models import random_tokens, tiny_model

FACTORY = partial(tiny_model, "llama")
NAMES = "abcdef"
PROMPT = random_tokens(40, 5)[0].tolist()
WEIGHTS = "adapter_model.safetensors"

Paths = dict[str, Path]
Answers = dict[str | None, list[int]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """Adapters of one rank, so of one size."""
    folder = tmp_path_factory.mktemp("lifecycle")
    return {
        name: make_peft_adapter(folder / name, FACTORY, ["q_proj", "v_proj"], rank=4, seed=i, spread=0.5)
        for i, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def alone(paths: Paths) -> Answers:
    """What each adapter, and the base, says to `PROMPT`; no two say the same."""
    engine = make_engine(FACTORY(), paths)
    answers = {name: say(engine, name) for name in (None, *NAMES)}
    assert len({tuple(answer) for answer in answers.values()}) == len(answers)
    return answers


@pytest.fixture
def mine(paths: Paths, tmp_path: Path) -> Path:
    """A folder with the files of `a`, to be changed."""
    return Path(shutil.copytree(paths["a"], tmp_path / "mine"))


def ask(name: str, engine: Engine, adapter: str | None, **params: object) -> EngineRequest:
    return request(name, PROMPT, engine, adapter, **params)


def say(engine: Engine, adapter: str | None, **params: object) -> list[int]:
    return tokens_of(run_engine(engine, [ask("say", engine, adapter, **params)])["say"])


def load(engine: Engine, name: str, path: Path, replace: bool = False) -> AdapterInfo:
    return engine.register_adapter(engine.prepare_adapter(name, str(path)), replace)


def send(engine: Engine, name: str, path: Path, replace: bool = False) -> AdapterInfo:
    """Load an adapter that has no files, as far as the engine knows."""
    content = save(load_file(path / WEIGHTS), {"adapter_config": (path / "adapter_config.json").read_text()})
    return engine.register_adapter(engine.prepare_adapter(name, "sent", content), replace)


def size_of_one(paths: Paths) -> int:
    return load(make_engine(FACTORY()), "x", paths["a"]).num_bytes


def small(paths: Paths, room: float, adapters: Paths | None = None, **settings: object) -> Engine:
    """An engine whose device has room for so many adapters; `adapters` (all of them) are there from the start."""
    loaded = paths if adapters is None else adapters
    return make_engine(FACTORY(), loaded, lora_memory=int(room * size_of_one(paths)), **settings)


def listed(engine: Engine) -> list[tuple[object, ...]]:
    """What the list says of each adapter, but for what its requests count."""
    found = engine.adapter_list().adapters
    return [(status.info, status.residency, status.pinned, status.num_running) for status in found]


def homes(engine: Engine) -> dict[str, str]:
    return {found.info.name: found.residency for found in engine.adapter_list().adapters}


def steps(engine: Engine) -> Iterator[TokenOutput]:
    while engine.has_work:
        yield from engine.step()


def of(name: str, outputs: list[TokenOutput]) -> list[int]:
    return tokens_of([output for output in outputs if output.request_id == name])


def memory(engine: Engine) -> tuple[int, int, int]:
    """Registered adapters, and what all of them take of the host's memory and of the device."""
    stats = engine.stats()
    assert stats.adapters_on_host <= stats.adapters_registered
    return stats.adapters_registered, stats.adapter_host_bytes, stats.adapter_device_bytes


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_for_adapter) == (0, 0, 0)
    assert (stats.pages_in_use, stats.adapter_references) == (0, 0)


def put(source: Path, target: Path) -> None:
    """Overwrite an adapter's files in place, as a trainer does after a step."""
    for name in (WEIGHTS, "adapter_config.json"):
        (target / name).write_bytes((source / name).read_bytes())


# Loading


def test_a06_a_name_that_is_taken_is_refused_or_replaced_and_never_ignored(paths, alone, mine):
    engine = make_engine(FACTORY(), {"x": mine})
    first = engine.adapters["x"]
    for path in (mine, paths["b"]):
        with pytest.raises(AdapterExists, match=f"'x' is loaded already .from '{mine}'"):
            load(engine, "x", path)
        assert engine.adapters["x"] == first
        assert say(engine, "x") == alone["a"]
    put(paths["c"], mine)
    assert load(engine, "x", mine, replace=True).uid > first.uid
    assert say(engine, "x") == alone["c"]
    assert load(engine, "x", paths["b"], replace=True).path == str(paths["b"])
    assert say(engine, "x") == alone["b"]


def test_a07_one_path_under_two_names_is_allowed_and_counted(paths, alone):
    engine = make_engine(FACTORY())
    load(engine, "one", paths["a"])
    _, host, device = memory(engine)
    load(engine, "two", paths["a"])
    assert memory(engine) == (2, 2 * host, 2 * device)
    assert say(engine, "one") == say(engine, "two") == alone["a"]
    engine.unload_adapter("one")
    assert memory(engine) == (1, host, device)
    assert say(engine, "two") == alone["a"]


def test_a07_the_same_load_a_thousand_times_takes_no_more_memory(paths):
    engine = make_engine(FACTORY(), {"x": paths["a"]})
    before = memory(engine)
    objects = 0
    for i in range(1000):
        with pytest.raises(AdapterExists):
            load(engine, "x", paths["a"])
        if i == 50:
            gc.collect()
            objects = len(gc.get_objects())
    gc.collect()
    assert len(gc.get_objects()) <= objects + 200
    assert memory(engine) == before


def test_a08_of_two_loads_that_were_read_together_one_is_taken(paths, alone):
    engine = make_engine(FACTORY())
    both = [engine.prepare_adapter("x", str(paths[name])) for name in "ab"]
    first = engine.register_adapter(both[0])
    used = memory(engine)
    with pytest.raises(AdapterExists):
        engine.register_adapter(both[1])
    assert (engine.adapters, memory(engine)) == ({"x": first}, used)
    assert say(engine, "x") == alone["a"]
    engine.unload_adapter("x")
    with pytest.raises(ModelNotFound):
        engine.unload_adapter("x")
    assert memory(engine) == (0, 0, 0)


@pytest.mark.parametrize("flag", ["lora_host_memory", "max_loaded_loras"])
def test_a07_adapters_without_files_are_refused_where_the_hosts_memory_is_full(flag, paths, alone):
    """They cannot be read again, so none of them can make room for the next."""
    limit = int(2.5 * size_of_one(paths)) if flag == "lora_host_memory" else 2
    engine = make_engine(FACTORY(), {"files": paths["d"]}, **{flag: limit})
    way_out = f"may hold {limit:,} .*: unload one, or raise --{flag.replace('_', '-')}"
    send(engine, "one", paths["a"])
    send(engine, "two", paths["b"])
    before = memory(engine)
    with pytest.raises(AdapterCapacity, match=f"'three': 3 adapters without files would take .* {way_out}"):
        send(engine, "three", paths["c"])
    assert memory(engine) == before
    assert set(engine.adapters) == {"files", "one", "two"}
    send(engine, "two", paths["c"], replace=True)
    assert [say(engine, name) for name in ("one", "two", "files")] == [alone["a"], alone["c"], alone["d"]]
    engine.unload_adapter("one")
    send(engine, "three", paths["b"])
    assert say(engine, "three") == alone["b"]


def without_config(path: Path) -> None:
    (path / "adapter_config.json").unlink()


def without_weights(path: Path) -> None:
    (path / WEIGHTS).rename(path / f"{WEIGHTS}.incomplete")


def cut_short(path: Path) -> None:
    os.truncate(path / WEIGHTS, (path / WEIGHTS).stat().st_size // 2)


@pytest.mark.parametrize("damage", [without_config, without_weights, cut_short])
def test_a16_a_half_downloaded_folder_is_refused_for_that_name_alone(damage, paths, alone, mine):
    engine = make_engine(FACTORY(), {"other": paths["b"]})
    damage(mine)
    with pytest.raises(AdapterFormatError, match=f"'x' at '{mine}'"):
        load(engine, "x", mine)
    with pytest.raises(AdapterFormatError, match=f"'x' at '{mine}'"):
        make_engine(FACTORY(), {"x": mine})
    assert list(engine.adapters) == ["other"]
    assert say(engine, "other") == alone["b"]
    shutil.copytree(paths["a"], mine, dirs_exist_ok=True)
    load(engine, "x", mine)
    assert say(engine, "x") == alone["a"]


def test_a16_a_download_that_goes_on_while_the_files_are_read_is_noticed(paths, mine, monkeypatch):
    engine = make_engine(FACTORY())
    read = desk.load_adapter

    def slow(*args):
        weights = read(*args)
        put(paths["b"], mine)
        return weights

    monkeypatch.setattr(desk, "load_adapter", slow)
    with pytest.raises(AdapterFormatError, match="'x' at .* changed while they were read"):
        load(engine, "x", mine)


def test_a16_a_path_that_the_system_refuses_is_the_users_fault():
    engine = make_engine(FACTORY())
    with pytest.raises(AdapterFormatError, match="'x' at 'aaa.* cannot be opened: File name too long"):
        engine.prepare_adapter("x", "a" * 5000)


def test_a16_a_config_without_type_and_base_is_enough(paths, alone, mine):
    (mine / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    engine = make_engine(FACTORY(), {"x": mine})
    assert say(engine, "x") == alone["a"]


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_a18_a_pickle_payload_is_not_executed_by_any_way_of_loading(mine):
    engine = make_engine(FACTORY())
    (mine / WEIGHTS).unlink()
    pickled = mine / "adapter_model.bin"
    torch.save({"x.lora_A.weight": Payload(mine / "executed")}, pickled)
    for content in (None, pickled.read_bytes()):
        with pytest.raises(AdapterFormatError):
            engine.prepare_adapter("x", str(mine), content)
    assert not (mine / "executed").exists()


def assert_peft_agrees(path: Path, answer: list[int]) -> None:
    tokens = torch.tensor([PROMPT + answer])
    logits = reference_logits(FACTORY, path, tokens)[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(dim=-1).tolist() == answer


def test_a25_any_rank_is_served_and_the_limit_is_yours(tmp_path):
    free, limited = make_engine(FACTORY()), make_engine(FACTORY(), max_lora_rank=256)
    for rank in (50, 128, 256, 320):
        path = make_peft_adapter(tmp_path / str(rank), FACTORY, ["q_proj"], rank=rank, alpha=rank, spread=0.05)
        assert load(free, f"r{rank}", path).rank == rank
        assert_peft_agrees(path, say(free, f"r{rank}"))
        if rank <= 256:
            load(limited, f"r{rank}", path)
            continue
        with pytest.raises(AdapterCapacity, match="rank 320, above the limit of 256: raise --max-lora-rank"):
            load(limited, f"r{rank}", path)


def test_w20_a23_adapters_of_the_start_and_later_ones_are_told_apart(paths, alone):
    """Also after one of the former has gone and come back."""
    engine = make_engine(FACTORY(), {name: paths[name] for name in "abc"})
    load(engine, "d", paths["d"])
    assert [say(engine, name) for name in (*"abcd", None)] == [alone[name] for name in (*"abcd", None)]
    uids = [info.uid for info in engine.adapters.values()]
    engine.unload_adapter("b")
    uids += [load(engine, name, paths[name]).uid for name in "eb"]
    assert len(set(uids)) == 6
    together = run_engine(engine, [ask(name, engine, name) for name in "abcde"])
    assert {name: tokens_of(outputs) for name, outputs in together.items()} == {name: alone[name] for name in "abcde"}


@pytest.mark.parametrize("room", [1, 6])
def test_l02_loads_at_any_step_leave_running_answers_as_they_are(room, paths, alone):
    engine = small(paths, room, {"a": paths["a"]})
    for name, adapter in (("base", None), ("a", "a")):
        engine.add_request(ask(name, engine, adapter))
    outputs = []
    for name in "bcdef":
        outputs += engine.step()
        load(engine, name, paths[name])
        engine.add_request(ask(name, engine, name))
    outputs += steps(engine)
    assert of("base", outputs) == alone[None]
    assert [of(name, outputs) for name in NAMES] == [alone[name] for name in NAMES]


# Unloading


@pytest.mark.parametrize("replace", [False, True])
def test_l03_running_queued_and_preempted_requests_end_on_the_weights_that_left(replace, paths, alone, mine):
    long = {"max_tokens": 40}
    expected = say(make_engine(FACTORY(), paths), "a", **long)
    engine = make_engine(
        FACTORY(), {"x": mine}, max_total_tokens=128, max_running_requests=2, disable_radix_cache=True
    )
    before = memory(engine)
    for i in range(4):
        engine.add_request(ask(f"r{i}", engine, "x", **long))
    late = ask("late", engine, "x")
    outputs = []
    while not engine.stats().num_preemptions:
        assert engine.has_work
        outputs += engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 3)
    if not replace:
        engine.unload_adapter("x")
        assert not engine.adapters
    load(engine, "x", paths["b"], replace)
    shutil.rmtree(mine)
    with pytest.raises(ModelNotFound, match="unloaded"):
        engine.add_request(late)
    engine.add_request(ask("new", engine, "x"))
    outputs += steps(engine)
    assert [of(f"r{i}", outputs) for i in range(4)] == [expected] * 4
    assert of("new", outputs) == alone["b"]
    assert memory(engine) == before
    assert_idle(engine)


def test_l03_an_adapter_that_is_read_for_its_last_request_leaves_nothing(paths, alone):
    engine = small(paths, 1, max_loaded_loras=1)
    name = next(name for name, home in homes(engine).items() if home == "registered")
    busy = next(name for name, home in homes(engine).items() if home == "device")
    engine.add_request(ask("busy", engine, busy, max_tokens=20))
    engine.add_request(ask("last", engine, name))
    engine.unload_adapter(name)
    reads = engine.stats().num_adapter_reads
    outputs = list(steps(engine))
    assert of("last", outputs) == alone[name]
    assert engine.stats().num_adapter_reads == reads + 1
    assert name not in homes(engine)
    for other in list(engine.adapters):
        engine.unload_adapter(other)
    assert memory(engine) == (0, 0, 0)
    assert_idle(engine)


def test_w25_a_request_for_an_adapter_that_left_never_gets_the_next_in_its_place(paths):
    engine = make_engine(FACTORY(), {"x": paths["a"]}, max_loras_per_batch=1)
    slot = engine._desk.store.named("x").slot
    orphans = [ask(f"orphan-{i}", engine, "x") for i in range(2)]
    engine.unload_adapter("x")
    for orphan, name in zip(orphans, "yx", strict=True):
        load(engine, name, paths["b"])
        assert engine._desk.store.named(name).slot == slot
        with pytest.raises(ModelNotFound, match="has been unloaded"):
            engine.add_request(orphan)
        engine.unload_adapter(name)
    assert_idle(engine)


# More adapters than there is room for


def test_l04_the_next_version_is_loaded_before_the_last_is_unloaded(paths, alone):
    """With every place on the device taken by an adapter that is busy."""
    engine = make_engine(FACTORY(), {"v1": paths["a"]}, max_loras_per_batch=1)
    engine.add_request(ask("v1", engine, "v1"))
    outputs = engine.step()
    load(engine, "v2", paths["b"])
    engine.add_request(ask("v2", engine, "v2"))
    outputs += engine.step()
    engine.unload_adapter("v1")
    outputs += steps(engine)
    assert (of("v1", outputs), of("v2", outputs)) == (alone["a"], alone["b"])
    assert homes(engine) == {"v2": "device"}


def test_l05_a_new_name_in_every_step_and_none_is_ever_unloaded(paths, alone):
    engine = small(paths, 2.5, {}, max_loaded_loras=4)
    each = size_of_one(paths)
    for step in range(40):
        folder = NAMES[step % len(NAMES)]
        load(engine, f"step-{step}", paths[folder])
        assert say(engine, f"step-{step}") == alone[folder]
        _, host, device = memory(engine)
        assert (host, device) == (min(step + 1, 4) * each, min(step + 1, 2) * each)
    assert say(engine, "step-0") == alone["a"]


def test_l08_the_base_needs_no_place_and_what_is_pinned_keeps_its_own(paths, alone):
    engine = make_engine(FACTORY(), max_loras_per_batch=2)
    load(engine, "a", paths["a"])
    engine.pin_adapter("a")
    for name in "bc":
        load(engine, name, paths[name])
    for name in ("b", None, "c", None, "b", "c"):
        assert say(engine, name) == alone[name]
        assert homes(engine)["a"] == "device"
    with pytest.raises(AdapterCapacity, match="2 of 2 places .* leave no room for every other: unpin one"):
        engine.pin_adapter("b")
    assert [say(engine, name) for name in "bca"] == [alone[name] for name in "bca"]


@pytest.mark.parametrize("host", [4, 1])
def test_l09_registered_adapters_take_turns_on_the_device(host, paths, alone):
    """One place, four adapters: they come from the host's memory, or from their files again."""
    engine = make_engine(FACTORY(), {n: paths[n] for n in "abcd"}, max_loras_per_batch=1, max_loaded_loras=host)
    assert [say(engine, name) for name in "abcda"] == [alone[name] for name in "abcda"]
    stats = engine.stats()
    assert (stats.adapters_registered, stats.adapters_on_device) == (4, 1)
    assert (stats.num_adapter_reads > 0) == (host == 1)


def test_l10_one_name_more_than_there_are_places(paths, alone):
    engine = make_engine(FACTORY(), max_loras_per_batch=3)
    for name in "abcd":
        load(engine, name, paths[name])
        assert say(engine, name) == alone[name]
    assert [say(engine, name) for name in "dcba"] == [alone[name] for name in "dcba"]


# New weights


def test_l13_files_that_are_overwritten_after_the_load_change_nothing(paths, alone, mine):
    engine = make_engine(FACTORY(), {"x": mine, "y": paths["b"]}, max_loras_per_batch=1)
    put(paths["c"], mine)
    assert [say(engine, name) for name in "xyx"] == [alone[name] for name in "aba"]


def damaged(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """Changes the last tensor of the file."""

    def damage(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        last = sorted(tensors)[-1]
        save_file(tensors | {last: change(tensors[last])}, path / WEIGHTS)

    return damage


BAD_REFRESHES = {
    "not a number": damaged(lambda tensor: tensor.index_fill(0, torch.tensor([3]), float("nan"))),
    "another shape": damaged(lambda tensor: tensor[1:].contiguous()),
    "another type": damaged(lambda tensor: tensor.to(torch.int8)),
    "cut short": cut_short,
    "no weights": without_weights,
}


@pytest.mark.parametrize("damage", BAD_REFRESHES.values(), ids=BAD_REFRESHES)
def test_l14_a_bad_file_in_a_refresh_keeps_the_old_version(damage, paths, alone, mine):
    engine = make_engine(FACTORY(), {"x": paths["a"]})
    before, used = listed(engine), memory(engine)
    engine.add_request(ask("running", engine, "x"))
    outputs = engine.step()
    put(paths["b"], mine)
    damage(mine)
    with pytest.raises(AdapterError, match="'x' at"):
        load(engine, "x", mine, replace=True)
    outputs += steps(engine)
    assert of("running", outputs) == say(engine, "x") == alone["a"]
    assert (listed(engine), memory(engine)) == (before, used)


def test_l14_a_refresh_that_finds_no_room_keeps_the_old_version(paths, alone, tmp_path):
    engine = small(paths, 1.5, {"x": paths["a"]})
    large = make_peft_adapter(tmp_path / "large", FACTORY, ["q_proj", "v_proj"], rank=16)
    before, used = listed(engine), memory(engine)
    with pytest.raises(AdapterCapacity, match="'x': the adapter needs"):
        load(engine, "x", large, replace=True)
    assert (listed(engine), memory(engine)) == (before, used)
    assert say(engine, "x") == alone["a"]


@pytest.mark.parametrize("replace", [False, True])
def test_l17_the_first_token_after_each_reload_is_of_the_new_weights(replace, paths, alone, mine):
    engine = make_engine(FACTORY(), {"x": mine})
    for name in "bacabd":
        put(paths[name], mine)
        if not replace:
            engine.unload_adapter("x")
        load(engine, "x", mine, replace)
        assert say(engine, "x", max_tokens=1) == alone[name][:1]
        assert say(engine, "x") == alone[name]


def test_w04_versions_of_one_name_share_no_keys_and_values(paths, alone):
    engine = make_engine(FACTORY(), {"x": paths["a"]})
    engine.add_request(ask("old", engine, "x"))
    outputs = engine.step()
    load(engine, "x", paths["b"], replace=True)
    engine.add_request(ask("new", engine, "x"))
    outputs += steps(engine)
    assert (of("old", outputs), of("new", outputs)) == (alone["a"], alone["b"])
    load(engine, "other name", paths["b"])
    for name, hit in (("x", 32), ("other name", 0), ("other name", 32)):
        outputs = run_engine(engine, [ask("r", engine, name)])["r"]
        assert tokens_of(outputs) == alone["b"]
        assert outputs[0].num_cached_tokens == hit


# Room and speed


def test_l08_a_refresh_passes_the_pin_on_only_where_others_still_find_room(paths, alone, tmp_path):
    engine = small(paths, 2.5, {"x": paths["a"], "y": paths["b"]})
    engine.pin_adapter("x")
    large = make_peft_adapter(tmp_path / "large", FACTORY, ["q_proj", "v_proj"], rank=8, seed=9, spread=0.5)
    with pytest.raises(AdapterCapacity, match="'x': 1 pinned adapters would take .* leave no room for every other"):
        load(engine, "x", large, replace=True)
    assert [say(engine, name) for name in "yx"] == [alone["b"], alone["a"]]
    engine.pin_adapter("x", pinned=False)
    load(engine, "x", large, replace=True)
    assert say(engine, "y") == alone["b"]
    assert_peft_agrees(large, say(engine, "x"))


def test_p04_memory_follows_the_real_rank_and_not_the_limit(paths, alone, tmp_path):
    engine = small(paths, 16.5, {"a": paths["a"]}, max_lora_rank=256)
    each = engine.adapters["a"].num_bytes
    large = make_peft_adapter(tmp_path / "large", FACTORY, ["q_proj", "v_proj"], rank=32)
    assert load(engine, "large", large).num_bytes == 8 * each
    for i in range(7):
        load(engine, f"small-{i}", paths["b"])
    assert set(homes(engine).values()) == {"device"}
    assert memory(engine) == (9, 16 * each, 16 * each)
    assert [say(engine, name) for name in ("a", "small-6")] == [alone["a"], alone["b"]]


def test_p08_who_waits_for_keys_and_values_keeps_nobody_from_a_place(paths, alone):
    """Two places: a request that finds no pages counts for its own adapter, and only until it ends."""
    engine = make_engine(
        FACTORY(), {name: paths[name] for name in "abc"}, max_loras_per_batch=2, max_total_tokens=8 * 16
    )
    engine.add_request(request("big", random_tokens(100, 1)[0].tolist(), max_tokens=4))
    for name in "abc":
        engine.add_request(ask(name, engine, name))
    outputs = engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_for_adapter) == (1, 2, 1)
    engine.abort("a")
    outputs += engine.step()
    assert (engine.stats().num_waiting, engine.stats().num_waiting_for_adapter) == (2, 0)
    outputs += steps(engine)
    assert [of(name, outputs) for name in "abc"] == [[], alone["b"], alone["c"]]
    assert_idle(engine)


def test_p09_after_a_refresh_nothing_is_read_again(paths, alone, mine):
    engine = make_engine(FACTORY(), {"x": paths["b"]})
    load(engine, "x", mine, replace=True)
    shutil.rmtree(mine)
    before = engine.stats()
    assert [say(engine, "x") for _ in range(5)] == [alone["a"]] * 5
    after = engine.stats()
    assert (after.num_adapter_reads, after.num_adapter_copies) == (0, before.num_adapter_copies)
    with pytest.raises(AdapterExists):
        load(engine, "x", paths["b"])


def test_p13_as_many_adapters_as_places_all_stay_and_so_do_their_prefixes(paths, alone):
    names = {str(i): paths[NAMES[i % len(NAMES)]] for i in range(50)}
    engine = make_engine(FACTORY(), names, max_loras_per_batch=50, max_running_requests=32, max_total_tokens=50 * 48)
    for hit in (0, 32):
        outputs = run_engine(engine, [ask(name, engine, name) for name in names])
        for i, name in enumerate(names):
            assert tokens_of(outputs[name]) == alone[NAMES[i % len(NAMES)]]
            assert outputs[name][0].num_cached_tokens == hit
    stats = engine.stats()
    assert (stats.num_adapter_copies, stats.num_adapter_reads, stats.num_adapter_evictions) == (50, 0, 0)


def test_p18_memory_of_exactly_one_adapters_size_holds_one(paths, alone):
    each = size_of_one(paths)
    engine = make_engine(FACTORY(), {name: paths[name] for name in "ab"}, lora_memory=each, lora_host_memory=each)
    assert [say(engine, name) for name in "abab"] == [alone[name] for name in "abab"]
    assert memory(engine) == (2, each, each)
    send(engine, "sent", paths["c"])
    assert [say(engine, name) for name in ("a", "sent")] == [alone["a"], alone["c"]]
    less = make_engine(FACTORY(), lora_memory=each - 4)
    with pytest.raises(AdapterCapacity, match=f"'a': the adapter needs {each:,} bytes, the arena has {each - 4:,}: "):
        load(less, "a", paths["a"])
