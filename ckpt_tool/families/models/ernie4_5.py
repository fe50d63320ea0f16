"""ERNIE 4.5, dense. Paddle: PaddleFormers 1.2.0, transformers/ernie4_5/modeling.py, qkv_proj grouped by KV head.

Releases named `-Paddle` have the root `ernie.` and, where heads share keys, qkv_proj as [Q|K|V] (`base.SHARED_KEYS`). Without a
config this can't be decided, and the user has to state it. `paddle-hf` is what the Trainer calls a Hugging Face save:
fused weights as they are in Paddle, the others transposed.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import CONTIGUOUS, DECODER, NLP_HEAD, OWN_KEYS, PADDLE_FUSED, SHARED_KEYS, Family, Variant
from ckpt_tool.families.model_class import DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="ernie4_5",
    classes=(
        ModelClass(
            "ernie4_5", "Ernie4_5ForCausalLM", ("sizes", "heads", "rope", "tied", "silu", "use_bias"),
            megatron={**GATED, "rotary_interleaved": True},
            paddle_defaults={"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "max_position_embeddings": 131072,
                      "head_dim": 128, "num_key_value_heads": 2, "tie_word_embeddings": True, "use_bias": False},
            also=("Ernie4_5_ForCausalLM",),
        ),
    ),
    axes=DECODER,
    hub=hub.DENSE + hub.BIASES + """
        lm_head.bias : v
    """,
    dialects={
        "megatron": megatron.DENSE + megatron.BIASES,
        "paddle": Variant(apart=True, of=PADDLE_FUSED + """
            lm_head.bias : v
            model.layers.{i}.<input|post_attention>_layernorm.weight : h
            model.layers.{i}.mlp.up_gate_proj.bias : ((1 + 1) f) = ..<gate|up>_proj.bias : f
            model.layers.{i}.<self_attn.o_proj|mlp.down_proj>.bias : h
        """),
        "paddle-hf": Variant("paddle", like_hub=True),
        "paddle-grouped": Variant("paddle", root="ernie.", over=NLP_HEAD, when=OWN_KEYS),
        "paddle-contiguous": Variant("paddle", "ernie.", NLP_HEAD, swap=CONTIGUOUS, when=SHARED_KEYS),
    },
)  # fmt: skip
