"""The command line: `lorry serve`, `lorry generate`, `lorry demo`; flags are the fields of the configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic.fields import FieldInfo

from lorry.config import EngineConfig, ServerConfig
from lorry.errors import ConfigError, LorryError
from lorry.types import SamplingParams

_Config = TypeVar("_Config", bound=EngineConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except LorryError as error:
        print(f"lorry: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lorry", description="Many LoRA adapters on one language model.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model and its adapters over HTTP (OpenAI's API)")
    _add_config(serve, ServerConfig)
    serve.set_defaults(run=_serve)

    generate = commands.add_parser("generate", help="answer prompts from the command line and exit")
    _add_config(generate, EngineConfig)
    generate.add_argument("--prompt", action="append", required=True, help="what to answer; may be repeated")
    generate.add_argument("--adapter", help="name of the adapter (default: the base)")
    generate.add_argument("--max-tokens", type=int, default=128, help="longest answer, in tokens (default: 128)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    generate.add_argument("--raw", action="store_true", help="complete the text instead of answering as a chat")
    generate.set_defaults(run=_generate)

    demo = commands.add_parser("demo", help="serve the embedded model with its adapters, and a page to try them")
    _add_config(demo, ServerConfig, with_model=False)
    demo.set_defaults(run=_demo)
    return parser


def _add_config(parser: argparse.ArgumentParser, config: type[EngineConfig], with_model: bool = True) -> None:
    if with_model:
        parser.add_argument("model", metavar="MODEL", nargs="?", help=config.model_fields["model"].description)
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file of settings; flags override it")
    parser.add_argument("--print-config", action="store_true", help="print the settings as YAML and exit")
    group = parser.add_argument_group("settings")
    for name, field in config.model_fields.items():
        if name != "model":
            _add_field(group, name, field)


def _add_field(group: Any, name: str, field: FieldInfo) -> None:
    flag = f"--{name.replace('_', '-')}"
    default = "" if field.default is None or field.default == {} else f" (default: {field.default})"
    if field.default_factory is not None:
        default = ""
    kind = field.annotation
    options: dict[str, Any] = {
        "dest": name,
        "default": None,
        "help": f"{field.description}{default}".replace("%", "%%"),
    }
    if kind is bool:
        options |= (
            {"action": argparse.BooleanOptionalAction} if field.default else {"action": "store_const", "const": True}
        )
    elif get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
    elif get_origin(kind) is dict:
        options |= {"nargs": "+", "metavar": "NAME=PATH"}
    elif any(get_origin(part) is tuple for part in get_args(kind)):
        options |= {"nargs": "+", "metavar": "NAME"}
    else:
        options["metavar"] = name.rpartition("_")[2].upper()
    group.add_argument(flag, **options)


def read_config(args: argparse.Namespace, config: type[_Config], **defaults: Any) -> _Config:
    """Defaults, then the YAML file, then the flags: later ones win."""
    settings = dict(defaults)
    if args.config is not None:
        settings |= config.read_yaml(args.config)
    flags = {name: getattr(args, name, None) for name in config.model_fields}
    settings |= {name: value for name, value in flags.items() if value is not None}
    paths = settings.get("lora_paths")
    if isinstance(paths, list):
        settings["lora_paths"] = _named_paths(paths)
    if "model" not in settings:
        raise ConfigError("no model is given: name it on the command line or in the --config file")
    return config.parse(**settings)


def _named_paths(items: Sequence[str]) -> dict[str, str]:
    """`NAME=PATH`, or a path alone, which is its own name (as in SGLang)."""
    paths: dict[str, str] = {}
    for item in items:
        name, equals, path = str(item).partition("=")
        name, path = (name, path) if equals else (item, item)
        if not name or not path:
            raise ConfigError(f"--lora-paths has {item!r}: write NAME=PATH")
        if name in paths:
            raise ConfigError(f"--lora-paths names {name!r} twice")
        paths[name] = path
    return paths


def _serve(args: argparse.Namespace) -> int:
    return _serve_config(args, read_config(args, ServerConfig))


def _demo(args: argparse.Namespace) -> int:
    from lorry import demo
    from lorry.demo.model import prepare

    adapters = {name: str(path) for name, path in demo.adapter_paths().items()}
    model = str(prepare(progress=lambda text: print(text, flush=True)))
    defaults = {"model": model, "served_model_name": "smollm2-moe", "lora_paths": adapters}
    return _serve_config(args, read_config(args, ServerConfig, **defaults))


def _serve_config(args: argparse.Namespace, config: ServerConfig) -> int:
    if args.print_config:
        print(config.to_yaml(), end="")
        return 0
    from lorry.server.serve import serve

    return serve(config)


def _generate(args: argparse.Namespace) -> int:
    config = read_config(args, EngineConfig)
    if args.print_config:
        print(config.to_yaml(), end="")
        return 0
    from lorry.engine.llm import LLM

    settings = config.model_dump(exclude={"model", "lora_paths"})
    llm = LLM(config.model, config.lora_paths, lambda text: print(text, file=sys.stderr), **settings)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
    if args.raw or not llm.tokenizer.has_chat_template:
        outputs = llm.generate(args.prompt, params, args.adapter)
    else:
        chats = [[{"role": "user", "content": prompt}] for prompt in args.prompt]
        outputs = llm.chat(chats, params, args.adapter)
    for output in outputs:
        print(output.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
