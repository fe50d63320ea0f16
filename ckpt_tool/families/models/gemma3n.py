"""Gemma 3n: gemma3's layers with AltUp, LAuReL and embeddings of each layer. transformers 5.23, models/gemma3n.

`hf` are the released names, `hf-text` those of the text model alone; tensors of the towers keep their names. All MLPs have one
width: of a config that lists a width per layer, the first counts. No project maps it to Megatron: it has hub dialects only.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="gemma3n",
    classes=(
        ModelClass("gemma3n_text", "Gemma3nForCausalLM", also=("Gemma3nTextModel",)),
        ModelClass("gemma3n", "Gemma3nForConditionalGeneration"),
    ),
    axes={
        **DECODER, "f": "intermediate_size[0]", "x": "vocab_size_per_layer_input", "y": "hidden_size_per_layer_input",
        "n": "altup_num_inputs? or 4", "j": "n - 1", "o": "n", "z": "n * n", "p": "h", "l": "laurel_rank",
    },
    language="text_config",
    hub=hub.inside(hub.TIED + hub.SANDWICH + hub.ATTENTION + hub.QKV_BIAS + hub.PROJ_BIAS + hub.QK_NORMS + hub.MLP + """
        model.embed_tokens_per_layer.weight : x (i y)
        model.per_layer_model_projection.weight : (i y) h
        model.per_layer_projection_norm.weight : y
        model.[altup_projections|altup_unembed_projections].{j}.weight : h p
        model.layers.{i}.altup.<correction_coefs|prediction_coefs>.weight : n o, z n
        model.layers.{i}.altup.<modality_router.weight|router_norm.weight|correct_output_scale> : n h, h, h
        model.layers.{i}.laurel.<linear_left|linear_right|post_laurel_norm>.weight : l h, h l, h
        model.layers.{i}.<per_layer_input_gate|per_layer_projection|post_per_layer_input_norm>.weight : y h, h y, h
    """),
    dialects={"hf-text": Variant("hf", instead="model.language_model.", root="model.")},
    saved="hf-text",
    tiny={"vocab_size_per_layer_input": 20, "hidden_size_per_layer_input": 6, "laurel_rank": 3, "num_kv_shared_layers": 0,
          "attention_bias": True, "layer_types": ["sliding_attention", "full_attention"]},
)  # fmt: skip
