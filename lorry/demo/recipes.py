"""How each demo adapter is trained: where its LoRA sits, at which ranks, and in which key format it is saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """`expert_layers` with `expert_targets` become PEFT's `target_parameters`; no targets means attention only."""

    rank: int
    alpha: int
    attention_targets: tuple[str, ...] = ()
    expert_targets: tuple[str, ...] = ()
    expert_layers: tuple[int, ...] = ()
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)
    use_rslora: bool = False
    per_expert_keys: bool = False
    steps: int = 240
    learning_rate: float = 1e-3

    def lora_arguments(self) -> dict[str, Any]:
        """The arguments of `peft.LoraConfig`."""
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.use_rslora,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "target_modules": list(self.attention_targets),
            "target_parameters": [
                f"layers.{layer}.mlp.experts.{target}"
                for layer in self.expert_layers
                for target in self.expert_targets
            ],
            "task_type": "CAUSAL_LM",
        }


ALL_LAYERS = tuple(range(30))
RECIPES: dict[str, Recipe] = {
    "pirate": Recipe(
        rank=4,
        alpha=8,
        attention_targets=("q_proj", "v_proj"),
        expert_targets=("gate_up_proj", "down_proj"),
        expert_layers=tuple(range(2, 30, 4)),
    ),
    "sql": Recipe(
        rank=12,
        alpha=8,
        attention_targets=("q_proj", "v_proj"),
        expert_targets=("down_proj",),
        expert_layers=tuple(range(20, 28)),
        rank_pattern={"experts.down_proj": 2},
        alpha_pattern={"experts.down_proj": 3},
        use_rslora=True,
    ),
    "json": Recipe(
        rank=4,
        alpha=8,
        attention_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
        expert_targets=("gate_up_proj", "down_proj"),
        expert_layers=tuple(range(11, 19)),
        rank_pattern={"o_proj": 8, "experts.gate_up_proj": 2},
        alpha_pattern={"o_proj": 12, "experts.gate_up_proj": 4},
    ),
    "emoji": Recipe(
        rank=2,
        alpha=4,
        expert_targets=("gate_up_proj", "down_proj"),
        expert_layers=ALL_LAYERS,
        per_expert_keys=True,
    ),
    "butler": Recipe(
        rank=8,
        alpha=16,
        attention_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
        steps=120,
    ),
}
