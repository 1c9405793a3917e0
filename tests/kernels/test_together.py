"""Dense backends times experts backends times graphs: each row by its own adapter, whatever was captured.

On a GPU, steps are replayed from graphs that were captured before any adapter was used; without one the same steps
run eagerly in Triton's interpreter, on a small scale.
"""

from functools import partial
from pathlib import Path

import pytest
import torch

from lorry.engine.build import Parts
from lorry.engine.inputs import sampling_rows
from lorry.engine.runner import _routing
from lorry.engine.sequence import ScheduledChunk, Sequence, StepPlan
from lorry.lora.experts.base import make_experts_backend
from lorry.types import BASE_SLOT, EngineRequest, SamplingParams
from tests.adapters import FUSED_EXPERTS, make_peft_adapter
from tests.engines import load_slot, make_parts
from tests.models import random_tokens, tiny_model

pytestmark = pytest.mark.slow

ON_GPU = torch.cuda.is_available()
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
NUM_ADAPTERS = 8 if ON_GPU else 3
TOLERANCE = 0.03 if ON_GPU else 1e-4  # tensor cores round float32 operands to TF32
FACTORY = partial(
    tiny_model, "qwen3_moe", hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2 if ON_GPU else 1
)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("together")
    return [
        make_peft_adapter(
            folder / f"a{i}",
            FACTORY,
            ATTENTION,
            target_parameters=FUSED_EXPERTS,
            rank=[4, 16, 1, 7, 24, 8, 3, 12][i],
            seed=i,
            spread=0.15,
        )
        for i in range(NUM_ADAPTERS)
    ]


def parts_for(dense: str, adapters: list[Path], graphs: bool = ON_GPU) -> tuple[Parts, list[int]]:
    model = FACTORY().cuda() if ON_GPU else FACTORY()
    parts = make_parts(
        model,
        lora_backend=dense,
        attention_backend="triton",
        max_running_requests=16,
        chunked_prefill_size=256,
        lora_memory=2**24,
        disable_cuda_graph=not graphs,
    )
    assert (parts.runner.graphs is not None) == graphs
    return parts, [load_slot(parts, path) for path in adapters]


class Batch:
    """Sequences of unequal lengths by given slots: prefill, then decodes beside the ends of chunks, then decodes."""

    def __init__(self, slots: list[int], seed: int) -> None:
        self.sequences, page = [], 0
        for i, slot in enumerate(slots):
            tokens = random_tokens(5 + (7 * i + seed) % 23, seed=seed + i)[0].tolist()
            request = EngineRequest(request_id=str(i), token_ids=tuple(tokens), params=SamplingParams())
            self.sequences.append(Sequence(request, slot, 0, 1, tokens, pages=[page, page + 1, page + 2]))
            page += 3

    def steps(self) -> list[StepPlan]:
        first = [len(s.token_ids) // 3 if i % 2 else len(s.token_ids) - 2 for i, s in enumerate(self.sequences)]
        ranges = [
            (0, cut, len(s.token_ids) - 1, len(s.token_ids)) for s, cut in zip(self.sequences, first, strict=True)
        ]
        return [
            StepPlan(
                tuple(
                    ScheduledChunk(s, cuts[step], cuts[step + 1] - cuts[step], samples=step == 2)
                    for s, cuts in zip(self.sequences, ranges, strict=True)
                )
            )
            for step in range(3)
        ]


def decode_logits(parts: Parts, batch: Batch) -> torch.Tensor:
    """Logits of the last token of each sequence, by graphs where there are graphs."""
    for plan in batch.steps():
        if parts.runner.graphs is None:
            logits = parts.runner.forward(plan, sampling_rows(plan))
        else:
            assert parts.runner.graphs.fits(plan)
            with torch.inference_mode():
                logits = parts.runner.graphs.replay(plan, _routing(plan))
    return logits.clone()


def mixes(slots: list[int]) -> list[list[int]]:
    """1, 2, 4, 8 and again 1 distinct adapters, base rows among them, in changing order; a base-only step between."""
    rows = [[slots[0]] * 2, [BASE_SLOT, slots[1], slots[0]], [slots[2], BASE_SLOT, slots[0], slots[1], slots[1]]]
    if ON_GPU:
        rows.insert(2, [BASE_SLOT] * 3)
        rows.append([slots[i] for i in (3, 0, 2, 1, 1)] + [BASE_SLOT])
        rows.append([*reversed(slots), BASE_SLOT, slots[3], BASE_SLOT])
    return [*rows, [BASE_SLOT, slots[0]]]


@pytest.mark.parametrize("graphs", [True, False] if ON_GPU else [False])
@pytest.mark.parametrize("experts", ["torch", "merged", "fused"])
@pytest.mark.parametrize("dense", ["torch", "triton", "csgmv"])
def test_each_row_by_its_own_adapter(
    dense: str, experts: str, graphs: bool, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
):
    if dense == experts == "torch":
        pytest.skip("this is the oracle")
    if graphs and "torch" in (dense, experts):
        pytest.skip("the references cannot be captured")
    choose = partial(make_experts_backend, name=experts)
    monkeypatch.setattr("lorry.lora.manager.make_experts_backend", choose)
    parts, slots = parts_for(dense, adapters, graphs)
    monkeypatch.undo()
    monkeypatch.setattr("lorry.lora.manager.make_experts_backend", partial(make_experts_backend, name="torch"))
    oracle = make_parts(FACTORY(), lora_backend="torch", lora_memory=2**24)
    oracle_slots = [load_slot(oracle, path) for path in adapters]
    to_oracle = dict(zip([*slots, BASE_SLOT], [*oracle_slots, BASE_SLOT], strict=True))
    for seed, rows in enumerate(mixes(slots)):
        ours = decode_logits(parts, Batch(rows, seed)).float().cpu()
        expected = decode_logits(oracle, Batch([to_oracle[slot] for slot in rows], seed))
        torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0, msg=lambda m, r=rows: f"rows {r}: {m}")
        base = decode_logits(oracle, Batch([BASE_SLOT] * len(rows), seed))
        for i, slot in enumerate(rows):
            assert slot == BASE_SLOT or (expected[i] - base[i]).abs().max() > 10 * TOLERANCE


def test_base_rows_in_a_mixed_graph_equal_a_base_graph_w11_m20(adapters: list[Path]):
    parts, slots = parts_for("csgmv", adapters)
    alone = decode_logits(parts, Batch([BASE_SLOT] * 4, 3))
    mixed = decode_logits(parts, Batch([BASE_SLOT, slots[0], BASE_SLOT, slots[1]], 3))
    again = decode_logits(parts, Batch([BASE_SLOT] * 4, 3))
    torch.testing.assert_close(mixed[[0, 2]], alone[[0, 2]], atol=TOLERANCE / 10, rtol=0)
    assert torch.equal(alone, again)


def test_l16_reloading_under_captured_graphs(adapters: list[Path]):
    """The same slot filled again and again with other weights of other ranks: each replay sees what is there now."""
    parts, slots = parts_for("csgmv", adapters[:1])
    oracle = make_parts(FACTORY(), lora_memory=2**24)
    for round_, path in enumerate([*adapters[1:], *adapters] * (3 if ON_GPU else 1)):
        parts.lora.unload(slots[0])
        slots = [load_slot(parts, path)]
        slot = load_slot(oracle, path)
        expected = decode_logits(oracle, Batch([slot, BASE_SLOT], round_))
        oracle.lora.unload(slot)
        ours = decode_logits(parts, Batch([slots[0], BASE_SLOT], round_)).float().cpu()
        torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


def assert_equals_oracle(parts: Parts, slots: list[int], paths: list[Path | None], seed: int) -> None:
    """A batch of these slots (None: the base) against an engine of the reference backends."""
    oracle = make_parts(FACTORY(), lora_memory=2**24)
    own = {path: BASE_SLOT if path is None else load_slot(oracle, path) for path in paths}
    expected = decode_logits(oracle, Batch([own[path] for path in paths], seed))
    ours = decode_logits(parts, Batch(slots, seed)).float().cpu()
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


def test_p14_adapters_without_experts_launch_no_lora_on_experts(
    adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = make_peft_adapter(tmp_path / "plain", FACTORY, ATTENTION, rank=5, seed=9, spread=0.15)
    parts, slots = parts_for("csgmv", [*adapters[:1], plain])
    seen, forward = [], parts.lora.experts.forward

    def record(layer, hidden, index, weights, info):
        seen.append(info)
        return forward(layer, hidden, index, weights, info)

    monkeypatch.setattr(parts.lora.experts, "forward", record)
    assert_equals_oracle(parts, [slots[1], BASE_SLOT, slots[1]], [plain, None, plain], 1)
    assert parts.lora.variant == "linear"
    assert bool(seen) == (parts.runner.graphs is None)  # graphs were captured before
    assert set(seen) <= {None}
    assert_equals_oracle(parts, [slots[1], slots[0], BASE_SLOT], [plain, adapters[0], None], 2)
    assert parts.lora.variant == "experts"
    assert None not in seen[-1:]


def test_compacting_under_captured_graphs(adapters: list[Path]):
    """Adapters move in the arena between replays; what they leave behind is NaN."""
    parts, slots = parts_for("csgmv", adapters[:3])
    paths: list[Path | None] = [adapters[2], None, adapters[1]]
    assert_equals_oracle(parts, [slots[2], BASE_SLOT, slots[1]], paths, 1)
    arena = parts.lora.arena
    assert arena is not None
    parts.lora.unload(slots[0])
    arena.compact()
    arena.data[arena.data.numel() - arena.num_free_bytes // arena.dtype.itemsize :] = torch.nan
    assert_equals_oracle(parts, [slots[2], BASE_SLOT, slots[1]], paths, 2)
