"""Tokens per second of mixed-adapter generation on this machine: Lorry against transformers' generate with PEFT.

    OMP_WAIT_POLICY=PASSIVE python bench/throughput.py [--requests 16] [--tokens 64] [--repeats 5] [--out FILE]

The same requests over four adapters on attention (ranks 4, 8, 16, 32), all of them in one batch: PEFT's mixed adapter
batch (`adapter_names`) with left padding against Lorry's packed batch. Greedy, a fixed number of tokens each. Needs
the extras `demo` and `test`. Every repeat times both, one after the other, so that drift of the machine hits both.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorry import LLM, SamplingParams
from lorry.demo.model import prepare

RANKS = {"a4": 4, "b8": 8, "c16": 16, "d32": 32}
TOPICS = ["rivers", "bread", "clocks", "maps", "glass", "paper", "wind", "salt", "bridges", "bees", "stars", "ink"]


def write_adapters(model: Path, folder: Path) -> dict[str, str]:
    """One adapter for each rank, random A and B, by PEFT."""
    paths = {}
    for seed, (name, rank) in enumerate(RANKS.items()):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        peft = get_peft_model(base, lora)
        for key, parameter in peft.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.02)
        peft.save_pretrained(str(folder / name))
        paths[name] = str(folder / name)
    return paths


def peft_runner(
    model: Path, paths: dict[str, str], prompts: list[str], names: list[str], tokens: int
) -> Callable[[], Any]:
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    first, *rest = paths
    peft = PeftModel.from_pretrained(base, paths[first], adapter_name=first, autocast_adapter_dtype=False)
    for name in rest:
        peft.load_adapter(paths[name], adapter_name=name, autocast_adapter_dtype=False)
    peft.eval()
    batch = tokenizer(prompts, return_tensors="pt", padding=True)

    def run() -> Any:
        with torch.inference_mode():
            return peft.generate(
                **batch, adapter_names=names, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens
            )

    return run


def lorry_runner(
    model: Path, paths: dict[str, str], prompts: list[str], names: list[str], tokens: int
) -> Callable[[], Any]:
    llm = LLM(str(model), paths, disable_radix_cache=True)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return lambda: llm.generate(prompts, params, names)


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    model = prepare(progress=print)
    names = [list(RANKS)[i % len(RANKS)] for i in range(args.requests)]
    prompts = [
        f"Tell me something about {TOPICS[i % len(TOPICS)]}" + " and more" * (3 * i) for i in range(args.requests)
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = write_adapters(model, Path(folder))
        runners = {
            "peft": peft_runner(model, paths, prompts, names, args.tokens),
            "lorry": lorry_runner(model, paths, prompts, names, args.tokens),
        }
        times: dict[str, list[float]] = {name: [] for name in runners}
        for repeat in range(args.repeats + 1):
            for name, run in runners.items():
                took = seconds(run)
                print(f"repeat {repeat} {name}: {took:.2f} s", flush=True)
                if repeat:  # the first is the warm-up
                    times[name].append(took)
    generated = args.requests * args.tokens
    for name, taken in times.items():
        rates = sorted(generated / t for t in taken)
        record = {
            "benchmark": "throughput",
            "engine": name,
            "commit": subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
            ).stdout.strip(),
            "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            "requests": args.requests,
            "adapters": len(RANKS),
            "tokens_each": args.tokens,
            "tokens_per_s": {
                "p20": round(rates[len(rates) // 5], 1),
                "p50": round(statistics.median(rates), 1),
                "p80": round(rates[-1 - len(rates) // 5], 1),
            },
        }
        print(json.dumps(record))
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
