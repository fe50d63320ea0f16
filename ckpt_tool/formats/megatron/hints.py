"""What a reader of Megatron's files remembers, so that the same files are written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt_tool.core.hints import Hint


@dataclass(frozen=True, slots=True)
class MegatronHints(Hint):
    """Of the legacy format. te: Transformer Engine's names. container, mtp_inner: what experts and the layers of MTP
    lie in. extra_states: keys of the extra states. counts: layers of each chunk. mtp: chunks with MTP layers. gated,
    down_shared: how fc1 and fc2 were read. release: the folder `release`. distributed: with `distrib_optim.pt`.
    convolution: `_` or `.` in the name of Mamba's."""

    KEY: ClassVar[str] = "megatron"
    te: bool
    container: str | None
    mtp_inner: str | None
    extra_states: tuple[str, ...]
    counts: tuple[int, ...]
    mtp: tuple[int, ...]
    gated: bool
    down_shared: bool
    release: bool
    distributed: bool
    convolution: str = "_"


@dataclass(frozen=True, slots=True)
class DistHints(Hint):
    """Of torch_dist. styles: how its keys spell things (`megatron_dist.keys.styles_of`). extra_states: key -> shape of
    its grid. common_file: is the common state a file? integrity: was there an `integrity.json`? windows: which layers
    look through a window, where their attentions are stored apart."""

    KEY: ClassVar[str] = "dist"
    styles: tuple[str, ...]
    extra_states: Mapping[str, Any]
    common_file: bool
    integrity: bool
    windows: tuple[bool, ...] = ()
