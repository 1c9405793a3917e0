"""Minutes of random traffic over many more adapters than there is room for; every answer is compared with its own.

    nice -n 5 python -m bench.soak --minutes 10 --out bench/results/soak.jsonl

1,000 adapters are registered, the host has room for 100 and the device for 16. Requests come in bursts, their
adapters by zipf; meanwhile adapters are loaded, unloaded, replaced by other files or by bytes, pinned, and lose their
files, and requests are aborted. `--model` is demo, tiny (which needs the extra `test`), or a folder. Equal seeds draw
equal events; what falls together in time is the machine's. Temporary files take 2 MB for each of the demo's adapters.

Afterwards an engine in which nothing comes or goes gives the answers that should have been given, for some adapters
at a time, for the first of them alone as well. On a CPU an answer does not depend on what is computed beside it, so
all must be equal; on a GPU rounding may part what is about equal. Whatever else is found wrong is listed: answers
that end without a reason, counters and memory that do not come back, and the process' memory, where its median in the
last quarter is more than 5 % and 32 MiB above that in the second. The exit status is 1 then.
"""

from __future__ import annotations

import lorry  # noqa: F401  (before torch: it sets how torch's threads wait)

# isort: split

import argparse
import faulthandler
import gc
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.soak_adapters import Variants, Weights, make_workload
from bench.soak_answers import Answers, compare_all
from bench.soak_traffic import Room, Soak
from lorry.config import EngineConfig
from lorry.engine.build import build
from lorry.engine.engine import Engine
from lorry.lora.arena import Arena

HANG_SECONDS = 600.0
"""A step that takes so long ends the process, with the stacks of all threads."""


def say(text: str) -> None:
    """Print at once; a process that says nothing for too long is ended."""
    print(text, flush=True)
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.__stderr__)


def settings(args: argparse.Namespace, model: str, lora_memory: int) -> dict[str, Any]:
    """So little KV that requests are preempted; so much for adapters that now places are missing, now bytes."""
    return {
        "model": model,
        "device": args.device,
        "context_length": 256,
        "max_total_tokens": 512,
        "max_running_requests": 32,
        "chunked_prefill_size": 128,
        "max_loras_per_batch": args.on_device,
        "max_loaded_loras": args.on_host,
        "lora_memory": lora_memory,
        "lora_drain_wait_threshold": 0.1,
        "max_requests_per_lora": 8,
        "random_seed": args.seed,
    }


def check_empty(engine: Engine, arena: Arena) -> list[str]:
    """What is left where no request and no adapter is."""
    stats = engine.stats()
    left = {name: getattr(stats, name) for name in ("num_running", "num_waiting", "num_waiting_for_adapter")}
    left |= {name: getattr(stats, name) for name in ("pages_in_use", "adapter_references", "adapters_registered")}
    left |= {name: getattr(stats, name) for name in ("adapters_on_host", "adapters_on_device", "adapter_host_bytes")}
    left["bytes of the device"] = arena.num_bytes - arena.num_free_bytes
    left["places of the device"] = arena.num_slots - arena.num_free_slots
    left["ranks in its tables"] = int(torch.count_nonzero(arena.rank))
    return [f"at the end {name} is {value}, not 0" for name, value in left.items() if value]


def run_traffic(
    args: argparse.Namespace, config: EngineConfig, variants: Variants, prompts: Sequence[Sequence[int]]
) -> tuple[Answers, list[str], dict[str, Any]]:
    """Register everything, let requests come, and empty the engine again; answers, faults and what is to be said."""
    parts = build(config, say)
    engine = Engine(config, say, parts)
    soak = Soak(engine, variants, prompts, Room(args.adapters, args.on_host, args.on_device), args.seed, say)
    soak.register_all()
    soak.run(args.minutes * 60)
    soak.finish()
    assert parts.lora.arena is not None
    faults = soak.faults + check_empty(engine, parts.lora.arena)
    return soak.answers, faults, soak.record()


def describe(args: argparse.Namespace, commit: str) -> dict[str, Any]:
    """What ran where: the head of the line of JSON."""
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available() and args.device != "cpu":
        machine = torch.cuda.get_device_name()
    return {
        "benchmark": "soak",
        "machine": machine,
        "commit": commit,
        "torch": torch.__version__,
        "model": args.model if args.model in ("demo", "tiny") else Path(args.model).name,
        "seed": args.seed,
        "minutes": args.minutes,
        "adapters": args.adapters,
        "on_host": args.on_host,
        "on_device": args.on_device,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long requests come (default: 10)")
    parser.add_argument("--model", default="demo", help="demo, tiny, or a model's folder (default: demo)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--on-host", type=int, default=100, help="adapters for which the host's memory has room")
    parser.add_argument("--on-device", type=int, default=16, help="adapters for which the device has room")
    parser.add_argument("--commit", help="what the code is, where it is not a git checkout")
    parser.add_argument("--out", type=Path, help="file to which the line of JSON is appended")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as name:
        work = make_workload(args.model, Path(name))
        variants = Variants(work.originals, Path(name) / "adapters")
        for number in range(args.adapters):
            variants.write(Weights(number, 0))
        size = variants.mean_bytes(work.itemsize)
        config = EngineConfig.parse(**settings(args, work.model, args.on_device * size))
        answers, faults, record = run_traffic(args, config, variants, work.prompts)
        gc.collect()  # the engine that is not needed any more: the next one takes as much memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        roomy = {"lora_memory": 4 * args.on_device * size, "max_total_tokens": 2**14, "disable_radix_cache": True}
        still = Engine(config.model_copy(update=roomy))
        compare_all(still, variants, work.prompts, answers, say)
    for fault in faults[:20]:
        say(f"FAULT: {fault}")
    head = describe(args, args.commit or git.stdout.strip() or "unknown")
    line = json.dumps(head | record | answers.record() | {"faults": len(faults)})
    say(line)
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(line + "\n")
    faulthandler.cancel_dump_traceback_later()
    return int(bool(faults or answers.num_differed))


if __name__ == "__main__":
    sys.exit(main())
