"""What a reader of Megatron's files records, so that a writer can produce the same files again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt_tool.core.hints import Hint


@dataclass(frozen=True, slots=True)
class MegatronHints(Hint):
    """Properties of a legacy checkpoint that its tensors alone don't show."""

    KEY: ClassVar[str] = "megatron"
    te: bool  # Transformer Engine's names
    container: str | None  # of experts, one of `stored_names.CONTAINERS`
    mtp_inner: str | None  # what an MTP layer calls its inner one
    extra_states: tuple[str, ...]  # keys of the extra states
    counts: tuple[int, ...]  # layers of each chunk
    mtp: tuple[int, ...]  # chunks with MTP layers
    gated: bool  # fc1 holds gate and up
    down_shared: bool  # MLA's down projections are cut
    release: bool  # the folder is `release`, not a step's
    distributed: bool  # with `distrib_optim.pt`
    convolution: str = "_"  # the separator in `conv1d_weight` of Mamba, `_` or `.`


@dataclass(frozen=True, slots=True)
class DistHints(Hint):
    """Properties of a torch_dist checkpoint that its tensors alone don't show."""

    KEY: ClassVar[str] = "dist"
    styles: tuple[str, ...]  # how its keys spell things (`megatron.torch_dist.keys.styles_of`)
    extra_states: Mapping[str, Any]  # key -> shape of its grid
    common_file: bool  # the common state is a file of its own
    integrity: bool  # the folder has an `integrity.json`
    # for each layer, whether it has sliding-window attention; () unless the two kinds are stored under separate keys
    windows: tuple[bool, ...] = ()
