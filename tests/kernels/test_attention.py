"""The Triton attention backend over mixed steps, against explicit attention: every feature alone and together."""

import numpy as np
import pytest
import torch

from lorry.attention import triton as triton_attention
from lorry.attention.torch import TorchAttention
from lorry.attention.triton import TritonAttention
from lorry.kernels.prefill_attention import prefill_tile, prefill_work
from tests.kernels.attention_world import DEVICE, Feature, World

TOLERANCE = 2e-5 if DEVICE.type == "cpu" else 1e-4

FEATURES = {
    "grouped": Feature(8, 2, 32, 32),
    "not grouped, narrow": Feature(3, 3, 8, 8),
    "group of five": Feature(10, 2, 16, 16),
    "width 80": Feature(4, 2, 80, 80),
    "width 96": Feature(2, 1, 96, 96),
    "MLA": Feature(4, 4, 48, 32),
    "MLA, odd widths": Feature(12, 12, 20, 10),
    "window": Feature(4, 2, 16, 16, window=40),
    "narrow window": Feature(8, 2, 16, 16, window=3),
    "cap": Feature(4, 1, 16, 16, softcap=2.0),
    "sinks": Feature(4, 2, 16, 16, sinks=True),
    "window and sinks": Feature(8, 1, 64, 64, window=24, sinks=True),
    "all": Feature(6, 2, 24, 20, window=33, softcap=3.0, sinks=True),
}

STEPS = {
    "decodes": [(1, 1), (1, 90), (1, 16), (1, 33)],
    "prefill": [(75, 75)],
    "chunk": [(37, 150)],
    "mixed": [(1, 40), (70, 70), (33, 131), (1, 1), (2, 17), (1, 64), (16, 32)],
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_step_equals_explicit_attention(feature: str, step: str):
    world = World(FEATURES[feature], STEPS[step], padding=2)
    expected, pool = world.reference()
    ours = world.run(TritonAttention())
    torch.testing.assert_close(ours[:-2], expected, atol=TOLERANCE, rtol=0)
    assert ours[-2:].isfinite().all()
    assert torch.equal(world.kv.keys.nan_to_num(99), pool.keys.nan_to_num(99))
    assert torch.equal(world.kv.values.nan_to_num(99), pool.values.nan_to_num(99))


@pytest.mark.parametrize("step", ["decodes", "mixed"])
@pytest.mark.parametrize("feature", ["grouped", "MLA", "narrow window", "all"])
def test_a_padded_step_equals_explicit_attention(feature: str, step: str):
    """Padding rows hold NaN and come out as zero; other steps have used the same room before."""
    world = World(FEATURES[feature], STEPS[step], padding=70)
    expected, pool = world.reference()
    backend = TritonAttention()
    World(FEATURES[feature], [(3, 3)]).run(backend)
    backend.reserve(8, 512, DEVICE)
    other = World(FEATURES[feature], [(1, 3), (90, 90), (1, 40)], padding=3).padded(8, 10)
    for batch in (other, world.padded(8, 10)):
        backend.plan_padded(batch)
    ours = world.run(backend, plan=False)
    torch.testing.assert_close(ours[:-70], expected, atol=TOLERANCE, rtol=0)
    assert (ours[-70:] == 0).all()
    assert torch.equal(world.kv.keys.nan_to_num(99), pool.keys.nan_to_num(99))
    assert torch.equal(world.kv.values.nan_to_num(99), pool.values.nan_to_num(99))


@pytest.mark.parametrize("feature", ["grouped", "MLA", "window", "all"])
def test_tiles_of_half_precision(feature: str):
    """Float16, since Triton's interpreter cannot multiply bfloat16; both have the same tiles."""
    world = World(FEATURES[feature], STEPS["mixed"], torch.float16, padding=1)
    expected, _ = world.reference()
    torch.testing.assert_close(world.run(TritonAttention())[:-1].float(), expected, atol=3e-3, rtol=0)


@pytest.mark.parametrize("feature", ["grouped", "MLA", "all"])
def test_the_torch_backend_equals_explicit_attention(feature: str):
    world = World(FEATURES[feature], STEPS["mixed"])
    expected, _ = world.reference()
    torch.testing.assert_close(world.run(TorchAttention()), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("feature", ["grouped", "all"])
def test_rows_of_prefill_do_not_depend_on_neighbours(feature: str):
    """Alone, and beside others before and behind it that are longer and shorter: equal to the last bit."""
    alone = World(FEATURES[feature], [(70, 110)], names=[5]).run(TritonAttention())
    mixed = World(FEATURES[feature], [(1, 40), (90, 200), (70, 110), (3, 9)], names=[1, 2, 5, 3])
    assert torch.equal(mixed.run(TritonAttention())[91:161], alone)


@pytest.mark.parametrize("feature", ["grouped", "all"])
def test_rows_of_prefill_do_not_depend_on_how_it_is_cut_into_chunks(feature: str):
    whole = World(FEATURES[feature], [(110, 110)]).run(TritonAttention())
    last = World(FEATURES[feature], [(33, 110)]).run(TritonAttention())
    assert torch.equal(whole[-33:], last)


@pytest.mark.parametrize("feature", ["grouped", "all"])
def test_a_decode_does_not_depend_on_its_neighbours(feature: str):
    """Neither on their lengths, and with these the width of the page table, nor on prefills in the step."""
    first = World(FEATURES[feature], [(1, 300), (1, 40)], names=[5, 1]).run(TritonAttention())[0]
    others = World(FEATURES[feature], [(60, 60), (1, 1100), (1, 300)], names=[2, 3, 5])
    assert torch.equal(others.run(TritonAttention())[-1], first)


def test_a_step_is_described_by_one_copy(monkeypatch: pytest.MonkeyPatch):
    """Once layers with groups of four and of one have been seen, a step of both is."""
    copies = []
    upload = triton_attention.upload

    def counted(parts, device):
        copies.append(len(parts))
        return upload(parts, device)

    monkeypatch.setattr(triton_attention, "upload", counted)
    backend = TritonAttention()
    worlds = [World(FEATURES[name], STEPS["mixed"]) for name in ("grouped", "MLA")]
    for expected_copies in (3, 1):
        copies.clear()
        backend.plan(worlds[0].batch)
        for world in worlds:
            expected, _ = world.reference()
            torch.testing.assert_close(world.run(backend, plan=False), expected, atol=TOLERANCE, rtol=0)
        assert len(copies) == expected_copies


def test_work_covers_every_row_once_with_the_longest_first():
    query_lens, context_lens = np.array([70, 3, 129]), np.array([70, 900, 129])
    group, rows = 3, 64
    work = prefill_work(query_lens.astype(np.int32), context_lens.astype(np.int32), group, rows)
    assert sorted(map(tuple, work.tolist())) == [
        (i, tile) for i, length in enumerate(query_lens) for tile in range(-(-length * group // rows))
    ]
    seen = [
        context_lens[i] - query_lens[i] + min(((tile + 1) * rows - 1) // group + 1, query_lens[i]) for i, tile in work
    ]
    assert seen == sorted(seen, reverse=True)
    assert work[0].tolist() == [1, 0]


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256), (576, 512)])
def test_tiles_are_as_large_as_shared_memory_allows(key_dim: int, value_dim: int):
    tile = prefill_tile(key_dim, value_dim, torch.bfloat16, torch.device("cpu"))
    width = key_dim + value_dim
    assert (tile.rows * key_dim + (tile.num_stages + 1) // 2 * tile.keys * width) * 2 < 227 * 1024
    assert tile.keys == (64 if width <= 512 else 16)
