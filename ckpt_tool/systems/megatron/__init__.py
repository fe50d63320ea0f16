"""Megatron-LM: its three checkpoint formats, tensor names, arguments and passes.

This file registers them; it imports nothing heavy, because it is read at every start of the tool. Each format has a
package of its own (`legacy`, `torch_dist`, `fsdp_dtensor`); the modules next to it are shared by all three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Dialect, Entry, System, SystemPass

if TYPE_CHECKING:
    from ckpt_tool.sources.chosen import Chosen, Conversion
    from ckpt_tool.storage.source import Tree

_DIST_FILES = ("metadata.json", "common.pt")  # every torch_dist checkpoint has one of them
_HEAD = 48 << 10  # bytes of `.metadata` that are searched for keys
_FSDP_WORDS = (b".module.", b".param_to_group_meta.")  # the keys of every Megatron-FSDP checkpoint contain one of them


def _may_be_megatron(tree: Tree) -> bool:
    return tree.single is None and any("mp_rank_" in path for path in tree.listing())


def _may_be_megatron_dist(tree: Tree) -> bool:
    return tree.single is None and any(path.endswith(_DIST_FILES) for path in tree.listing())


def _may_be_megatron_fsdp(tree: Tree) -> bool:
    """Return whether the first keys in `.metadata` are Megatron-FSDP's; the container is a plain DCP."""
    if tree.single is not None:
        return False
    from ckpt_tool.formats.run_pointer import POINTER

    if tree.exists(POINTER):
        return any(path.endswith(".metadata") for path in tree.listing())
    return tree.exists(".metadata") and any(word in tree.head(".metadata", _HEAD) for word in _FSDP_WORDS)


def _has_layer_pattern(chosen: Chosen, job: Conversion) -> bool:
    """--hybrid-layer-pattern"""
    from ckpt_tool.systems.megatron.options import MegatronOptions

    return job.writing.of(MegatronOptions).hybrid_layer_pattern is not None


SYSTEM = System(
    formats=(
        Entry(
            "megatron",
            "legacy",
            order=50,
            called=("megatron-lm", "mcore-legacy", "mp-rank"),
            en="Megatron-LM's legacy `mp_rank_*` folders, with `distrib_optim.pt` or without, every expert container, "
            "`layer_wise_optimizer_R.pt` (read); veRL's adapters, a file a rank (read)",
            zh="Megatron-LM 旧式 `mp_rank_*` 目录，含或不含 `distrib_optim.pt`，各种专家容器，"
            "`layer_wise_optimizer_R.pt`（只读）；veRL 每个 rank 一个文件的适配器（只读）",
            may_be=_may_be_megatron,
        ),
        Entry(
            "megatron-dist",
            "torch_dist",
            order=60,
            called=("nemo", "torch-dist", "mcore", "megatron-core", "megatron-bridge"),
            en="Megatron-Core's `torch_dist`, every optimizer sharding type, written as `fully_reshardable`; adapters of "
            "Megatron-Bridge, NeMo 2's folders and `.nemo` archives",
            zh="Megatron-Core 的 `torch_dist`，各种优化器分片类型，写出为 `fully_reshardable`；"
            "Megatron-Bridge 的适配器，NeMo 2 目录与 `.nemo` 归档",
            may_be=_may_be_megatron_dist,
        ),
        Entry(
            "megatron-fsdp",
            "fsdp_dtensor",
            order=65,
            called=("fsdp-dtensor",),
            en="Megatron-FSDP's `fsdp_dtensor`: gated fc1 in halves, fp32 main weights, groups a parameter",
            zh="Megatron-FSDP 的 `fsdp_dtensor`：门控 fc1 分为两半、fp32 主权重、逐参数的优化器组",
            may_be=_may_be_megatron_fsdp,
        ),
    ),
    dialects=(
        Dialect(
            "megatron",
            order=20,
            extras="passes.arguments_from_config:with_arguments",
            leaving="passes.to_other_names:leave_names",
            missing="hybrid:advise_on_missing",
        ),
        Dialect("megatron-swift", order=100, variant_of="megatron"),
    ),
    passes=(
        SystemPass(
            "layers",
            "--hybrid-layer-pattern none: a HybridModel of Megatron's as a GPTModel",
            _has_layer_pattern,
            "passes.hybrid_layers:as_gpt",
            "before names",
        ),
        SystemPass(
            "pattern",
            "--hybrid-layer-pattern: a GPTModel as a HybridModel, by the letters of its layers",
            _has_layer_pattern,
            "passes.hybrid_layers:as_hybrid",
            "after names",
        ),
    ),
    options="MegatronOptions",
    job_config="source_config:read_arguments",
    adapter_faults="adapter:faults_of_ranks",
)
