"""Which rows a program works on, in kernels that take all rows of a step, those of adapters by segment."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from lorry.kernels.dense_kernels import rows_at

BASE_TILES = 4
"""In a step with LoRA a program for base rows looks at so many tiles, since most often there are none."""

_BASE_TILES = tl.constexpr(BASE_TILES)


@triton.jit
def tile_of_rows(group, tile, num_tiles, num_rows, num_segments, lora, LORA: tl.constexpr, BLOCK_M: tl.constexpr):
    """(slot, start, stop, step): tiles of BLOCK_M positions from start on, every `step`.

    With LoRA the first `num_segments` groups have the segments (none for slot -1), the others all rows in their
    order, of which only those of the base count.
    """
    slot = tl.full([], -1, tl.int32)
    start = (group * num_tiles + tile) * BLOCK_M
    stop = tl.minimum(start + BLOCK_M, num_rows)
    step = num_tiles * BLOCK_M
    if LORA:
        if group < num_segments:
            slot = tl.load(lora[7] + group)
            start = tl.load(lora[6] + group) + tile * BLOCK_M
            stop = tl.where(slot < 0, start, tl.load(lora[6] + group + 1))
        else:
            start = (start - num_segments * step) * _BASE_TILES
            step = step // num_tiles
            positions = start + tl.arange(0, _BASE_TILES * BLOCK_M)
            slots = tl.load(lora[9] + positions, mask=positions < num_rows, other=0)
            stop = tl.where(tl.min(slots, 0) < 0, tl.minimum(start + _BASE_TILES * BLOCK_M, num_rows), start)
    return slot, start, stop, step


@triton.jit
def rows_of_tile(positions, stop, slot, lora, LORA: tl.constexpr, HAS_PERMUTATION: tl.constexpr):
    """(rows, which of them there are) of a tile of `tile_of_rows`."""
    row = positions
    ok = positions < stop
    if LORA:
        if slot < 0:
            ok = ok & (tl.load(lora[9] + positions, mask=ok, other=0) < 0)
        else:
            row, ok = rows_at(positions, stop, lora[8], HAS_PERMUTATION)
    return row, ok
