"""Sampling: each filter against its definition, seeds, penalties and log probabilities."""

import math

import pytest
import torch

from lorry.engine.sampler import sample
from lorry.engine.sequence import Sequence
from lorry.errors import InvalidRequest
from lorry.types import BASE_SLOT, EngineRequest, SamplingParams

LOGITS = torch.tensor([0.5, 3.0, 2.0, -1.0, 2.5, 0.0])


def sequence(prompt: tuple[int, ...] = (0,), output: tuple[int, ...] = (), seed: int = 1, **params) -> Sequence:
    request = EngineRequest(request_id="r", token_ids=prompt, params=SamplingParams(**params))
    return Sequence(request, BASE_SLOT, seed, 99, [*prompt, *output])


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
