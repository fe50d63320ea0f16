"""JAX: Orbax folders, and the names of MaxText's and Gemma's trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Dialect, Entry, System

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


_MARKS = ("_METADATA", "_sharding", "manifest.ocdbt")  # files that only items of Orbax have


def _may_be_orbax(tree: Tree) -> bool:
    return tree.single is None and any(
        path.endswith(_MARKS) or ".orbax-checkpoint-tmp" in path for path in tree.listing()
    )


SYSTEM = System(
    formats=(
        Entry(
            "orbax",
            "orbax",
            order=150,
            called=("jax", "flax", "maxtext"),
            en="JAX's checkpoints: an item, a step with its items, OCDBT or plain files, zarr 2 and 3, parameters and optax "
            "states of any sharding; written as one OCDBT item that Orbax restores under any other",
            zh="JAX 的检查点：单个 item、含多个 item 的 step，OCDBT 或普通文件，zarr 2 与 3，任意切分的参数与 optax 状态；"
            "写为一个 OCDBT item，Orbax 可按任意其他切分恢复",
            may_be=_may_be_orbax,
        ),
    ),
    dialects=(
        Dialect("maxtext", order=80),
        Dialect("gemma", order=90),
        Dialect("maxtext-unscanned", order=110, variant_of="maxtext"),
    ),
)
