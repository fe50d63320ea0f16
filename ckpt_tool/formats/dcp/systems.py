"""Systems that save DCPs with a meaning of their own: which keys show it, and why such a folder is not read as plain
DCP.

    common_state/shard_0_1, rng_state/shard_0_2, ..._extra_state/shard_0_1   Megatron's torch_dist (core 0.12 and later)
    optimizer.param_to_group_meta.<name>.lr                                  Megatron-FSDP, `--ckpt-format fsdp_dtensor`
    args, checkpoint_version, model.module.<name>                            the same without its optimizer

Megatron-FSDP stores plain boxes of nested dicts, but a gated `linear_fc1.weight` lies in two, `weight_w` (gate) and
`weight_v` (up), and its fp32 weights are the master weights: read as plain DCP it is a model with tensors that no
loader knows. Source: NVIDIA/Megatron-LM core 0.19.1 `training/checkpointing.py` (`preprocess_fsdp_dtensor_state_dict`),
`core/transformer/fsdp_dtensor_checkpoint.py`; `core/dist_checkpointing/mapping.py` for torch_dist's objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tool.errors import Incomplete, UnknownFormat
from ckpt_tool.formats.dcp.folders import UNFINISHED

NOT_READ, DEEPER = "E1640", "E1644"
MEGATRON_OBJECTS = (b"common_state/shard_0_1", b"._extra_state/shard_0", b"rng_state/shard_0")
_GROUP_META = "optimizer.param_to_group_meta."
_JOB = {"args", "checkpoint_version"}
_MODULE = re.compile(r"model\d*\.module\.")


def refuse(tensors: Iterable[str], objects: Iterable[str], shown: str, *, finished: bool) -> None:
    """Raise for a save whose keys have another system's meaning: Incomplete E0385 for Megatron's torch_dist that lacks
    its metadata.json (with it, another format claims the folder, but from there alone: UnknownFormat E1644),
    UnknownFormat
    E1640 for Megatron-FSDP.

    tensors, objects: the keys of one `.metadata`. shown: its folder. finished: has that folder a metadata.json?
    """
    objects = set(objects)
    if any(word.decode() in key for key in objects for word in MEGATRON_OBJECTS):
        if finished:
            raise UnknownFormat(
                "the checkpoint, a torch_dist of Megatron, is in a folder below the one that was given",
                code=DEEPER,
                path=shown,
                hint=f"pass its own folder: {shown.rstrip('/')}",
            )
        raise Incomplete(
            "a Megatron save that was not finished: there is no metadata.json, which is written last",
            code=UNFINISHED,
            path=shown,
            hint="take the last checkpoint that was finished, or copy the file from where the job wrote it",
        )
    if any(key.startswith(_GROUP_META) for key in objects) or (
        objects >= _JOB and any(_MODULE.match(key) for key in tensors)
    ):
        raise UnknownFormat(
            "a Megatron-FSDP checkpoint (fsdp_dtensor), which this build does not read as one",
            code=NOT_READ,
            path=shown,
            hint="--from dcp reads it as plain DCP, everything as stored: fp32 weights, a gated fc1 in "
            "halves _w and _v",
        )
