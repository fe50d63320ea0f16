"""Gemma 3, text: gemma2 and norms of q and k. `hf-vl` and `hf-vl5` are the language part of the models that see (gemma3_vl), as
their files and as transformers 5 in memory name it, for who wants that alone; what belongs to the tower keeps its names.

Paddle: PaddleFormers 1.2.0, transformers/gemma3_text. Norms and Megatron's layer: see gemma2; models/gemma/gemma3_bridge.py.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, PADDLE_FUSED, Family, Variant
from ckpt_tool.families.model_class import GEMMA, GEMMA3_DEFAULTS, ModelClass
from ckpt_tool.systems.jax import gemma_names as gemma_library
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.llamacpp import names as gguf
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="gemma3",
    classes=(
        ModelClass(
            "gemma3_text", "Gemma3ForCausalLM", ("sizes", "heads", "rope", "tied", "gated_gelu", "every_sixth"),
            megatron={**GEMMA, "qk_layernorm": True},
            unsayable={"attention_bias": False},
            defaults=GEMMA3_DEFAULTS,
            also=("Gemma3TextModel",),
        ),
    ),
    axes={**DECODER, **maxtext.IN_SIXES},
    language="text_config",
    hub=hub.GEMMA + hub.QK_NORMS,
    centred=True,
    dialects={
        "megatron": megatron.GEMMA + megatron.QK_NORMS,
        "gguf": gguf.GEMMA3,
        "gemma": gemma_library.GEMMA3,
        **maxtext.gemma3(),
        "hf-vl": Variant("hf", root="language_model.model.", over="language_model.lm_head.weight : v h = lm_head.weight : v h\n"),
        "hf-vl5": Variant("hf", root="model.language_model."),
        "paddle": Variant(apart=True, of=PADDLE_FUSED + """
            model.layers.{i}.<input|post_attention|pre_feedforward|post_feedforward>_layernorm.weight : h
            model.layers.{i}.self_attn.<q|k>_norm.weight : d
            model.layers.{i}.self_attn.o_proj.bias : h
        """),
        "paddle-hf": Variant("paddle", like_hub=True),
    },
)  # fmt: skip
