"""What a run says of the adapter that it trains: readers of a job's adapters leave it for its writers, and for what
makes a PEFT adapter of it.

    run_config.yaml of Megatron-Bridge     peft: {_target_: megatron.bridge.peft.lora.LoRA, dim: 8, alpha: 16, ...}
    ms-swift's arguments                   lora_rank, lora_alpha, ... (`systems.megatron.adapter`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt_tool.core.hints import Hint

_WORDS = {"gated_linear_unit": "swiglu", "num_moe_experts": "num_experts"}  # the provider's -> the arguments'


@dataclass(frozen=True, slots=True)
class LoraHints(Hint):
    """What the run says of its adapter."""

    KEY: ClassVar[str] = "lora"
    peft: Mapping[str, Any]  # the section of that name of `run_config.yaml`
    model: Mapping[str, Any]  # the base's fields
    base: str = ""  # where the run took the base from, "" where nothing says it

    @property
    def arguments(self) -> dict[str, Any]:
        """The base's fields as Megatron-LM's arguments: what the provider has another word for."""
        if not self.model:
            return {}
        said = {word: self.model[own] for own, word in _WORDS.items() if own in self.model}
        return {**self.model, **said, "group_query_attention": self.model.get("group_query_attention", True)}

    @property
    def tensor_ranks(self) -> int | None:
        """How many tensor ranks the run had, None where nothing says it."""
        stated = self.model.get("tensor_model_parallel_size")
        return stated if type(stated) is int and 0 < stated < 1 << 20 else None

    @property
    def kind(self) -> str:
        """The class: LoRA, VLMLoRA, CanonicalLoRA, DoRA; "" where nothing says it."""
        return str(self.peft.get("_target_") or "").rpartition(".")[2]
