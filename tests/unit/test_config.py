"""One configuration from the command line, YAML and Python, with flags that win and errors that name the field."""

from pathlib import Path

import pytest

from lorry.cli import _parser, main, read_config
from lorry.config import EngineConfig, ServerConfig, parse_bytes
from lorry.errors import ConfigError


def parse(*argv: str) -> ServerConfig:
    return read_config(_parser().parse_args(["serve", *argv]), ServerConfig)


def test_every_field_is_a_flag_and_defaults_agree():
    assert parse("m") == ServerConfig(model="m")
    options = {
        option
        for action in _parser()._subparsers._group_actions[0].choices["serve"]._actions
        for option in action.option_strings
    }
    for name in ServerConfig.model_fields:
        assert name == "model" or f"--{name.replace('_', '-')}" in options


def test_flags_override_yaml(tmp_path: Path):
    file = tmp_path / "lorry.yaml"
    file.write_text("model: m\nmax-lora-rank: 8\nlora_paths: {a: /a}\nlora-memory: 2GiB\nport: 1234\n")
    config = parse("--config", str(file), "--max-lora-rank", "16", "--no-lora-use-virtual-experts")
    assert (config.model, config.max_lora_rank, config.port, config.lora_memory) == ("m", 16, 1234, 2**31)
    assert config.lora_paths == {"a": "/a"}
    assert not config.lora_use_virtual_experts


def test_it_prints_itself_as_yaml_that_reads_back(tmp_path: Path, capsys):
    assert main(["serve", "m", "--lora-paths", "a=/x=y", "b", "--lora-memory", "1.5GiB", "--print-config"]) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    config = parse("--config", str(file))
    assert config.lora_paths == {"a": "/x=y", "b": "b"}
    assert config.lora_memory == 3 * 2**29


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--port", "x"], "port: .*'x'"),
        (["m", "--lora-memory", "lots"], "lora_memory: .*512MiB"),
        (["m", "--max-running-requests", "0"], "max_running_requests"),
        (["m", "--lora-paths", "=p"], "--lora-paths has '=p'"),
        (["m", "--lora-paths", "a=1", "a=2"], "names 'a' twice"),
        ([], "no model is given"),
    ],
)
def test_errors_name_the_field(argv, message):
    with pytest.raises(ConfigError, match=message):
        parse(*argv)


def test_unknown_settings_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="max_lora_rnk"):
        EngineConfig.parse(model="m", max_lora_rnk=3)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        EngineConfig.read_yaml(tmp_path / "nowhere.yaml")


def test_a_bad_setting_ends_the_command_with_status_2(capsys):
    assert main(["serve", "m", "--port", "70000"]) == 2
    assert "port" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("2KiB", 2048), ("1.5g", 3 * 2**29), ("2 MB", 2**21)])
def test_sizes(text, value):
    assert parse_bytes(text) == value
