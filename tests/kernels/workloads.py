"""The words for mixes of adapters in a batch, shared by all kernel tests and benchmarks."""

from __future__ import annotations

import random
from typing import Literal, get_args

from lorry.lora.batch import RequestRouting
from lorry.types import BASE_SLOT

Mix = Literal["distinct", "uniform", "zipf", "identical", "skewed"]

MIXES: tuple[Mix, ...] = get_args(Mix)


def request_slots(mix: Mix, bs: int, num_slots: int, base: bool, seed: int = 0) -> tuple[int, ...]:
    """Slot of each request. `base`: about a third of them, at least one of several, have none (-1).

    distinct: as many adapters as there are, in turn. uniform: drawn evenly. zipf: the k-th with weight 1 / k.
    identical: one adapter. skewed: one adapter has all requests but every eighth. In random order.
    """
    draw = random.Random(f"{mix} {bs} {num_slots} {base} {seed}")
    everyone = list(range(num_slots))
    draw.shuffle(everyone)
    match mix:
        case "distinct":
            slots = [everyone[i % num_slots] for i in range(bs)]
        case "uniform":
            slots = [draw.choice(everyone) for _ in range(bs)]
        case "zipf":
            slots = draw.choices(everyone, [1 / (k + 1) for k in range(num_slots)], k=bs)
        case "identical":
            slots = [everyone[0]] * bs
        case "skewed":
            slots = [everyone[0] if i % 8 else draw.choice(everyone) for i in range(bs)]
    if base and bs > 1:
        for i in draw.sample(range(bs), max(1, bs // 3)):
            slots[i] = BASE_SLOT
    draw.shuffle(slots)
    return tuple(slots)


def routing(mix: Mix, num_tokens: int, num_slots: int, base: bool, seq_len: int = 1, seed: int = 0) -> RequestRouting:
    """`num_tokens` rows of that mix; requests of unequal lengths around `seq_len`, of one row each where it is 1."""
    draw = random.Random(f"{num_tokens} {seq_len} {seed}")
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        length = 1 if seq_len == 1 else draw.randint(1, 2 * seq_len - 1)
        lengths.append(min(length, num_tokens - sum(lengths)))
    return RequestRouting(tuple(lengths), request_slots(mix, len(lengths), num_slots, base, seed))
