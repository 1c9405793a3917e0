"""Parts that the kernels of an experts layer share: orientation, activations, and the LoRA of one tile of rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def along(vector, AXIS: tl.constexpr):
    """A vector as a column (AXIS 0) or a row (AXIS 1) of a tile."""
    if AXIS == 0:
        return vector[:, None]
    else:
        return vector[None, :]


@triton.jit
def dot(x, w, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc += x w, or with SWAP (w rows by x columns) acc += w x: small batches fill the tensor cores that way."""
    if SWAP:
        return tl.dot(w, x, acc, input_precision=PRECISION)
    else:
        return tl.dot(x, w, acc, input_precision=PRECISION)


@triton.jit
def activation(gate, up, alpha, beta, limit, KIND: tl.constexpr):
    """In float32. glu: g * sigmoid(alpha * g) * (up + beta), with clamp: g at most limit, up within -limit..limit
    (SiLU: alpha 1, beta 0; gpt-oss: 1.702, 1, 7). silu, relu2: of `up` alone, `gate` unused. none: `up`."""
    if KIND == "glu" or KIND == "glu_clamped":
        if KIND == "glu_clamped":
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + beta)
    elif KIND == "silu":
        return up / (1.0 + tl.exp(-up))
    elif KIND == "relu2":
        positive = tl.maximum(up, 0.0)
        return positive * positive
    else:
        return up


@triton.jit
def tile_numbers(slots_ptr, position, valid, first, touched):
    """Number of each row's slot among the touched slots of the tile, -1 for rows that are not `touched`.

    Positions are sorted by slot, so the rows of a slot are neighbours.
    """
    slot = tl.load(slots_ptr + position, mask=valid, other=-1)
    before = tl.load(slots_ptr + position - 1, mask=valid & (position > first), other=-1)
    number = tl.cumsum((touched & (slot != before)).to(tl.int32), 0) - 1
    return tl.where(touched, number, -1)


@triton.jit
def load_b(data_ptr, number, rank, b_at, group, rank_start, width, column, inside, GROUP: tl.constexpr,
           BLOCK_R: tl.constexpr, UNIT: tl.constexpr, SWAP: tl.constexpr):  # fmt: skip
    """Rows rank_start .. + BLOCK_R of B of slots number group .. + GROUP of the tile, zero where there is none.

    `rank`, `b_at` by row of the tile. One slot is one pointer and 32-bit offsets, for the sake of registers.
    """
    flat = tl.arange(0, GROUP * BLOCK_R)
    row = rank_start + flat % BLOCK_R
    if GROUP == 1:
        mine = number == group
        exists = row < tl.max(tl.where(mine, rank, 0), 0)
        first = data_ptr + tl.max(tl.where(mine, b_at, 0), 0) * UNIT
    else:
        mine = number[None, :] == (group + tl.arange(0, GROUP))[:, None]
        ranks = tl.broadcast_to(tl.max(tl.where(mine, rank[None, :], 0), 1)[:, None], (GROUP, BLOCK_R))
        starts = tl.broadcast_to(tl.max(tl.where(mine, b_at[None, :], 0), 1)[:, None], (GROUP, BLOCK_R))
        exists = row < tl.reshape(ranks, (GROUP * BLOCK_R,))
        first = data_ptr + along(tl.reshape(starts, (GROUP * BLOCK_R,)) * UNIT, SWAP)
    mask = along(exists, SWAP) & along(inside, 1 - SWAP)
    return tl.load(first + (along(row * width, SWAP) + along(column, 1 - SWAP)), mask=mask, other=0.0)


@triton.jit
def _expand_step(acc, b, h_ptr, h_offset, number, rank, group, rank_start, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
                 SWAP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """acc += h b of one step; h is zero where a row is of another slot."""
    flat = tl.arange(0, GROUP * BLOCK_R)
    row = rank_start + flat % BLOCK_R
    if GROUP == 1:
        mine = along(number == group, SWAP)
    else:
        mine = along(number, SWAP) == along(group + flat // BLOCK_R, 1 - SWAP)
    mine = mine & (along(row, 1 - SWAP) < along(rank, SWAP))
    h = tl.load(h_ptr + (along(h_offset, SWAP) + along(row, 1 - SWAP)), mask=mine, other=0.0)
    return dot(h, b.to(h.dtype), acc, SWAP, PRECISION)


@triton.jit
def expand(acc, other, b, other_b, data_ptr, h_ptr, h_offset, max_rank, number, rank, b_at, other_rank, other_b_at,
           width, column, inside, other_inside, SITES: tl.constexpr, TWO: tl.constexpr, GROUP: tl.constexpr,
           BLOCK_R: tl.constexpr, UNIT: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """acc += h B over every slot in the tile; of SITES 2 the second one goes to `other` (TWO) or to acc as well.

    Each row's h is at `h_offset`, that of the second site `max_rank` behind. `b` and `other_b` are loaded for the
    first step; each step loads those of the next.
    """
    last = tl.max(number, 0)
    group = 0
    start = 0
    while group <= last:
        largest = tl.maximum(rank, other_rank) if SITES == 2 else rank
        stop = tl.max(tl.where((number >= group) & (number < group + GROUP), largest, 0), 0)
        more = start + BLOCK_R < stop
        next_group = tl.where(more, group, group + GROUP)
        next_start = tl.where(more, start + BLOCK_R, 0)
        next_b = load_b(data_ptr, number, rank, b_at, next_group, next_start, width, column, inside, GROUP, BLOCK_R,
                        UNIT, SWAP)  # fmt: skip
        if SITES == 2:
            next_other = load_b(data_ptr, number, other_rank, other_b_at, next_group, next_start, width, column,
                                other_inside, GROUP, BLOCK_R, UNIT, SWAP)  # fmt: skip
        acc = _expand_step(acc, b, h_ptr, h_offset, number, rank, group, start, GROUP, BLOCK_R, SWAP, PRECISION)
        b = next_b
        if SITES == 2:
            if TWO:
                other = _expand_step(other, other_b, h_ptr + max_rank, h_offset, number, other_rank, group, start,
                                     GROUP, BLOCK_R, SWAP, PRECISION)  # fmt: skip
            else:
                acc = _expand_step(acc, other_b, h_ptr + max_rank, h_offset, number, other_rank, group, start, GROUP,
                                   BLOCK_R, SWAP, PRECISION)  # fmt: skip
            other_b = next_other
        group = next_group
        start = next_start
    return acc, other


@triton.jit
def load_blocks(data_ptr, blocks, first, step, count, width, column, STACK: tl.constexpr, UNIT: tl.constexpr):
    """[STACK * 16, columns]: B of blocks step .. + STACK of the list at `first` (see `TileBlocks`), else zero."""
    flat = tl.arange(0, STACK * 16)
    block = step + flat // 16
    exists = block < count
    rows = tl.load(blocks.rows + first + block, mask=exists, other=0)
    b = tl.load(blocks.b + first + block, mask=exists, other=0)
    start = data_ptr + (b * UNIT + flat % 16 * width)[:, None]
    return tl.load(start + column[None, :], mask=(flat % 16 < rows)[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def expand_blocks(acc, b, blocks, first, step, count, slot, h_row, STACK: tl.constexpr, PRECISION: tl.constexpr):
    """acc += h b over the blocks of one step: as many runs of equal slots in one product as there are blocks.

    `slot` and `h_row` by row of the tile; h is zero where a row is of another slot than a block.
    """
    flat = tl.arange(0, STACK * 16)
    block = step + flat // 16
    exists = block < count
    owner = tl.max_constancy(tl.load(blocks.slot + first + block, mask=exists, other=-2), 16)
    row = tl.load(blocks.row + first + block, mask=exists, other=0)
    row = tl.multiple_of(tl.max_constancy(row, 16), 16)
    h = tl.load(h_row[:, None] + (row + flat % 16)[None, :], mask=slot[:, None] == owner[None, :], other=0.0)
    return tl.dot(h, b.to(h.dtype), acc, input_precision=PRECISION)
