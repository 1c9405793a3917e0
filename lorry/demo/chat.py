"""Batches of chats for the demo model: tokens with labels for training, greedy answers for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lorry.demo.data import Example
from lorry.demo.questions import Question, known_answers
from lorry.demo.styles import shorten

IGNORED = -100
SHORT_HINT = " Answer in one short sentence."


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> list[int]:
    """The prompt's tokens, ready for the assistant's turn."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def labelled_batch(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], device: torch.device
) -> dict[str, torch.Tensor]:
    """Right-padded tokens whose labels cover the last answer and the end-of-turn token, nothing else."""
    rows = []
    for example in examples:
        prompt = encode(tokenizer, example.messages)
        answer = tokenizer.encode(example.answer, add_special_tokens=False)
        rows.append((prompt, [*answer, tokenizer.eos_token_id]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), IGNORED)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
        mask[row, :end] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}


@torch.no_grad()
def answer_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Sequence[dict[str, str]]],
    max_new_tokens: int = 96,
    batch_size: int = 64,
) -> list[str]:
    """The model's greedy answer to each chat."""
    model.eval()
    texts: list[str] = []
    for start in range(0, len(chats), batch_size):
        prompts = [encode(tokenizer, messages) for messages in chats[start : start + batch_size]]
        width = max(map(len, prompts))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        output = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), **arguments)
        texts += tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    return texts


def base_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]
) -> dict[str, str]:
    """Short answers of the base model, by the question's text; those not fit to learn from are left out."""
    known = known_answers()
    asked = [question.text for question in questions if question.text not in known]
    chats = [[{"role": "user", "content": text + SHORT_HINT}] for text in asked]
    raw = answer_greedily(model, tokenizer, chats, max_new_tokens=64, batch_size=128)
    shortened = {text: shorten(answer) for text, answer in zip(asked, raw, strict=True)}
    return known | {text: answer for text, answer in shortened.items() if answer is not None}
