"""Latency and throughput of any OpenAI-compatible server under requests that arrive at random, over many adapters.

    python -m bench.serve --url http://127.0.0.1:8000 --models base sql chat --mix zipf --rate 8 --requests 500

Requests arrive as a Poisson process (`--rate inf`: all at once), each for one of `--models` (base and adapters, by
names that the server knows): `uniform`, in turn (`distinct`), or `zipf`, the first most often. They stream; times are
the client's: TTFT from the sending of the request to its first text, inter-token latency from one piece of text to
the next. A server that sends several tokens in one piece shows it in `tokens_per_piece`. Prompts are words drawn at
random, or with `--vocab N` exactly as many token ids. The last line is JSON. Needs httpx (in the extra `test`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state", "house")
"""What prompts are made of."""

FIRST_WORD_TOKENS = 3
"""Token ids below this are taken to be special ones."""


@dataclass(frozen=True)
class Planned:
    """A request: when it is sent, in seconds after the start, to which model, with how much to read and to write."""

    at: float
    model: str
    num_input: int
    num_output: int
    seed: int


@dataclass
class Answer:
    """What came back: seconds to the first text and between texts, tokens by the server's count, or an error."""

    model: str
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    num_input: int = 0
    num_output: int = 0
    num_pieces: int = 0
    error: str | None = None


def plan(args: argparse.Namespace) -> list[Planned]:
    """All requests; equal seeds give equal ones."""
    drawn = random.Random(args.seed)
    weights = [1 / (k + 1) if args.mix == "zipf" else 1.0 for k in range(len(args.models))]
    at, requests = 0.0, []
    for i in range(args.requests):
        if args.mix == "distinct":
            model = args.models[i % len(args.models)]
        else:
            model = drawn.choices(args.models, weights)[0]
        requests.append(
            Planned(at, model, drawn.randint(*args.input), drawn.randint(*args.output), drawn.getrandbits(32))
        )
        at += drawn.expovariate(args.rate) if args.rate != float("inf") else 0.0
    return requests


def body(request: Planned, args: argparse.Namespace) -> dict[str, Any]:
    """The JSON of a request."""
    drawn = random.Random(request.seed)
    fields: dict[str, Any] = {
        "model": request.model,
        "max_tokens": request.num_output,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.ignore_eos:
        fields["ignore_eos"] = True
    if args.vocab is not None:
        return fields | {"prompt": [drawn.randrange(FIRST_WORD_TOKENS, args.vocab) for _ in range(request.num_input)]}
    text = " ".join(drawn.choices(WORDS, k=request.num_input))
    return fields | ({"messages": [{"role": "user", "content": text}]} if args.chat else {"prompt": text})


async def send(client: httpx.AsyncClient, request: Planned, args: argparse.Namespace) -> Answer:
    """Send one request and read its stream to the end. Never raises for what the server or the network does."""
    answer = Answer(request.model)
    path = "/v1/chat/completions" if args.chat else "/v1/completions"
    content = json.dumps(body(request, args))
    before = time.perf_counter()
    finished = False
    try:
        async with client.stream(
            "POST", path, content=content, headers={"Content-Type": "application/json"}
        ) as reply:
            if reply.status_code != 200:
                answer.error = f"HTTP {reply.status_code}: {(await reply.aread())[:200].decode(errors='replace')}"
                return answer
            async for line in reply.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    break
                now = time.perf_counter()
                event = json.loads(data)
                if "error" in event:
                    answer.error = str(event["error"])[:200]
                    return answer
                usage = event.get("usage")
                if usage:
                    answer.num_input, answer.num_output = usage["prompt_tokens"], usage["completion_tokens"]
                for choice in event.get("choices") or []:
                    finished = finished or choice.get("finish_reason") is not None
                    if not (choice.get("text") or (choice.get("delta") or {}).get("content")):
                        continue
                    if answer.ttft is None:
                        answer.ttft = now - before
                    else:
                        answer.gaps.append(now - before)
                    answer.num_pieces += 1
                    before = now
    except (httpx.HTTPError, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
        return answer
    if not finished:
        answer.error = "the stream ended without a finish reason"
    return answer


async def run(requests: Sequence[Planned], args: argparse.Namespace) -> tuple[list[Answer], float]:
    """Send all requests at their times; answers in the order of the requests, and the seconds until the last."""
    headers = {} if args.api_key is None else {"Authorization": f"Bearer {args.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(args.timeout)
    async with httpx.AsyncClient(base_url=args.url, headers=headers, limits=limits, timeout=timeout) as client:
        start = time.perf_counter()
        done = 0

        async def at_its_time(request: Planned) -> Answer:
            nonlocal done
            await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
            answer = await send(client, request, args)
            done += 1
            if done % max(1, len(requests) // 10) == 0:
                print(f"{done} of {len(requests)} requests after {time.perf_counter() - start:.1f} s", flush=True)
            return answer

        answers = await asyncio.gather(*map(at_its_time, requests))
        return list(answers), time.perf_counter() - start


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99 in milliseconds; None where there is nothing."""
    if not seconds:
        return None
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    return {f"p{p}": round(1e3 * cuts[p - 1], 2) for p in (50, 90, 99)}


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts and percentiles of some answers; latencies are of those without an error."""
    good = [answer for answer in answers if answer.error is None]
    return {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "ttft_ms": percentiles([answer.ttft for answer in good if answer.ttft is not None]),
        "inter_token_ms": percentiles([gap for answer in good for gap in answer.gaps]),
    }


def record(answers: Sequence[Answer], seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    """The line of JSON."""
    good = [answer for answer in answers if answer.error is None]
    num_output, num_pieces = sum(a.num_output for a in good), sum(a.num_pieces for a in good)
    return {
        "benchmark": "serve",
        "server": args.name,
        "gpu": args.gpu,
        "commit": args.commit,
        "rate": None if args.rate == float("inf") else args.rate,
        "mix": args.mix,
        "models": len(args.models),
        "input": list(args.input),
        "output": list(args.output),
        "seconds": round(seconds, 2),
        "input_tokens_per_s": round(sum(a.num_input for a in good) / seconds, 1),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "tokens_per_piece": round(num_output / num_pieces, 2) if num_pieces else None,
        **summary(answers),
        "error_messages": dict(Counter(a.error for a in answers if a.error is not None).most_common(5)),
        "by_model": {name: summary([a for a in answers if a.model == name]) for name in dict.fromkeys(args.models)},
    }


def _range(text: str) -> tuple[int, int]:
    """`256`, or `64:1024` for lengths drawn evenly between the two."""
    low, _, high = text.partition(":")
    first, last = int(low), int(high or low)
    if not 1 <= first <= last:
        raise ValueError(text)
    return first, last


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, without /v1")
    parser.add_argument("--models", nargs="+", required=True, help="names of base and adapters")
    parser.add_argument("--mix", choices=["uniform", "distinct", "zipf"], default="uniform")
    parser.add_argument("--rate", type=float, default=float("inf"), help="requests per second; inf: all at once")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument(
        "--input", type=_range, default=(256, 256), metavar="N[:M]", help="words or tokens of a prompt"
    )
    parser.add_argument("--output", type=_range, default=(128, 128), metavar="N[:M]", help="tokens of an answer")
    parser.add_argument("--vocab", type=int, help="send token ids below this instead of words; not with --chat")
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without a byte before giving up")
    parser.add_argument("--api-key")
    parser.add_argument("--name", default="lorry", help="of the server, for the record")
    parser.add_argument("--gpu", help="of the server, for the record")
    parser.add_argument("--commit", help="of the server, for the record")
    parser.add_argument("--out", type=Path, help="file to which the line of JSON is appended")
    args = parser.parse_args(argv)
    if args.chat and args.vocab is not None:
        parser.error("--vocab sends token ids, which --chat cannot carry: leave one of them out")
    if args.rate <= 0:
        parser.error("--rate must be above 0, or inf")
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    answers, seconds = asyncio.run(run(plan(args), args))
    line = record(answers, seconds, args)
    print(json.dumps(line))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return line


if __name__ == "__main__":
    main()
