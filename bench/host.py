"""What a decode step costs the host: planning, packing, routing, launching the sampler, reading tokens. No model.

    python -m bench.host [--device cuda] [--vocab 151936] [--context 1024] [--temperature 0.8] [--top-p 0.9]

The engine's own loop runs; in place of the model there are logits that never change. On a CPU, which also computes
what is launched, a small vocabulary keeps that small. Microseconds per step, median over steps.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the routing is packed by the backend that CUDA has

from lorry.config import PAGE_SIZE, EngineConfig
from lorry.engine.build import Parts
from lorry.engine.engine import Engine
from lorry.engine.inputs import FixedInputs
from lorry.engine.runner import LaunchedStep
from lorry.engine.sampler import Sampler
from lorry.engine.scheduler import Scheduler
from lorry.engine.sequence import StepPlan
from lorry.kv.prefix import PagePool
from lorry.lora.arena import Arena
from lorry.lora.backends.base import make_dense_backend
from lorry.lora.batch import RequestRouting
from lorry.types import EngineRequest, SamplingParams

PARTS = ("schedule", "pack", "route", "sample", "read", "rest")


class Clock:
    """Adds up the time of named parts, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            self.steps[-1][name] += time.perf_counter() - start
            return result

        return wrapper

    def next_step(self) -> None:
        self.steps.append(dict.fromkeys((*PARTS, "total"), 0.0))

    def median(self, name: str) -> float:
        """Microseconds, without the first quarter of the steps."""
        return statistics.median(step[name] for step in self.steps[len(self.steps) // 4 :]) * 1e6


class Runner:
    """The host's part of `ModelRunner` on decode steps by graph."""

    def __init__(self, clock: Clock, batch: int, args: argparse.Namespace) -> None:
        device = torch.device(args.device)
        self._logits = torch.randn(batch, args.vocab, device=device)
        self._sampler = Sampler(batch, device)
        inputs = FixedInputs(self._sampler.tokens, batch, args.max_context // PAGE_SIZE)
        lora = make_dense_backend("csgmv", Arena((), 2**10, 8, torch.bfloat16, device), device)
        lora.init_cuda_graph_batch_info(batch, batch)
        self._pack = clock.timed("pack", inputs.fill)
        self._route = clock.timed("route", lora.prepare_lora_batch)
        self._sample = clock.timed("sample", self._sampler.launch)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        chunks = plan.chunks
        if all(chunk.num_tokens == 1 for chunk in chunks):
            self._pack(plan, len(self._logits))
            slots = tuple(i % 8 for i in range(len(chunks)))
            self._route(RequestRouting((1,) * len(chunks), slots), len(self._logits))
        sampling = plan.sampling
        return LaunchedStep(plan, self._sample(self._logits[: len(sampling)], sampling))


def measure(batch: int, args: argparse.Namespace) -> Clock:
    clock = Clock()
    pages = batch * -(-(args.context + args.steps + PAGE_SIZE) // PAGE_SIZE)
    scheduler = Scheduler(PagePool(pages, PAGE_SIZE), batch, batch * args.context)
    embeddings = SimpleNamespace(weight=torch.empty(args.vocab, 0))
    model = SimpleNamespace(get_input_embeddings=lambda: embeddings)
    fakes: dict[str, Any] = {  # all that is needed of each
        "loaded": SimpleNamespace(model=model),
        "lora": SimpleNamespace(arena=None),
        "runner": Runner(clock, batch, args),
        "info": SimpleNamespace(context_length=args.max_context, eos_token_ids=(0,)),
    }
    engine = Engine(EngineConfig(model="none"), parts=Parts(sites=(), scheduler=scheduler, **fakes))
    schedule, launched = scheduler.schedule, scheduler.launched
    scheduler.schedule = clock.timed("schedule", schedule)  # type: ignore[method-assign]
    scheduler.launched = clock.timed("schedule", launched)  # type: ignore[method-assign]
    engine._read = clock.timed("read", engine._read)  # type: ignore[method-assign]
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        max_tokens=args.steps,
        ignore_eos=True,
        seed=1,
    )
    rng = random.Random(0)
    for i in range(batch):
        tokens = tuple(rng.randrange(args.vocab) for _ in range(args.context))
        engine.add_request(EngineRequest(request_id=str(i), token_ids=tokens, params=params))
    while engine.has_work:
        clock.next_step()
        start = time.perf_counter()
        engine.step()
        step = clock.steps[-1]
        step["total"] = time.perf_counter() - start
        step["rest"] = step["total"] - sum(step[part] for part in PARTS)
    return clock


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocab", type=int, default=151936 if torch.cuda.is_available() else 256)
    parser.add_argument("--context", type=int, default=1024, help="tokens in each prompt (default: 1024)")
    parser.add_argument("--max-context", type=int, default=40960, help="what the page table has room for")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=300, help="tokens of each answer (default: 300)")
    args = parser.parse_args(argv)
    print("batch", *(f"{part:>9}" for part in (*PARTS, "total")))
    for batch in args.batch:
        clock = measure(batch, args)
        print(f"{batch:5}", *(f"{clock.median(part):9.0f}" for part in (*PARTS, "total")))


if __name__ == "__main__":
    main()
