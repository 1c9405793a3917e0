"""Tokens per second of the engine alone, without HTTP: random weights, 1,024 tokens in, 256 out, many adapter mixes.

    python -m bench.engine --workload qwen3-30b-a3b --adapters none 0 1 8 --out bench/results/engine.jsonl

`--adapters none` is an engine started without LoRA, `0` are base requests on an engine with adapters loaded. Each of
the two engines is built once and measures all its combinations. A line of JSON for each, and a readable one:

- decode: each step in which all sequences of the batch give a token, tokens over its time; p20, p50, p80 over steps;
- prefill: the prompts' tokens over the time until the last request has its first token; p20, p50, p80 over repeats.

`--workload tiny` tries the script out on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.autograd import DeviceType
from transformers import AutoConfig, AutoModelForCausalLM

from lorry.config import EngineConfig
from lorry.engine.engine import Engine
from lorry.lora.dummy import dummy_bytes, dummy_sites
from lorry.models.sites import find_sites
from lorry.types import BASE_UID, EngineRequest, SamplingParams

WORKLOADS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}

WARM_UP_STEPS = 3
"""First steps of each decode phase that are not counted."""

PROFILED_STEPS = 16

HEADROOM = 10 * 2**30
"""Of a GPU's memory, what graphs and steps need at least beside weights, adapters and KV."""


@dataclass
class Measured:
    """Rates of one combination, in tokens per second: one for each repeat, and one for each step."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Combination:
    """A batch and the adapters of its requests: None is an engine without LoRA, 0 the base on one with LoRA."""

    batch: int
    num_adapters: int | None
    mix: str

    def names(self) -> list[str | None]:
        """The adapter of each request. `distinct`: in turn; `zipf`: adapter k with a weight of 1 / (k + 1)."""
        if not self.num_adapters:
            return [None] * self.batch
        numbers = range(self.num_adapters)
        if self.mix == "distinct":
            return [f"dummy-{i % self.num_adapters}" for i in range(self.batch)]
        drawn = random.Random(0).choices(numbers, [1 / (k + 1) for k in numbers], k=self.batch)
        return [f"dummy-{k}" for k in drawn]

    def __str__(self) -> str:
        adapters = "no LoRA" if self.num_adapters is None else f"adapters {self.num_adapters}"
        return f"batch {self.batch:>4}, {adapters}" + (f", {self.mix}" if self.num_adapters else "")


class Load:
    """Runs batches of requests on an engine."""

    def __init__(self, engine: Engine, vocab_size: int, num_input: int, num_output: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._num_input = num_input
        self._num_output = num_output
        self._random = random.Random(1)
        self._num_requests = 0

    def measure(self, what: Combination, repeats: int, max_steps: int, max_seconds: float) -> Measured:
        """Repeat until `repeats` are done or the time is over, but once at least."""
        measured = Measured()
        end = time.perf_counter() + max_seconds
        for _ in range(repeats):
            self._once(what, measured, max_steps, end)
            if time.perf_counter() >= end:
                break
        return measured

    def decoding(self, what: Combination) -> Iterator[None]:
        """Each step of a batch that has its prompts behind it, for a profiler; ends with the batch."""
        waiting = self._add(what)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step() if output.token_ids}
        while self._engine.has_work:
            self._engine.step()
            yield

    def stop(self) -> None:
        """Abort what is left."""
        for i in range(self._num_requests):
            self._engine.abort(str(i))
        while self._engine.has_work:
            self._engine.step()
        self._engine.drop_finished()

    def _add(self, what: Combination) -> set[str]:
        ids = set()
        params = SamplingParams(temperature=0.0, max_tokens=self._num_output, ignore_eos=True)
        for name in what.names():
            prompt = tuple(self._random.randrange(self._vocab_size) for _ in range(self._num_input))
            uid = BASE_UID if name is None else self._engine.adapters[name].uid
            ids.add(str(self._num_requests))
            self._engine.add_request(
                EngineRequest(request_id=str(self._num_requests), token_ids=prompt, params=params, adapter_uid=uid)
            )
            self._num_requests += 1
        return ids

    def _once(self, what: Combination, measured: Measured, max_steps: int, end: float) -> None:
        waiting = self._add(what)
        start = now = time.perf_counter()
        while waiting:
            waiting -= {output.request_id for output in self._engine.step() if output.token_ids}
        now = time.perf_counter()
        measured.prefill.append(what.batch * self._num_input / (now - start))
        for step in range(max_steps + WARM_UP_STEPS):
            if not self._engine.has_work or (now > end and step > 2 * WARM_UP_STEPS):
                break
            tokens = sum(len(output.token_ids) for output in self._engine.step())
            before, now = now, time.perf_counter()
            if tokens == what.batch and step >= WARM_UP_STEPS:
                measured.decode.append(tokens / (now - before))
        self.stop()


def percentiles(rates: Sequence[float]) -> dict[str, float] | None:
    """p20, p50, p80; None where nothing was measured."""
    if not rates:
        return None
    cuts = statistics.quantiles(rates, n=10, method="inclusive") if len(rates) > 1 else [rates[0]] * 9
    return {"p20": round(cuts[1], 1), "p50": round(cuts[4], 1), "p80": round(cuts[7], 1)}


def write_config(folder: Path, workload: str, num_layers: int | None) -> str:
    """A folder with the workload's config.json."""
    config = WORKLOADS[workload] | {"dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def adapters_that_fit(folder: str, wanted: Sequence[int], rank: int, num_tokens: int) -> list[int]:
    """Those numbers of adapters for which the GPU has memory beside `num_tokens` of KV; the others are named."""
    if not torch.cuda.is_available():
        return list(wanted)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv = num_tokens * config.num_hidden_layers * 2 * config.num_key_value_heads * width * 2
    each = dummy_bytes(dummy_sites(model, find_sites(model), None), rank, torch.bfloat16)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    room = int(0.9 * torch.cuda.mem_get_info()[1]) - weights - kv - HEADROOM
    for count in wanted:
        if count * each > room:
            print(
                f"skipped: {count} adapters of rank {rank} take {count * each / 2**30:.1f} GiB, there are "
                f"{room / 2**30:.1f}: give a smaller --rank",
                flush=True,
            )
    return [count for count in wanted if count * each <= room]


def make_engine(folder: str, args: argparse.Namespace, num_adapters: int | None) -> Engine:
    """An engine without LoRA (None), or with so many dummy adapters; at least one, so that base requests have it."""
    settings: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy",
        "context_length": -(-(args.input + args.output) // 16) * 16,
        "max_running_requests": max(args.batch),
        "chunked_prefill_size": args.chunked_prefill_size,
        "disable_radix_cache": True,
        "enable_lora": num_adapters is not None,
    }
    if num_adapters is not None:
        count = max(1, num_adapters)
        settings |= {"dummy_adapters": count, "dummy_rank": args.rank, "max_loras_per_batch": max(64, count + 1)}
    for item in args.set:
        name, _, value = item.partition("=")
        settings[name.lstrip("-").replace("-", "_")] = yaml.safe_load(value)
    return Engine(EngineConfig.parse(**settings), lambda text: print(text, flush=True))


def gpu_idle_share(events: Sequence[Any]) -> float | None:
    """Share of the time between the first and the last work on the GPU in which it had none."""
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type == DeviceType.CUDA)
    if not spans:
        return None
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1.0 - busy / (reached - spans[0][0])


def profile(load: Load, what: Combination, file: Path) -> float | None:
    """Write the table of a torch profile of decode steps; returns the GPU's idle share."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    steps = load.decoding(what)
    for _ in range(WARM_UP_STEPS):
        next(steps, None)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            next(steps, None)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    load.stop()
    idle = gpu_idle_share(profiler.events())
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    share = "no GPU" if idle is None else f"GPU idle share {idle:.2%}"
    with file.open("a") as out:
        out.write(f"{what}: {PROFILED_STEPS} decode steps, {share}\n")
        out.write(profiler.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=80) + "\n\n")
    return idle


def combinations(args: argparse.Namespace, counts: Sequence[int | None]) -> Iterator[Combination]:
    for count in counts:
        for batch in args.batch:
            for mix in args.mixes if (count or 0) > 1 and batch > 1 else ("distinct",):
                yield Combination(batch, count, mix)


def run(engine: Engine, args: argparse.Namespace, counts: Sequence[int | None], commit: str) -> None:
    """Measure all combinations of one engine, and print each when it is known."""
    vocab = WORKLOADS[args.workload]["vocab_size"]
    load = Load(engine, vocab, args.input, args.output)
    for what in combinations(args, counts):
        load.measure(what, 1, 1, 0.0)  # compiles what this combination needs
        measured = load.measure(what, args.repeats, args.steps, args.seconds)
        record = {
            "benchmark": "engine",
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else f"none ({platform.machine()})",
            "commit": commit,
            "torch": torch.__version__,
            "workload": args.workload + (f" ({args.layers} layers)" if args.layers is not None else ""),
            "batch": what.batch,
            "lora": what.num_adapters is not None,
            "adapters": what.num_adapters or 0,
            "mix": what.mix if what.num_adapters else None,
            "rank": args.rank if what.num_adapters else None,
            "input": args.input,
            "output": args.output,
            "decode_tokens_per_s": percentiles(measured.decode),
            "prefill_tokens_per_s": percentiles(measured.prefill),
            "decode_steps": len(measured.decode),
            "prefill_repeats": len(measured.prefill),
        }
        if args.profile is not None:
            record["gpu_idle_share"] = profile(load, what, args.profile)
        print(f"{what}: decode {record['decode_tokens_per_s']}, prefill {record['prefill_tokens_per_s']}")
        print(json.dumps(record), flush=True)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="qwen3-30b-a3b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--adapters", nargs="+", default=["none", "0", "1", "8", "64"], help="none, or numbers")
    parser.add_argument("--mixes", nargs="+", choices=["distinct", "zipf"], default=["distinct", "zipf"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--input", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=256, help="most tokens of each answer")
    parser.add_argument("--steps", type=int, default=253, help="most decode steps of a repeat")
    parser.add_argument("--seconds", type=float, default=6.0, help="about how long one combination is measured")
    parser.add_argument("--repeats", type=int, default=3, help="most repeats of a combination")
    parser.add_argument("--chunked-prefill-size", type=int, default=8192)
    parser.add_argument("--layers", type=int, help="cut the model to so many layers, to try things out")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="further settings of the engine")
    parser.add_argument("--commit", help="what the code is, where it is not a git checkout")
    parser.add_argument("--out", type=Path, help="file to which the lines of JSON are appended")
    parser.add_argument("--profile", type=Path, help="file for profiler tables and GPU idle shares of decode steps")
    args = parser.parse_args(argv)
    bad = [item for item in args.adapters if item != "none" and not item.isdecimal()]
    if bad:
        parser.error(f"--adapters {' '.join(bad)}: write none, or numbers of adapters")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    commit = args.commit or git.stdout.strip() or "unknown"
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(Path(name), args.workload, args.layers)
        wanted = [int(item) for item in args.adapters if item != "none"]
        counts = adapters_that_fit(folder, wanted, args.rank, max(args.batch) * (args.input + args.output))
        groups: list[list[int | None]] = [[None]] if "none" in args.adapters else []
        if counts:
            groups.append([*counts])
        for group in groups:
            engine = make_engine(folder, args, None if group == [None] else max(counts))
            run(engine, args, group, commit)
            del engine
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
