"""Train the demo adapters with PEFT: `python -m lorry.demo.train [--adapters NAME ...] [--out DIR]`."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lorry.demo.chat import answer_greedily, base_answers, labelled_batch
from lorry.demo.data import CHECKS, Example, held_out_examples, training_examples
from lorry.demo.export import WEIGHTS_NAME, save_adapter
from lorry.demo.model import prepare
from lorry.demo.questions import HELD_OUT, training_questions
from lorry.demo.recipes import RECIPES, Recipe

WARMUP_STEPS = 10
LOG_EVERY = 20
NUM_SAMPLES = 6


@dataclass(frozen=True)
class Sample:
    prompt: str
    base: str
    adapter: str


@dataclass(frozen=True)
class Report:
    """Held-out loss, and the share of held-out answers that show the behaviour, without and with the adapter."""

    name: str
    num_parameters: int
    num_held_out: int
    loss_base: float
    loss_adapter: float
    shown_base: float
    shown_adapter: float
    samples: list[Sample]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lorry.demo.train", description=__doc__)
    parser.add_argument("--adapters", nargs="+", choices=sorted(RECIPES), default=list(RECIPES), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("demo-adapters"), help="one folder per adapter goes here")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=int, help="optimiser steps for each adapter instead of the recipe's")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--only-report", action="store_true", help="train nothing, judge the adapters in --out")
    options = parser.parse_args(arguments)

    device = torch.device(pick_device(options.device))
    torch.set_float32_matmul_precision("high")
    folder = prepare(progress=print)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    base.to(device)
    print(f"asking the base model on {device} for its answers", flush=True)
    questions = [*HELD_OUT] if options.only_report else [*HELD_OUT, *training_questions()]
    answers = base_answers(base, tokenizer, questions)
    for name in options.adapters:
        adapter_folder = options.out / name
        if not options.only_report:
            examples = training_examples(name, answers)
            base = train(name, base, tokenizer, examples, adapter_folder, options.steps, options.batch_size)
        report = judge(name, base, tokenizer, held_out_examples(name, answers), adapter_folder)
        (adapter_folder / "report.json").write_text(json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n")
        show(report)


def pick_device(choice: str) -> str:
    if choice == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return choice


def show(report: Report) -> None:
    print(f"{report.name}: {report.num_parameters:,} parameters")
    print(f"  held-out loss {report.loss_base:.3f} -> {report.loss_adapter:.3f}")
    print(f"  behaviour shown {report.shown_base:.0%} -> {report.shown_adapter:.0%}")
    for sample in report.samples:
        print(f"  > {sample.prompt}\n    base:    {sample.base!r}\n    adapter: {sample.adapter!r}", flush=True)


def train(
    name: str,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    folder: Path,
    steps: int | None = None,
    batch_size: int = 16,
) -> PreTrainedModel:
    """Train one adapter and save it into `folder`; the base comes back as it was."""
    recipe = RECIPES[name]
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(**recipe.lora_arguments()))
    fit(name, model, tokenizer, examples, recipe, recipe.steps if steps is None else steps, batch_size)
    save_adapter(name, model, folder, recipe.per_expert_keys)
    return model.unload()


def judge(
    name: str, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], folder: Path
) -> Report:
    """Compare the base with the adapter as it was saved in `folder`, on held-out examples."""
    chats = [example.messages for example in examples]
    loss_base = mean_loss(base, tokenizer, examples)
    said_base = answer_greedily(base, tokenizer, chats)
    model = PeftModel.from_pretrained(base, folder)
    model.merge_adapter()  # otherwise every step would add the experts' LoRA to the whole weights again
    loss_adapter = mean_loss(model, tokenizer, examples)
    said_adapter = answer_greedily(model, tokenizer, chats)
    model.unmerge_adapter()
    model.unload()
    prompts = [messages[-1]["content"] for messages in chats]
    samples = [Sample(*texts) for texts in zip(prompts, said_base, said_adapter, strict=True)]
    return Report(
        name=name,
        num_parameters=sum(tensor.numel() for tensor in load_file(folder / WEIGHTS_NAME).values()),
        num_held_out=len(examples),
        loss_base=round(loss_base, 4),
        loss_adapter=round(loss_adapter, 4),
        shown_base=share_shown(name, said_base),
        shown_adapter=share_shown(name, said_adapter),
        samples=samples[:: math.ceil(len(samples) / NUM_SAMPLES)],
    )


def fit(
    name: str,
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    recipe: Recipe,
    num_steps: int,
    batch_size: int,
) -> None:
    """AdamW with a linear warm-up and a cosine decay; every example once before any comes again."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    rng = random.Random(0)
    queue: list[Example] = []
    model.train()
    for step in range(num_steps):
        while len(queue) < batch_size:
            queue += rng.sample(list(examples), len(examples))
        batch, queue = queue[:batch_size], queue[batch_size:]
        warm = min(1.0, (step + 1) / WARMUP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * warm * (0.05 + 0.475 * (1 + math.cos(math.pi * step / num_steps)))
        loss = model(**labelled_batch(tokenizer, batch, model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % LOG_EVERY == 0 or step + 1 == num_steps:
            print(f"{name}: step {step + 1}/{num_steps}, loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def mean_loss(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]
) -> float:
    """Mean over the examples of the loss per answer token."""
    model.eval()
    losses = [float(model(**labelled_batch(tokenizer, [example], model.device)).loss) for example in examples]
    return sum(losses) / len(losses)


def share_shown(name: str, texts: Sequence[str]) -> float:
    return sum(CHECKS[name](text) for text in texts) / len(texts)


if __name__ == "__main__":
    main()
