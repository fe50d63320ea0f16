"""What a reader of Megatron's files remembers, so that the same files are written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt_tool.core.hints import Hint


@dataclass(frozen=True, slots=True)
class MegatronHints(Hint):
    """Of the legacy format."""

    KEY: ClassVar[str] = "megatron"
    te: bool  # Transformer Engine's names
    # container, mtp_inner: what experts and the layers of MTP lie in
    container: str | None
    mtp_inner: str | None
    extra_states: tuple[str, ...]  # keys of the extra states
    counts: tuple[int, ...]  # layers of each chunk
    mtp: tuple[int, ...]  # chunks with MTP layers. gated,
    gated: bool
    down_shared: bool  # how fc1 and fc2 were read
    release: bool  # the folder `release`
    distributed: bool  # with `distrib_optim.pt`
    convolution: str = "_"  # `_` or `.` in the name of Mamba's


@dataclass(frozen=True, slots=True)
class DistHints(Hint):
    """Of torch_dist."""

    KEY: ClassVar[str] = "dist"
    styles: tuple[str, ...]  # how its keys spell things (`megatron.torch_dist.keys.styles_of`)
    extra_states: Mapping[str, Any]  # key -> shape of its grid
    common_file: bool  # is the common state a file?
    integrity: bool  # was there an `integrity.json`?
    # which layers look through a window, where their attentions are stored apart
    windows: tuple[bool, ...] = ()
