"""Whether a request's greedy answer is the same alone and in a batch: the demo's model, its adapters, its questions.

    python -m bench.equality --out bench/results/equality.jsonl

Each request runs alone, then all of them in batches of random size and composition, base and adapters mixed. Where an
answer parts from the one given alone, the two tokens are compared by the log probabilities that each run gave them:
rounding can only part what is about equal. Prints what parted, and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from lorry import demo
from lorry.demo import questions
from lorry.demo.model import prepare
from lorry.engine.llm import LLM, Completion
from lorry.types import SamplingParams


class Asked(NamedTuple):
    """A prompt and its adapter (None: the base)."""

    prompt: tuple[int, ...]
    adapter: str | None


class Parted(NamedTuple):
    """Where an answer parted, and how much likelier each run found its own token than the other's, in nats."""

    request: int
    position: int
    gap_alone: float
    gap_in_batch: float


def all_questions() -> list[str]:
    """Every question that the demo's templates give."""
    forms = [
        (questions.DEFINITION_FORMS, questions.THINGS),
        (questions.HOWTO_FORMS, questions.TASKS),
        (questions.CAPITAL_FORMS, tuple(questions.CAPITALS)),
    ]
    return [form.format(x=subject) for group, subjects in forms for form in group for subject in subjects]


def requests(llm: LLM, count: int, rng: random.Random) -> list[Asked]:
    """`count` different pairs of a question, some of them behind another one, and an adapter."""
    texts, names = all_questions(), [None, *llm.engine.adapters]
    pairs = rng.sample([(text, name) for text in texts for name in names], count)
    asked = []
    for text, name in pairs:
        longer = " ".join([*rng.sample(texts, rng.randrange(8)), text])
        ids = llm.tokenizer.render_chat([{"role": "user", "content": longer}])
        asked.append(Asked(tuple(llm.tokenizer.encode(ids) if isinstance(ids, str) else ids), name))
    return asked


def answers(llm: LLM, asked: Sequence[Asked], params: SamplingParams) -> list[Completion]:
    outputs = llm.generate([item.prompt for item in asked], params, [item.adapter for item in asked])
    return [output.outputs[0] for output in outputs]


def compare(request: int, alone: Completion, batched: Completion) -> Parted | None:
    """None where the tokens are the same."""
    if alone.token_ids == batched.token_ids:
        return None
    pairs = zip(alone.token_ids, batched.token_ids, strict=False)
    position = next(i for i, (a, b) in enumerate(pairs) if a != b)
    own, other = alone.token_ids[position], batched.token_ids[position]
    gaps = []
    for run, chosen, rejected in ((alone, own, other), (batched, other, own)):
        found = run.logprobs[position]
        top = dict(found.top)
        gaps.append(found.logprob - top.get(rejected, float("-inf")))
        assert chosen in top
    return Parted(request, position, *gaps)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer (default: 24)")
    parser.add_argument("--largest-batch", type=int, default=64)
    parser.add_argument("--commit", help="what the code is, where it is not a git checkout")
    parser.add_argument("--out", type=Path, help="file to which the line of JSON is appended")
    args = parser.parse_args(argv)
    rng = random.Random(0)
    folder = str(prepare(progress=lambda text: print(text, flush=True)))
    adapters = {name: str(path) for name, path in demo.adapter_paths().items()}
    llm = LLM(
        folder,
        adapters,
        lambda text: print(text, flush=True),
        dtype="bfloat16",
        disable_radix_cache=True,
        max_running_requests=args.largest_batch,
        chunked_prefill_size=2048,
    )
    asked = requests(llm, args.requests, rng)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, logprobs=4)
    start = time.perf_counter()
    alone = [answers(llm, [item], params)[0] for item in asked]
    print(f"{len(asked)} requests alone: {time.perf_counter() - start:.1f} s", flush=True)
    order = rng.sample(range(len(asked)), len(asked))
    batched: dict[int, Completion] = {}
    while order:
        size = rng.randint(2, args.largest_batch)
        some, order = order[:size], order[size:]
        batched |= zip(some, answers(llm, [asked[i] for i in some], params), strict=True)
    found = [compare(i, completion, batched[i]) for i, completion in enumerate(alone)]
    parted = [item for item in found if item is not None]
    for item in parted:
        print(
            f"request {item.request} ({asked[item.request].adapter or 'base'}) parts at token {item.position}, where"
        )
        print(f"  its own token led by {item.gap_alone:.4f} alone and by {item.gap_in_batch:.4f} in the batch")
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    gaps = [max(item.gap_alone, item.gap_in_batch) for item in parted]
    record = {
        "benchmark": "equality",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else f"none ({platform.machine()})",
        "commit": args.commit or git.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "requests": len(asked),
        "tokens": sum(len(completion.token_ids) for completion in alone),
        "equal": len(asked) - len(parted),
        "largest_gap": round(max(gaps, default=0.0), 4),
        "median_gap": round(statistics.median(gaps), 4) if gaps else 0.0,
    }
    print(json.dumps(record))
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
