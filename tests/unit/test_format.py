"""Keys, module paths, patterns and config fields of adapter files."""

from __future__ import annotations

from dataclasses import fields

import pytest
from peft import LoraConfig

from lorry.errors import AdapterFormatError, AdapterMismatch
from lorry.lora.format import ModuleIndex, ParsedKey, group_keys, named, natural, parse_key, refusals
from lorry.lora.format_config import _HARMLESS, _REFUSED, AdapterConfig, Patterns, refused_fields, unknown_fields
from lorry.lora.layouts_experts import orientation_of
from lorry.models.sites import Site

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (f"base_model.model.{Q}.lora_A.weight", ParsedKey(Q, "A")),
        (f"{Q}.lora_B.weight", ParsedKey(Q, "B")),
        (f"base_model.model.base_model.model.{Q}.lora_B.weight", ParsedKey(Q, "B")),
        (f"base_model.model.{Q}.lora_A.default.weight", ParsedKey(Q, "A")),
        (f"base_model.model.{Q}.alpha", ParsedKey(Q, "alpha")),
        ("base_model.model.l.0.mlp.experts.base_layer.lora_A.weight", ParsedKey("l.0.mlp.experts", "A", 1)),
        ("x.experts.base_layer.base_layer.lora_B.a1.weight", ParsedKey("x.experts", "B", 2)),
        ("x.experts.3.gate_proj.lora_B.weight", ParsedKey("x.experts.3.gate_proj", "B")),
        (f"{Q}.lora_magnitude_vector", None),
        (f"{Q}.lora_A.bias", None),
        (f"{Q}.lora_A", None),
        (f"{Q}.base_layer.bias", None),
        ("base_model.model.lm_head.lora_A.weight", None),
        ("model.embed_tokens.lora_embedding_A", None),
        ("lora_A.weight", None),
    ],
)
def test_parse_key(key: str, place: ParsedKey | None) -> None:
    assert parse_key(key) == place


@pytest.mark.parametrize(
    ("key", "word"),
    [
        (f"{Q}.lora_magnitude_vector", "DoRA"),
        (f"{Q}.lora_magnitude_vector.default.weight", "DoRA"),
        ("model.embed_tokens.lora_embedding_A", "embeddings"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", "token rows"),
        ("lm_head.lora_A.weight", "head"),
        (f"{Q}.lora_B.bias", "lora_bias"),
        (f"{Q}.base_layer.bias", "biases"),
        (f"{Q}.lora_diag", "KaSA"),
        (f"{Q}.lora_E", "AdaLoRA"),
        (f"{Q}.lora_velora_embed", "VeLoRA"),
        (f"{Q}.lora_A", "known LoRA key"),
        ("lm_head.weight", "modules_to_save"),
        ("steps", "no known key"),
    ],
)
def test_refused_keys_name_key_and_reason(key: str, word: str) -> None:
    (line,) = refusals([key])
    assert repr(key) in line
    assert word in line


def test_errors_name_only_the_first_keys() -> None:
    (line,) = refusals(f"m.{i}.weight" for i in range(9))
    assert "'m.0.weight'" in line
    assert "and 5 more" in line
    assert named(["a", "b"]) == "'a', 'b'"
    assert sorted(["m.10.b", "m.2.b", "m.x"], key=natural) == ["m.2.b", "m.10.b", "m.x"]


def test_pairs_must_be_complete_and_unique() -> None:
    a = ("m.q.lora_A.weight", ParsedKey("m.q", "A"))
    b = ("m.q.lora_B.weight", ParsedKey("m.q", "B"))
    assert group_keys([b, a])[0].a == a[0]
    with pytest.raises(AdapterFormatError, match=r"'m\.q'.*no lora_B"):
        group_keys([a])
    with pytest.raises(AdapterFormatError, match="no lora_A and no lora_B"):
        group_keys([("m.q.alpha", ParsedKey("m.q", "alpha"))])
    with pytest.raises(AdapterFormatError, match=r"both A.*'m\.q'"):
        group_keys([a, b, ("base_model.model.m.q.lora_A.weight", ParsedKey("m.q", "A"))])


def _linear(index: int, path: str) -> Site:
    return Site(index, path, "linear", path, 8, 8)


def _experts(first: int, path: str) -> list[Site]:
    return [
        Site(first + i, f"{path}.{p}", "experts", path, 8, 4, 2) for i, p in enumerate(("gate_proj", "down_proj"))
    ]


@pytest.mark.parametrize("base", ["model.layers", "model.language_model.layers", "layers"])
@pytest.mark.parametrize(
    "wrapper",
    ["model.", "", "model.language_model.", "language_model.model.", "module.", "model.model.", "_orig_mod."],
)
def test_modules_are_found_whatever_wraps_them(base: str, wrapper: str) -> None:
    index = ModuleIndex([_linear(0, f"{base}.0.self_attn.q_proj"), _linear(1, f"{base}.10.self_attn.q_proj")])
    target = index.find(f"{wrapper}layers.0.self_attn.q_proj")
    assert target is not None
    assert target.site.index == 0


def test_a_vision_tower_is_not_taken_for_the_decoder() -> None:
    decoder = _linear(0, "model.language_model.layers.0.self_attn.q_proj")
    tower = _linear(1, "model.vision_tower.encoder.layers.0.self_attn.q_proj")
    index = ModuleIndex([decoder, tower])
    assert index.find("model.layers.0.self_attn.q_proj").site is decoder  # type: ignore[union-attr]
    assert index.find("model.vision_tower.encoder.layers.0.self_attn.q_proj").site is tower  # type: ignore[union-attr]
    assert ModuleIndex([decoder]).find("model.vision_tower.encoder.layers.0.self_attn.q_proj") is None
    with pytest.raises(AdapterMismatch, match="could be any of"):
        index.find("self_attn.q_proj")


def test_experts_are_found_one_by_one_and_fused() -> None:
    index = ModuleIndex([*_experts(0, "model.layers.0.mlp.experts"), _linear(2, "model.layers.0.mlp.gate")])
    fused = index.find("model.layers.0.mlp.experts")
    assert fused is not None
    assert fused.is_fused
    for path, leaf in (("mlp.experts.1.down_proj", "down_proj"), ("block_sparse_moe.experts.1.w2", "down_proj")):
        one = index.find(f"model.layers.0.{path}")
        assert one is not None
        assert (one.site.leaf, one.expert, one.is_fused) == (leaf, 1, False)
    router = index.find("model.layers.0.block_sparse_moe.gate")
    assert router is not None
    assert router.site.index == 2
    assert index.find("model.layers.0.mlp.experts.1.up_proj") is None
    assert index.find("model.layers.0.mlp.experts.1.gate_up_proj") is None
    assert index.find("model.layers.1.mlp.experts.1.down_proj") is None
    with pytest.raises(AdapterMismatch, match="expert 2, but .* has 2 experts"):
        index.find("model.layers.0.mlp.experts.2.down_proj")


def test_patterns_match_as_in_peft() -> None:
    patterns = Patterns(
        {"q_proj": 1, r"layers\.1\.mlp\.(up|gate)_proj": 2, "layers.0.mlp.up_proj": 3}, "rank_pattern"
    )
    assert patterns.find([Q]) == 1
    assert patterns.find(["model.layers.1.mlp.up_proj"]) == 2
    assert patterns.find(["model.layers.0.mlp.up_proj"]) == 3
    assert patterns.find(["model.layers.11.mlp.up_proj"]) is None
    assert patterns.find(["model.layers.0.self_attn.xq_proj"]) is None


def test_conflicting_patterns_are_an_error() -> None:
    assert Patterns({"q_proj": 4, r".*q_proj": 4}, "alpha_pattern").find([Q]) == 4
    with pytest.raises(AdapterFormatError, match=rf"alpha_pattern.*{Q}.*'q_proj': 4.*'\.\*q_proj': 8"):
        Patterns({"q_proj": 4, r".*q_proj": 8}, "alpha_pattern").find([Q])
    with pytest.raises(AdapterFormatError, match="no regular expression"):
        Patterns({"(q_proj": 4}, "rank_pattern")


@pytest.mark.parametrize(
    "config",
    [
        {"r": "8"},
        {"r": 0},
        {"r": True},
        {"lora_alpha": "16"},
        {"lora_alpha": float("nan")},
        {"lora_alpha": 10**400},
        {"use_rslora": "yes"},
        {"rank_pattern": [1]},
        {"rank_pattern": {"q": 1.5}},
        {"lora_B_layout": "mixed"},
    ],
)
def test_fields_of_a_wrong_type_are_named(config: dict[str, object]) -> None:
    with pytest.raises(AdapterFormatError, match=next(iter(config))):
        AdapterConfig.parse(config)


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "ADALORA"},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1]},
        {"alora_invocation_tokens": [1, 2]},
        {"use_bdlora": {"nblocks": 2}},
        {"layer_replication": [[0, 2]]},
        {"use_qalora": True},
        {"kasa_config": {"beta": 1.0}},
        {"monteclora_config": {"num_samples": 1}},
        {"arrow_config": {"top_k": 1}},
        *({"init_lora_weights": name} for name in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")),
    ],
)
def test_refused_fields_are_named(config: dict[str, object]) -> None:
    (line,) = refused_fields(config)
    assert next(iter(config)) in line


def test_harmless_fields_pass() -> None:
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, fan_in_fan_out=True, bias="lora_only")
    for initialisation in (True, False, "gaussian", "eva", "orthogonal", "mica"):
        assert refused_fields(config.to_dict() | {"init_lora_weights": initialisation}) == []
    assert unknown_fields(config.to_dict()) == []
    assert unknown_fields({"use_xlora": True, "use_ylora": False}) == ["use_xlora"]


def test_every_field_of_the_installed_peft_is_known() -> None:
    known = _HARMLESS.union(field for field, _ in _REFUSED)
    assert {field.name for field in fields(LoraConfig) if field.init} - known == set()


@pytest.mark.parametrize(
    ("version", "plain", "transposed"),
    [
        ("0.17.1", "swapped", "normal"),
        ("0.18.1", "swapped", "normal"),
        ("0.19.0", "swapped", "swapped"),
        ("0.19.1", "normal", "normal"),
        ("0.21.2", "normal", "normal"),
        ("1.0.0", "normal", "normal"),
        ("0.22.1.dev0@abc", "normal", "normal"),
        ("0.19.1.dev0@abc", None, None),
        (None, None, None),
        ("main", None, None),
    ],
)
def test_orientation_by_release(version: str | None, plain: str | None, transposed: str | None) -> None:
    assert orientation_of(version, transposed=False) == plain
    assert orientation_of(version, transposed=True) == transposed
