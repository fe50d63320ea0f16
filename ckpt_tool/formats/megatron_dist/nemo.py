"""NeMo 2's folder around a torch_dist checkpoint: the model's config where a Megatron job has its arguments.

    NAME/weights/              torch_dist, `module.` in front of the keys; the common state is Lightning's, no `args`
         context/model.yaml    the model and its `config:` as data, each object a map with `_target_`
         context/io.json, ...  the run as a graph of objects to call, the tokenizer: not read

The config's fields become Megatron-LM's arguments, where those have the same word or one that is known. It is read as
plain YAML: nothing is imported or called. Degrees are the run's, not the model's: the config does not state them.

Source (NVIDIA-NeMo/NeMo, 2.5.0rc0): `nemo/lightning/io/pl.py` (`ckpt_to_weights_subdir`), `io/mixin.py` (`io_dump`,
`_io_dump_yaml`), `pytorch/strategies/megatron_strategy.py` (`save_checkpoint`), `megatron_parallel.py`
(`_module_sharded_state_dict`). Cost: one small file. What it does not do: `.nemo` archives.
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
_LIMIT = 1 << 20  # bytes
_WORDS = {  # TransformerConfig's -> the arguments'
    "gated_linear_unit": "swiglu",
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "seq_length": "max_position_embeddings",
}
_REVERSED = {"share_embeddings_and_output_weights": "untie_embeddings_and_output_weights"}
_REVERSED |= {"add_bias_linear": "disable_bias_linear"}
# of the run, which sets them later: in the config they are its defaults
_OF_THE_RUN = frozenset(
    f"{dim}_parallel_size" for dim in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
) | {"virtual_pipeline_model_parallel_size"}


def with_context(tree: Tree, folder: str, extras: dict[str, Any]) -> list[Note]:
    """Put the arguments of a NeMo 2 folder into `extras`, which has none; what was done, and what is not read."""
    beside = sorted(path for path in tree.listing() if path.startswith(CONTEXT)) if folder == WEIGHTS else []
    if not beside or "args" in extras:
        return []
    others = [path for path in beside if path != MODEL]
    notes = [Note("N-nemo", f"{len(others)} files of NeMo's context stay behind: {', '.join(others[:8])}")]
    notes = notes if others else []
    if MODEL not in beside:
        return [*notes, Note("N-nemo", f"there is no {MODEL}: the model's sizes are not stated")]
    try:
        document = strict_yaml.parse(tree.read_whole(MODEL, limit=_LIMIT))
    except strict_yaml.NotPlain as e:
        return [*notes, Note("N-nemo", f"the model's sizes are not known: {e.what}", MODEL)]
    config = document.get("config") if isinstance(document, dict) else None
    found = arguments_of(config) if isinstance(config, dict) else {}
    if not found:
        return [*notes, Note("N-nemo", "there is no config of a model in it: its sizes are not known", MODEL)]
    sharding = extras.get("content_metadata")
    found["use_distributed_optimizer"] = isinstance(sharding, dict) and "distrib_optim_sharding_type" in sharding
    extras["args"] = Opaque(NAMESPACE, (), found)
    return [*notes, Note("N-nemo", f"{len(found)} arguments are those of NeMo's config", MODEL)]


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
