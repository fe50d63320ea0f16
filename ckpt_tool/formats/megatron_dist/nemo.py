"""NeMo 2's folder around a torch_dist checkpoint: the model's config where a Megatron job has its arguments.

    NAME/weights/              torch_dist, `module.` in front of the keys; the common state is Lightning's, no `args`
         context/model.yaml    the model and its `config:` as data, each object a map with `_target_`
         context/io.json, ...  the run as a graph of objects to call, the tokenizer: not read

The config's fields become Megatron-LM's arguments, where those have the same word or one that is known. It is read as
plain YAML: nothing is imported or called. Degrees are the run's, not the model's: the config does not state them.

NeMo 1 has the same in an archive, `.nemo` (`storage.archive`), or the folder that it was packed from:

    model_weights/             torch_dist, `model.` in front of the keys, weights alone
    model_config.yaml          the model in NeMo's own words: `activation: fast-swiglu`, `bias: false`
    ..._tokenizer.model, ...   not read

Source (NVIDIA-NeMo/NeMo, 2.5.0rc0): `nemo/lightning/io/pl.py` (`ckpt_to_weights_subdir`), `io/mixin.py` (`io_dump`,
`_io_dump_yaml`), `pytorch/strategies/megatron_strategy.py` (`save_checkpoint`), `megatron_parallel.py`
(`_module_sharded_state_dict`); of August 2025 `collections/nlp/models/language_modeling/megatron_gpt_model.py`
(`sharded_state_dict`), `megatron_base_model.py` (`build_transformer_config`), `parts/nlp_overrides.py`
(`NLPSaveRestoreConnector`), `conf/megatron_gpt_config.yaml`. Cost: one small file. What it does not do: weights of NeMo
1 that are one file a rank (`tp_rank_00_pp_rank_000/model_weights.ckpt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.extras import Opaque
from ckpt_tool.formats.megatron.args import NAMESPACE
from ckpt_tool.storage import strict_yaml
from ckpt_tool.storage.source import Tree

WEIGHTS, CONTEXT = "weights/", "context/"
MODEL = f"{CONTEXT}model.yaml"
WEIGHTS_1, MODEL_1 = "model_weights/", "model_config.yaml"  # NeMo 1's
_BESIDE = {
    WEIGHTS: (CONTEXT, MODEL),
    WEIGHTS_1: ("", MODEL_1),
}  # weights -> (what lies beside them, the model's config)
_LIMIT = 1 << 20  # bytes
_WORDS = {  # TransformerConfig's -> the arguments'
    "gated_linear_unit": "swiglu",
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "seq_length": "max_position_embeddings",
}
_WORDS_1 = {"encoder_seq_length": "seq_length", "rotary_percentage": "rotary_percent"}
_NORMS_1 = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
_REVERSED = {"share_embeddings_and_output_weights": "untie_embeddings_and_output_weights"}
_REVERSED |= {"add_bias_linear": "disable_bias_linear"}
# of the run, which sets them later: in the config they are its defaults
_OF_THE_RUN = frozenset(
    f"{dim}_parallel_size" for dim in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
) | {"virtual_pipeline_model_parallel_size"}


def with_context(tree: Tree, folder: str, extras: dict[str, Any]) -> list[Note]:
    """Put the arguments of a folder of NeMo's into `extras`, which has none; what was done, and what is not read."""
    if folder not in _BESIDE or "args" in extras:
        return []
    below, model = _BESIDE[folder]
    beside = sorted(path for path in tree.listing() if path.startswith(below) and not path.startswith(folder))
    if not beside:
        return []
    others = [path for path in beside if path != model]
    notes = [Note("N-nemo", f"{len(others)} files of NeMo's context stay behind: {', '.join(others[:8])}")]
    notes = notes if others else []
    if model not in beside:
        return [*notes, Note("N-nemo", f"there is no {model}: the model's sizes are not stated")]
    try:
        document = strict_yaml.parse(tree.read_whole(model, limit=_LIMIT))
    except strict_yaml.NotPlain as e:
        return [*notes, Note("N-nemo", f"the model's sizes are not known: {e.what}", model)]
    config = document if model == MODEL_1 else document.get("config") if isinstance(document, dict) else None
    known = arguments_of_1 if model == MODEL_1 else arguments_of
    found = known(config) if isinstance(config, dict) else {}
    if not found:
        return [*notes, Note("N-nemo", "there is no config of a model in it: its sizes are not known", model)]
    sharding = extras.get("content_metadata")
    found["use_distributed_optimizer"] = isinstance(sharding, dict) and "distrib_optim_sharding_type" in sharding
    extras["args"] = Opaque(NAMESPACE, (), found)
    return [*notes, Note("N-nemo", f"{len(found)} arguments are those of NeMo's config", model)]


def arguments_of_1(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of NeMo 1's config as arguments; {} where it uses none of Megatron-Core's models, or says that it is
    none of a language model."""
    if config.get("mcore_gpt") is False:
        return {}
    said = {_WORDS_1.get(key, key): value for key, value in config.items() if value is not None}
    activation, norm = str(config.get("activation") or "gelu"), str(config.get("normalization") or "layernorm").lower()
    gated = activation.endswith("glu")
    said |= {"swiglu": gated, "squared_relu": activation == "squared-relu", "normalization": _NORMS_1.get(norm, norm)}
    if gated and not activation.endswith("swiglu"):
        said["quick_geglu"] = False  # gated by another function: no argument of Megatron-LM's says it
    said["layernorm_zero_centered_gamma"] = norm == "layernorm1p"
    said["add_bias_linear"] = config.get("bias", True)
    said.setdefault("share_embeddings_and_output_weights", True)
    return arguments_of(said)


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config as arguments; those that are objects to call, or the run's, are left out."""
    plain = {
        key: value
        for key, value in config.items()
        if isinstance(value, int | float | str | bool) and not key.startswith("_") and key not in _OF_THE_RUN
    }
    if type(plain.get("num_layers")) is not int:
        return {}
    out = {**plain, **{word: plain[own] for own, word in _WORDS.items() if own in plain}}
    out |= {word: not plain[own] for own, word in _REVERSED.items() if isinstance(plain.get(own), bool)}
    out["group_query_attention"] = "num_query_groups" in plain
    return out
