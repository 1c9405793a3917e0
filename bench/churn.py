"""What it costs that adapters come and go: more of them than the device has room for, requests at random times.

    python -m bench.churn --adapters 6 --room 3              Llama-3.1-8B's shape, 512 tokens in and out, 4 requests/s
    python -m bench.churn --adapters 6 --room 3 --drain 2    the same with --lora-drain-wait-threshold 2
    python -m bench.churn --adapters 500 --room 32 --mix zipf

The same requests arrive twice: with room for all adapters, then with the room given; the others are then in the
host's memory. For each a line of JSON: time to first token and the gaps between tokens (p50, p90, p99) and time
to the last token (mean, p90), in milliseconds; evictions, copies, drains. The engine alone, without HTTP.

`--workload tiny` tries the script out on a CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.engine import WORKLOADS, write_config
from lorry.config import EngineConfig
from lorry.engine.adapters import PreparedAdapter
from lorry.engine.engine import Engine
from lorry.lora.card import AdapterCard
from lorry.lora.dummy import random_weights
from lorry.lora.packed import PackedAdapter
from lorry.types import EngineRequest, SamplingParams


@dataclass(frozen=True)
class Arrival:
    """A request, `at` seconds after the start."""

    at: float
    adapter: int
    prompt: tuple[int, ...]


@dataclass
class Timed:
    """Times of a request's arrival and of its tokens."""

    arrived: float
    tokens: list[float] = field(default_factory=list)


def arrivals(args: argparse.Namespace, vocab: int) -> list[Arrival]:
    """Poisson arrivals; `even`: adapters in turn, `zipf`: adapter k with a weight of 1 / (k + 1)."""
    rng = random.Random(0)
    made: list[Arrival] = []
    at = 0.0
    while (at := at + rng.expovariate(args.rate)) < args.seconds:
        numbers = range(args.adapters)
        zipf = rng.choices(numbers, [1 / (k + 1) for k in numbers])[0]
        adapter = zipf if args.mix == "zipf" else len(made) % args.adapters
        made.append(Arrival(at, adapter, tuple(rng.randrange(vocab) for _ in range(args.input))))
    return made


def make_engine(folder: str, args: argparse.Namespace, room: int) -> Engine:
    """An engine with all adapters registered; its device has room for so many of them."""
    context = -(-(args.input + args.output) // 16) * 16
    settings: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy",
        "context_length": context,
        "disable_radix_cache": True,
        "lora_drain_wait_threshold": args.drain,
        "max_loras_per_batch": room + 1,
        "lora_memory": args.adapter_bytes * room + 2**16,
    }
    engine = Engine(EngineConfig.parse(**settings), lambda text: print(text, flush=True))
    packed = random_adapter(engine, args.rank)
    for i in range(args.adapters):
        engine.register_adapter(
            PreparedAdapter(
                name=f"a{i}",
                path="random weights",
                packed=packed,  # the same for all: what is copied is as large
                rank=args.rank,
                target_modules=(),
                base_model_name=None,
                warnings=(),
                card=AdapterCard(),
                stamp=None,
            )
        )
    return engine


def random_adapter(engine: Engine, rank: int) -> PackedAdapter:
    """On all linear projections and experts, in the host's memory."""
    parts = engine._parts
    sites = [site for site in parts.sites if site.kind != "router"]
    weights = random_weights(sites, rank, parts.loaded.dtype, torch.device("cpu"), seed=0)
    return PackedAdapter.of(weights, pin=torch.cuda.is_available())


def replay(engine: Engine, requests: Sequence[Arrival], num_output: int) -> list[Timed]:
    """Send the requests at their times, and note when each token came."""
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    timed: dict[str, Timed] = {}
    waiting = list(reversed(requests))
    start = time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter()
        while waiting and start + waiting[-1].at <= now:
            arrival = waiting.pop()
            uid = engine.adapters[f"a{arrival.adapter}"].uid
            request_id = str(len(timed))
            timed[request_id] = Timed(start + arrival.at)
            engine.add_request(
                EngineRequest(request_id=request_id, token_ids=arrival.prompt, params=params, adapter_uid=uid)
            )
        if not engine.has_work:
            time.sleep(max(0.0, start + waiting[-1].at - time.perf_counter()))
            continue
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            timed[output.request_id].tokens += [now] * len(output.token_ids)
    return list(timed.values())


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99, in milliseconds."""
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {f"p{p}": round(1e3 * cuts[p - 1], 2) for p in (50, 90, 99)}


def describe(timed: Sequence[Timed]) -> dict[str, Any]:
    first = [item.tokens[0] - item.arrived for item in timed]
    gaps = [after - before for item in timed for before, after in zip(item.tokens, item.tokens[1:], strict=False)]
    whole = [item.tokens[-1] - item.arrived for item in timed]
    return {
        "requests": len(timed),
        "ttft_ms": percentiles(first),
        "gap_ms": percentiles(gaps),
        "whole_ms": {"mean": round(1e3 * statistics.mean(whole), 1), "p90": percentiles(whole)["p90"]},
    }


def run(folder: str, args: argparse.Namespace, room: int, commit: str) -> None:
    """Measure one engine, and print a line for it."""
    engine = make_engine(folder, args, room)
    requests = arrivals(args, WORKLOADS[args.workload]["vocab_size"])
    replay(engine, requests[: min(8, len(requests))], 4)  # whatever happens once
    before = engine.stats()
    found = describe(replay(engine, requests, args.output))
    after = engine.stats()
    record = {
        "benchmark": "churn",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else f"none ({platform.machine()})",
        "commit": commit,
        "workload": args.workload,
        "adapters": args.adapters,
        "room": room,
        "mix": args.mix,
        "rank": args.rank,
        "rate": args.rate,
        "input": args.input,
        "output": args.output,
        "drain": args.drain,
        **found,
        **{name: getattr(after, name) - getattr(before, name) for name in COUNTS},
    }
    print(json.dumps(record), flush=True)
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


COUNTS = ("num_adapter_copies", "num_adapter_evictions", "num_adapter_drains")


def adapter_bytes(folder: str, rank: int) -> int:
    """What one adapter takes, from an engine that is made for that alone."""
    config = EngineConfig.parse(model=folder, load_format="dummy", max_total_tokens=64, disable_cuda_graph=True)
    return random_adapter(Engine(config), rank).num_bytes


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="llama-3.1-8b")
    parser.add_argument("--adapters", type=int, default=6)
    parser.add_argument("--room", type=int, default=3, help="adapters that the device has room for")
    parser.add_argument("--mix", choices=["even", "zipf"], default="even")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long requests arrive")
    parser.add_argument("--input", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--drain", type=float, help="--lora-drain-wait-threshold (default: never)")
    parser.add_argument("--commit", help="what the code is, where it is not a git checkout")
    parser.add_argument("--out", type=Path, help="file to which the lines of JSON are appended")
    args = parser.parse_args(argv)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    commit = args.commit or git.stdout.strip() or "unknown"
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(Path(name), args.workload, None)
        args.adapter_bytes = adapter_bytes(folder, args.rank)
        for room in (args.adapters, args.room):
            run(folder, args, room, commit)


if __name__ == "__main__":
    main()
