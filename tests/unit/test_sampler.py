"""Sampling: each filter against its definition, seeds, penalties and log probabilities."""

import math

import msgspec
import numpy as np
import pytest
import torch

from lorry.engine.draws import draw, uniforms
from lorry.engine.sampler import Sampled, Sampler
from lorry.engine.sequence import ScheduledChunk, Sequence
from lorry.errors import InvalidRequest
from lorry.types import BASE_SLOT, EngineRequest, SamplingParams

LOGITS = torch.tensor([0.5, 3.0, 2.0, -1.0, 2.5, 0.0])


def sequence(prompt: tuple[int, ...] = (0,), output: tuple[int, ...] = (), seed: int = 1, **params) -> Sequence:
    request = EngineRequest(request_id="r", token_ids=prompt, params=SamplingParams(**params))
    return Sequence(request, BASE_SLOT, seed, 99, [*prompt, *output])


def sample(logits: torch.Tensor, sequences: list[Sequence], sampler: Sampler | None = None) -> Sampled:
    """Sample behind all known tokens of each sequence."""
    chunks = [ScheduledChunk(s, len(s.token_ids) - 1, 1, samples=True) for s in sequences]
    sampler = sampler or Sampler(len(chunks), logits.device)
    return sampler.launch(logits, chunks).read()


def draws(num: int = 400, **params) -> torch.Tensor:
    """Frequencies of each token over `num` seeds."""
    sequences = [sequence(seed=seed, **params) for seed in range(num)]
    tokens = sample(LOGITS.expand(num, -1), sequences).token_ids
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / num


def test_temperature_zero_is_greedy():
    assert sample(LOGITS[None], [sequence(temperature=0)]).token_ids == [1]


def test_frequencies_follow_the_softmax_at_temperature():
    expected = (LOGITS / 1.7).softmax(0)
    assert (draws(4000, temperature=1.7) - expected).abs().max() < 0.03


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {1, 4}),
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.6}, {1, 4}),
        ({"min_p": 0.5}, {1, 4}),
        ({"top_k": 3, "top_p": 0.9}, {1, 4, 2}),
        ({"top_k": 1}, {1}),
    ],
)
def test_filters_keep_what_they_say(params, allowed):
    frequencies = draws(**params)
    assert set(frequencies.nonzero().flatten().tolist()) == allowed


def test_a_seed_gives_the_same_token_in_any_batch_and_others_at_other_positions():
    alone = sample(LOGITS[None], [sequence(seed=5)]).token_ids[0]
    among = sample(LOGITS.expand(3, -1), [sequence(seed=s) for s in (4, 5, 6)]).token_ids[1]
    assert alone == among
    positions = [sample(LOGITS[None], [sequence(output=(9,) * i, seed=5)]).token_ids[0] for i in range(30)]
    assert len(set(positions)) > 1


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    penalised = sequence(prompt=(1, 3), temperature=0, repetition_penalty=2.0)
    assert sample(LOGITS[None], [penalised]).token_ids == [4]
    assert sample(-LOGITS[None].abs(), [sequence(prompt=(5,), temperature=0, repetition_penalty=2.0)]).token_ids == [
        5
    ]


def test_presence_and_frequency_count_output_only():
    prompt_only = sequence(prompt=(1, 1, 1), temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    assert sample(LOGITS[None], [prompt_only]).token_ids == [1]
    assert sample(LOGITS[None], [sequence(output=(1,), temperature=0, presence_penalty=0.6)]).token_ids == [4]
    assert sample(LOGITS[None], [sequence(output=(1,), temperature=0, frequency_penalty=0.4)]).token_ids == [1]
    assert sample(LOGITS[None], [sequence(output=(1, 1), temperature=0, frequency_penalty=0.4)]).token_ids == [4]


def test_logprobs_are_of_the_raw_distribution():
    wanted = sequence(temperature=0, logprobs=3, repetition_penalty=5.0, prompt=(1,))
    result = sample(LOGITS[None], [wanted])
    expected = LOGITS.log_softmax(0)
    logprobs = result.logprobs[0]
    assert logprobs is not None
    assert math.isclose(logprobs.logprob, expected[result.token_ids[0]].item(), abs_tol=1e-6)
    assert [token for token, _ in logprobs.top] == [1, 4, 2]
    assert sample(LOGITS[None], [sequence(logprobs=0)]).logprobs[0].top == ()


WAYS = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": -0.3},
    {"temperature": 0.9, "repetition_penalty": 0.8, "frequency_penalty": 1.1, "top_p": 0.9},
]


def by_definition(logits: torch.Tensor, s: Sequence) -> int:
    """One token in plain Python, as the parameters are defined; the draw is in the order that the sampler uses."""
    p = s.params
    x = [v.item() for v in logits]
    for token in set(s.token_ids):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(s.output_ids):
        x[token] -= p.frequency_penalty * s.output_ids.count(token) + p.presence_penalty
    if p.temperature == 0:
        return max(range(len(x)), key=lambda token: (x[token], -token))
    weights = [math.exp((v - max(x)) / p.temperature) for v in x]
    order = sorted(range(len(x)), key=lambda token: (-weights[token], token))
    kept = order[: p.top_k] if p.top_k > 0 else order
    mass, total = 0.0, sum(weights[token] for token in kept)
    nucleus = []
    for token in kept:
        if mass < p.top_p * total:
            nucleus.append(token)
        mass += weights[token]
    nucleus = [token for token in nucleus if weights[token] >= p.min_p * weights[order[0]]]
    if p.top_k <= 0 and p.top_p == 1.0:
        nucleus.sort()
    target = uniforms([s.seed], [len(s.output_ids)])[0] * sum(weights[token] for token in nucleus)
    for token in nucleus:
        target -= weights[token]
        if target < 0:
            return token
    return nucleus[-1]


def mixed(num: int, vocab: int) -> tuple[torch.Tensor, list[Sequence]]:
    """Rows of all ways, and their logits."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(num, vocab, generator=generator)
    history = torch.randint(0, vocab, (num, 12), generator=generator).tolist()
    return logits, [
        sequence(
            tuple(h[:5]), tuple(h[5:] + h[5:8]), seed=i, logprobs=i % 4 if i % 3 == 0 else None, **WAYS[i % len(WAYS)]
        )
        for i, h in enumerate(history)
    ]


@pytest.mark.parametrize("vocab", [50, 128, 1000])
def test_every_way_is_as_defined(vocab):
    logits, sequences = mixed(9 * 40, vocab)
    expected = [by_definition(row, s) for row, s in zip(logits, sequences, strict=True)]
    assert sample(logits, sequences).token_ids == expected


def test_a_row_is_the_same_in_any_batch_to_the_bit():
    logits, sequences = mixed(9 * 40, 300)
    together = sample(logits, sequences)
    for i in range(0, len(sequences), 7):
        alone = sample(logits[i : i + 1], sequences[i : i + 1])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_a_token_that_is_still_pending_is_penalised_like_a_known_one():
    """Rows 0 and 2 take the token from the step before, in rows 2 and 0 of what it sampled."""
    ways = [
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {},
        {"repetition_penalty": 3.0},
        {"presence_penalty": 1},
    ]
    known = [sequence((1, 2), (3, 4, token), temperature=0, **w) for token, w in zip((1, 9, 4, 5), ways, strict=True)]
    logits = torch.linspace(3, 2, 4 * 6).view(4, 6).flip(1).roll(2, 1)
    logits[0, 1] = logits[2, 4] = 3.5
    logits[0, 3] = 3.6
    before = Sampler(4, logits.device)
    before.launch(torch.eye(6)[[4, 0, 1]], [ScheduledChunk(sequence(temperature=0), 0, 1, samples=True)] * 3)
    chunks = []
    for one, source in zip(known, (2, -1, 0, -1), strict=True):
        pending = (
            one
            if source < 0
            else sequence((1, 2), tuple(one.output_ids[:-1]), **msgspec.structs.asdict(one.params) | {"seed": 1})
        )
        chunks.append(ScheduledChunk(pending, 4, 1, samples=True, source=source))
    expected = sample(logits, known).token_ids
    assert before.launch(logits, chunks).read().token_ids == expected
    unpenalised = logits.argmax(-1).tolist()
    assert expected[0] != unpenalised[0]
    assert expected[2] != unpenalised[2]


def test_a_draw_never_takes_what_has_no_probability():
    p = torch.zeros(4, 700)
    p[0, [130, 131]] = torch.tensor([1e-30, 1.0])
    p[1, 699] = 1e-20
    p[2, 0] = 1.0
    p[3, [127, 128, 255]] = 1 / 3
    for u in (0.0, 1 / 3, 0.5, 2 / 3, 1 - 2**-53):
        places = draw(p, torch.full((4,), u, dtype=torch.float64))
        assert (p.gather(1, places[:, None]) > 0).all()


def test_uniforms_are_even_and_of_seed_and_position_alone():
    numbers = uniforms(list(range(-2000, 2000)), [0] * 4000)
    assert 0 <= numbers.min() <= numbers.max() < 1
    counts = np.histogram(numbers, bins=16, range=(0, 1))[0]
    assert ((counts - 250) ** 2 / 250).sum() < 40
    along = uniforms([7] * 4000, list(range(4000)))
    assert ((np.histogram(along, bins=16, range=(0, 1))[0] - 250) ** 2 / 250).sum() < 40
    assert abs(np.corrcoef(along[1:], along[:-1])[0, 1]) < 0.06
    assert uniforms([3, -(2**63), 2**63 - 1], [5, 1, 0])[0] == uniforms([3], [5])[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("n", 0),
        ("logprobs", 21),
        ("stop", ("",)),
        ("seed", 2**63),
        ("frequency_penalty", 3.0),
        ("temperature", math.nan),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(InvalidRequest, match=f"{field} is") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
