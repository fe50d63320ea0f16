"""Paddle: its three formats, configs and AOA programs. Modules at this level are shared by the formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Dialect, Entry, System, SystemPass

if TYPE_CHECKING:
    from ckpt_tool.sources.chosen import Chosen, Conversion
    from ckpt_tool.storage.source import Tree


def _may_be_paddle(tree: Tree) -> bool:
    return any(name.endswith((".pdparams", ".pdopt", ".pd", ".pdema")) for name in tree.names())


def _may_be_paddle_unified(tree: Tree) -> bool:
    # Names alone do not distinguish it from a hub folder: its reader looks for Paddle's optimizer or layout.
    return tree.single is None and any(".safetensors" in name for name in tree.names())


def _may_be_paddle_flex(tree: Tree) -> bool:
    """Whether some files have the names of a flex checkpoint, which begin with a number: `0.metadata`, `1_0.distcp`."""
    names = (path.rpartition("/")[2] for path in tree.listing()) if tree.single is None else ()
    return any(
        name[:1].isdigit() and name.endswith((".metadata", ".lock", ".distcp", ".safetensors")) for name in names
    )


def _has_statements(chosen: Chosen, job: Conversion) -> bool:
    """Whether the user passed `--aoa`."""
    return bool(job.writing.aoa)


SYSTEM = System(
    formats=(
        Entry(
            "paddle",
            "pdparams",
            order=90,
            called=("pdparams", "paddlepaddle"),
            en="PaddlePaddle's files of ranks: `.pdparams`, `.pdopt`, sharding v1 and v2, `sharding_io`, both pickle encodings",
            zh="PaddlePaddle 每个 rank 的文件：`.pdparams`、`.pdopt`，分片 v1 与 v2，`sharding_io`，两种 pickle 编码",
            may_be=_may_be_paddle,
        ),
        Entry(
            "paddle-unified",
            "unified",
            order=100,
            called=("unified", "paddlenlp", "paddleformers"),
            en="unified checkpoints of PaddleNLP and PaddleFormers, merged or a file a rank, LoRA, quantised optimizers",
            zh="PaddleNLP 与 PaddleFormers 的统一检查点：合并的或每个 rank 一个文件，LoRA，量化的优化器",
            may_be=_may_be_paddle_unified,
        ),
        Entry(
            "paddle-flex",
            "flex",
            order=110,
            called=("flex", "flex-checkpoint"),
            en="`.distcp` with `.metadata`: the Trainer's folders and plain `paddle.distributed.save_state_dict`",
            zh="`.distcp` 加 `.metadata`：Trainer 的目录与普通的 `paddle.distributed.save_state_dict`",
            may_be=_may_be_paddle_flex,
        ),
    ),
    dialects=(
        Dialect(
            "paddle",
            order=30,
            hub_config="config:from_paddle",
            own_config="config:paddle_config",
            hints="job:hints_of_config",
        ),
    ),
    passes=(
        SystemPass(
            "statements",
            "--aoa: names and structure by Paddle's statements",
            _has_statements,
            "passes.aoa_statements:named_by_statements",
            "before names",
        ),
    ),
    options="PaddleOptions",
)
