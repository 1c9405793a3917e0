"""The routing of a step: requests, whatever the backend's own segments are."""

import torch

from lorry.lora.batch import LoRABatchInfo, PackedRouting, RequestRouting, int_tensor

CPU = torch.device("cpu")


def info(**extra) -> LoRABatchInfo:
    return LoRABatchInfo(
        bs=2,
        num_segments=2,
        seg_indptr=int_tensor([0, 3, 4], CPU),
        weight_indices=int_tensor([1, -1], CPU),
        token_slots=int_tensor([1, 1, 1, -1], CPU),
        slots=(1,),
        **extra,
    )


def test_without_the_request_pair_the_segments_are_the_requests():
    indptr, slots = info().requests
    assert (indptr.tolist(), slots.tolist()) == ([0, 3, 4], [1, -1])


def test_the_request_pair_comes_first():
    pair = {"req_seg_indptr": int_tensor([0, 1, 4], CPU), "req_weight_indices": int_tensor([-1, 1], CPU)}
    indptr, slots = info(**pair).requests
    assert (indptr.tolist(), slots.tolist()) == ([0, 1, 4], [-1, 1])


def test_half_a_pair_is_no_pair():
    indptr, _ = info(req_seg_indptr=int_tensor([0, 1, 4], CPU)).requests
    assert indptr.tolist() == [0, 3, 4]


def test_token_slots_follow_the_requests():
    packed = PackedRouting.of(RequestRouting((2, 1, 3), (4, -1, 0)))
    assert packed.token_slots.tolist() == [4, 4, -1, 0, 0, 0]


def test_adapter_slots_leave_the_base_out():
    assert RequestRouting((1, 2, 1, 1), (3, -1, 0, 3)).adapter_slots == (0, 3)


def test_w14_padding_belongs_to_the_base():
    packed = PackedRouting.of(RequestRouting((2, 1), (5, 0)), num_padded_tokens=6, padded_bs=4)
    assert packed.token_slots.tolist() == [5, 5, 0, -1, -1, -1]
    assert packed.slots.tolist() == [5, 0, -1, -1]
    assert packed.indptr.tolist() == [0, 2, 3, 4, 6]
