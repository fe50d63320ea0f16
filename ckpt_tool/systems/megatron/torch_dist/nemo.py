"""NeMo's folder around a torch_dist checkpoint: the model's config in place of a Megatron job's arguments.

    NAME/weights/              torch_dist, `module.` in front of the keys; the common state is Lightning's, no `args`
         context/model.yaml    the model and its `config:` as data, each object a map with `_target_`
         context/io.json, ...  the run as a graph of objects to call, the tokenizer: not read

The config's fields become Megatron-LM's arguments, where those have the same word or one that is known. It is read as
plain YAML: nothing is imported or called. The strategy puts the run's degrees into it before training, so a folder that
training saved states them; they count where the embedding is cut in as many parts (a config may be another run's).

How the optimizer is stored (`MegatronStrategy.sharded_state_dict_metadata`, `_strategy_lib.setup_megatron_optimizer`):
`fully_sharded_model_space` by default, under names. `ckpt_parallel_save_optim=False` requests `dp_zero_gather_scatter`,
flat buffers; NeMo 2.2 to 2.5 pass the request on only if the optimizer's `sharded_state_dict` has a parameter of that
name, which a chain (core 0.10 and newer, even of one optimizer) lacks: they save the default. Never `dp_reshardable`.
Without the distributed optimizer its states are stored like the model; with Megatron-FSDP it is a DCP (`fsdp_dtensor`).

NeMo 1 has the same in an archive, `.nemo` (`storage.archive`), or the folder that it was packed from:

    model_weights/             torch_dist, `model.` in front of the keys, weights alone
    model_config.yaml          the model in NeMo's own words: `activation: fast-swiglu`, `bias: false`
    ..._tokenizer.model, ...   not read

Source (NVIDIA-NeMo/NeMo, 2.0.0 to 2.5.0): `nemo/lightning/io/pl.py` (`ckpt_to_weights_subdir`), `io/mixin.py`
(`io_dump`, `_io_dump_yaml`), `pytorch/strategies/megatron_strategy.py` (`save_checkpoint`, `parallelism`),
`megatron_parallel.py` (`_module_sharded_state_dict`), `_strategy_lib.py` (`set_model_parallel_attributes`); of August
2025 `collections/nlp/models/language_modeling/megatron_gpt_model.py` (`sharded_state_dict`), `megatron_base_model.py`
(`build_transformer_config`), `parts/nlp_overrides.py` (`NLPSaveRestoreConnector`), `conf/megatron_gpt_config.yaml`.
Cost: one small file. What it does not do: `io.json`; weights of NeMo 1 that are one file a rank
(`tp_rank_00_pp_rank_000/model_weights.ckpt`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.extras import Opaque
from ckpt_tool.core.tensor import MODEL as MODEL_STATE
from ckpt_tool.formats.dcp_container.dcp_metadata import DcpTensorEntry
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts import strict_yaml
from ckpt_tool.systems.megatron.args import NAMESPACE
from ckpt_tool.systems.megatron.stored_names import EMBEDDING, stem
from ckpt_tool.systems.megatron.torch_dist.keys import parse

WEIGHTS = "weights/"
CONTEXT = "context/"
MODEL = f"{CONTEXT}model.yaml"
# NeMo 1's names of the same.
WEIGHTS_1 = "model_weights/"
MODEL_1 = "model_config.yaml"
_BESIDE = {
    WEIGHTS: (CONTEXT, MODEL),
    WEIGHTS_1: ("", MODEL_1),
}  # folder of the weights -> (folder next to it, the model's config)
_LIMIT = 1 << 20  # bytes
_WORDS = {  # TransformerConfig's -> the arguments'
    "gated_linear_unit": "swiglu",
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "seq_length": "max_position_embeddings",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
_WORDS_1 = {"encoder_seq_length": "seq_length", "rotary_percentage": "rotary_percent"}
_NORMS_1 = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
_REVERSED = {"share_embeddings_and_output_weights": "untie_embeddings_and_output_weights"}
_REVERSED |= {"add_bias_linear": "disable_bias_linear"}
TENSOR = "tensor_model_parallel_size"
_OF_THE_RUN = frozenset(
    f"{dim}_parallel_size" for dim in ("pipeline_model", "context", "expert_model", "expert_tensor")
) | {TENSOR, "virtual_pipeline_model_parallel_size"}
# modules of Transformer Engine's that the local spec has without a state of their own; its linears have one in both
_TE_ALONE = ("core_attention._extra_state", "norm._extra_state")


def with_context(
    tree: Tree, folder: str, extras: dict[str, Any], tensors: Mapping[str, DcpTensorEntry], states: Iterable[str]
) -> list[Note]:
    """Put the arguments of a folder of NeMo's into `extras`, which has none; what was done, and what is not read.

    tensors: as stored, by key. states: keys of extra states, without positions.
    """
    if folder not in _BESIDE or "args" in extras:
        return []

    below, model = _BESIDE[folder]
    beside = sorted(path for path in tree.listing() if path.startswith(below) and not path.startswith(folder))
    if not beside:
        return []

    others = [path for path in beside if path != model]
    notes = [Note("N-nemo", f"{len(others)} files of NeMo's context are left out: {', '.join(others[:8])}")]
    notes = notes if others else []
    if model not in beside:
        return [*notes, Note("N-nemo", f"there is no {model}: the model's sizes are not stated")]

    try:
        document = strict_yaml.parse(tree.read_whole(model, limit=_LIMIT))
    except strict_yaml.NotPlain as e:
        return [*notes, Note("N-nemo", f"the model's sizes are not known: {e.what}", model)]

    config = document
    known = arguments_of_1
    if model != MODEL_1:
        config = document.get("config") if isinstance(document, dict) else None
        known = arguments_of
    found = known(config) if isinstance(config, dict) else {}
    if not found:
        return [*notes, Note("N-nemo", "there is no config of a model in it: its sizes are not known", model)]

    notes += [] if model == MODEL_1 else _run(found, tensors, states, model)
    sharding = extras.get("content_metadata")
    found["use_distributed_optimizer"] = isinstance(sharding, dict) and "distrib_optim_sharding_type" in sharding
    extras["args"] = Opaque(NAMESPACE, (), found)
    return [*notes, Note("N-nemo", f"{len(found)} arguments are those of NeMo's config", model)]


def _run(found: dict[str, Any], tensors: Mapping[str, DcpTensorEntry], states: Iterable[str], model: str) -> list[Note]:
    """What the tensors say of the run, into `found`: how its layers are built; no degrees that are another run's."""
    keys = tuple(states)
    if keys:
        te = any(key.endswith(_TE_ALONE) for key in keys)
        found["transformer_impl"] = "transformer_engine" if te else "local"
    own = ((parse(key), entry) for key, entry in tensors.items() if key.endswith(EMBEDDING))
    cut = {len(entry.pieces) for key, entry in own if key.state == MODEL_STATE and stem(key.key) == EMBEDDING}
    if not cut or cut == {found.get(TENSOR, 1)}:
        return []
    stated = {word: found.pop(word) for word in _OF_THE_RUN if word in found}
    line = f"its degrees are not taken: {stated.get(TENSOR, 1)} tensor ranks, but {EMBEDDING} is cut in {max(cut)}"
    return [Note("N-nemo", line, model)]


def arguments_of_1(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of NeMo 1's config as arguments; {} where it uses none of Megatron-Core's models, or says that it is
    none of a language model."""
    if config.get("mcore_gpt") is False:
        return {}
    said = {_WORDS_1.get(key, key): value for key, value in config.items() if value is not None}
    activation = str(config.get("activation") or "gelu")
    norm = str(config.get("normalization") or "layernorm").lower()
    gated = activation.endswith("glu")
    said |= {"swiglu": gated, "squared_relu": activation == "squared-relu", "normalization": _NORMS_1.get(norm, norm)}
    if gated and not activation.endswith("swiglu"):
        said["quick_geglu"] = False  # gated by another function: no argument of Megatron-LM's says it
    said["layernorm_zero_centered_gamma"] = norm == "layernorm1p"
    said["add_bias_linear"] = config.get("bias", True)
    said.setdefault("share_embeddings_and_output_weights", True)
    return {key: value for key, value in arguments_of(said).items() if key not in _OF_THE_RUN}


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config as arguments; those that are objects to call are left out."""
    plain = {
        key: value
        for key, value in config.items()
        if isinstance(value, int | float | str | bool) and not key.startswith("_")
    }
    if type(plain.get("num_layers")) is not int:
        return {}
    out = {**plain, **{word: plain[own] for own, word in _WORDS.items() if own in plain}}
    out |= {word: not plain[own] for own, word in _REVERSED.items() if isinstance(plain.get(own), bool)}
    out["group_query_attention"] = "num_query_groups" in plain
    return out
