"""Gemma 2: four norms a layer, a tied head unless the config says otherwise. PaddleFormers 1.2.0 has none.

Its norms multiply by 1 + weight, and so do Megatron's with --apply-layernorm-1p (`layernorm_zero_centered_gamma`), which a
Gemma job has on: the stored weights are equal. Megatron: the layer of Megatron-Bridge, models/gemma/gemma2_bridge.py.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import GEMMA, ModelClass
from ckpt_tool.systems.jax import gemma_names as gemma_library
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.llamacpp import names as gguf
from ckpt_tool.systems.megatron import names as megatron
from ckpt_tool.systems.trainers import names as trainers

FAMILY = Family(
    name="gemma2",
    classes=(
        ModelClass(
            "gemma2", "Gemma2ForCausalLM", ("sizes", "heads", "rope", "tied", "gated_gelu", "every_second"),
            megatron=GEMMA,
            unsayable={"attention_bias": False},
            defaults={"rms_norm_eps": 1e-06, "rope_theta": 10000.0, "tie_word_embeddings": True,
                      "initializer_range": 0.02, "hidden_activation": "gelu_pytorch_tanh",
                      "max_position_embeddings": 8192, "head_dim": 256, "num_key_value_heads": 4,
                      "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
                      "query_pre_attn_scalar": 256},
        ),
    ),
    axes={**DECODER, "c": "d // 2", **maxtext.IN_PAIRS},
    hub=hub.GEMMA,
    centred=True,
    dialects={
        "megatron": megatron.GEMMA,
        "gguf": gguf.GEMMA2,
        "torchtune": trainers.TUNE_GEMMA2,
        "torchtune-0.6": Variant("torchtune", swap=("mlp_norm|mlp_scale", "mlp_scale|mlp_norm")),
        "gemma": gemma_library.GEMMA2,
        **maxtext.gemma2(),
    },
)  # fmt: skip
