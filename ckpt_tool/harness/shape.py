"""The model that is trained: its sizes, and every parameter by its hub name.

A decoder in the manner of ERNIE 4.5 with experts (family `ernie4_5_moe`): grouped-query attention, a dense first layer,
then layers of routed and shared experts. Small enough for 8 ranks on 2 cores, odd enough that a wrong reshard
shows.

    ModelShape().parameters()[0]  ->  ParameterShape("model.embed_tokens.weight", (100, 64), room="embed", cut=0, ...)

The one idea: tensor parallelism works on `VIRTUAL` = 4 virtual shards whatever the degree, so a dim that 4 doesn't
divide is not cut at all: the parameter is replicated over TP (`ModelShape.indivisible()` has such ones). `cut` is the
dim, None if replicated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ckpt_tool.errors import UsageError

VIRTUAL = 4  # virtual tensor-parallel shards: every TP degree divides it

DType = Literal["bf16", "fp32"]


class ParameterShape(NamedTuple):
    """One tensor of the model under its hub name."""

    name: str
    shape: tuple[int, ...]
    room: str  # "embed", "head" or the global layer number as text
    cut: int | None = None  # the dim that TP cuts; None where it is replicated
    expert: int | None = None
    dtype: DType = "bf16"
    std: float = 0.0  # of the initial values; 0 means ones (a norm)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay touches it: matrices, not norms."""
        return len(self.shape) > 1

    @property
    def is_matrix(self) -> bool:
        """Whether Muon steps it: a matrix of a layer, no embedding and no head."""
        return len(self.shape) == 2 and self.room.isdigit()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes. `vocab` tokens are in `rows` rows (padding never gets a gradient). `experts` 0 makes every layer dense."""

    layers: int = 4
    hidden: int = 64
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 8
    dense_ffn: int = 128
    dense_layers: int = 1
    experts: int = 4
    top: int = 2
    expert_ffn: int = 32
    shared_experts: int = 1
    vocab: int = 97
    rows: int = 100
    router: DType = "fp32"
    tied: bool = False
    sequence: int = 32
    batch: int = 8  # sequences a step: as many microbatches of one sequence
    dropout: float = 0.1
    theta: float = 10_000.0
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        """Raise UsageError E1502 for sizes that the model can't have."""
        for name in ("heads", "kv_heads"):
            if getattr(self, name) % VIRTUAL:
                raise UsageError(
                    f"{name} is {getattr(self, name)}, want a multiple of the {VIRTUAL} virtual shards", code="E1502"
                )
        if (
            self.heads % self.kv_heads
            or self.head_dim % 2
            or self.rows < self.vocab
            or self.top > (self.experts or self.top)
        ):
            raise UsageError(f"sizes that don't go together: {self}", code="E1502")

    @classmethod
    def quick(cls) -> ModelShape:
        """Two layers, four microbatches: a quarter of the cost."""
        return cls(layers=2, batch=4)

    @classmethod
    def indivisible(cls) -> ModelShape:
        """Dims that 4 doesn't divide: vocabulary, dense and expert feed-forward are replicated over TP."""
        return cls(layers=2, batch=4, rows=97, dense_ffn=126, expert_ffn=30)

    def with_(self, **changes: object) -> ModelShape:
        """The same model with some sizes changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        head = "tied" if self.tied else "untied"
        return (
            f"{self.layers} layers, {self.heads}/{self.kv_heads} heads, feed-forward {self.dense_ffn}, "
            f"{self.experts} experts of"
            f" {self.expert_ffn}, {self.vocab} tokens in {self.rows} rows, head {head}"
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    def splits(self, size: int) -> bool:
        """Whether TP cuts a dim of `size`: only where every virtual shard gets an equal part."""
        return size % VIRTUAL == 0

    def parameters(self) -> list[ParameterShape]:
        """Every parameter, in the order of the model. A tied head is no parameter."""
        embed = ParameterShape(
            "model.embed_tokens.weight", (self.rows, self.hidden), "embed", self._cut(0, self.rows), std=0.05
        )
        parameters = [embed]
        for layer in range(self.layers):
            parameters += self._layer(layer)
        parameters.append(ParameterShape("model.norm.weight", (self.hidden,), "head"))
        if not self.tied:
            parameters.append(embed._replace(name="lm_head.weight", room="head"))
        return parameters

    def _layer(self, layer: int) -> list[ParameterShape]:
        room = str(layer)
        root = f"model.layers.{layer}"
        h = self.hidden
        query = self.heads * self.head_dim
        key = self.kv_heads * self.head_dim
        deep = 0.08 / math.sqrt(2 * self.layers)
        parameters = [
            ParameterShape(f"{root}.input_layernorm.weight", (h,), room),
            ParameterShape(f"{root}.self_attn.q_proj.weight", (query, h), room, 0, std=0.08),
            ParameterShape(f"{root}.self_attn.k_proj.weight", (key, h), room, 0, std=0.08),
            ParameterShape(f"{root}.self_attn.v_proj.weight", (key, h), room, 0, std=0.08),
            ParameterShape(f"{root}.self_attn.o_proj.weight", (h, query), room, 1, std=deep),
            ParameterShape(f"{root}.post_attention_layernorm.weight", (h,), room),
        ]
        if not self.is_sparse(layer):
            return parameters + self._list_gated(f"{root}.mlp", room, self.dense_ffn)
        parameters.append(
            ParameterShape(f"{root}.mlp.gate.weight", (self.experts, h), room, dtype=self.router, std=0.08)
        )
        for expert in range(self.experts):
            parameters += self._list_gated(f"{root}.mlp.experts.{expert}", room, self.expert_ffn, expert)
        if self.shared_experts:
            parameters += self._list_gated(f"{root}.mlp.shared_experts", room, self.expert_ffn * self.shared_experts)
        return parameters

    def _list_gated(self, root: str, room: str, ffn: int, expert: int | None = None) -> list[ParameterShape]:
        wide = (ffn, self.hidden)
        deep = 0.08 / math.sqrt(2 * self.layers)
        return [
            ParameterShape(f"{root}.gate_proj.weight", wide, room, self._cut(0, ffn), expert, std=0.08),
            ParameterShape(f"{root}.up_proj.weight", wide, room, self._cut(0, ffn), expert, std=0.08),
            ParameterShape(f"{root}.down_proj.weight", (self.hidden, ffn), room, self._cut(1, ffn), expert, std=deep),
        ]

    def _cut(self, dim: int, size: int) -> int | None:
        return dim if self.splits(size) else None

    def config(self) -> dict[str, object]:
        """The `config.json` that Hugging Face's `ernie4_5_moe` (`ernie4_5` without experts) would have for these
        sizes."""
        return {
            "architectures": ["Ernie4_5_MoeForCausalLM" if self.experts else "Ernie4_5ForCausalLM"],
            "model_type": "ernie4_5_moe" if self.experts else "ernie4_5",
            "moe_intermediate_size": self.expert_ffn,
            "moe_num_experts": self.experts,
            "moe_num_shared_experts": self.shared_experts,
            "moe_k": self.top,
            "moe_layer_start_index": self.dense_layers,
            "moe_layer_end_index": self.layers - 1,
            "moe_layer_interval": 1,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.dense_ffn,
            "vocab_size": self.rows,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": self.epsilon,
            "rope_theta": self.theta,
            "max_position_embeddings": self.sequence,
            "hidden_act": "silu",
            "use_bias": False,
            "torch_dtype": "bfloat16",
        }
