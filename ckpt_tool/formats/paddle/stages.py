"""Which pipeline stage holds what of a Paddle model: the list of sequential layers, cut as Paddle's segment methods cut it.

The one idea: Paddle's pipeline is one list of layers, `embedding, decoder 0 .. L-1, norm, MTP .. , lm_head`, and a stage is a
run of it. The usual method counts decoder layers alone and gives the ends to the first and the last stage; where the layers do
not divide by the stages, PaddleFormers cuts the whole list evenly instead, the longer runs last:

    4 layers, 2 stages    [embedding 0 1] [2 3 norm lm_head]           layer:DecoderLayer
    5 layers, 2 stages    [embedding 0 1 2] [3 4 norm lm_head]         uniform, 8 items
    --pp-split 3,1        [embedding 0 1 2] [3 norm lm_head]           as it was wished for

Sources: paddlepaddle 3.3.1 `fleet/meta_parallel/parallel_layers/pp_layers.py` (`SegmentLayers`), PaddleFormers 1.2.0
`nn/pp_model.py` (the list, the choice of the method). Cost: linear in the names. What it does not do: virtual stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import bounded
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.paddle.rules import text_config

NO_SPLIT = "E1250"
_LAYER = re.compile(r"^(.*?)\b(?:layers|h)\.(\d{1,9})\.", re.ASCII)
_MTP = re.compile(r"\bmtp_\w+\.(\d{1,9})\.", re.ASCII)
_AHEAD = ("eh_proj", "enorm", "hnorm")  # modules that only layers of multi-token prediction have
_HEADS = ("lm_head", "output_layer", "score", "classifier", "qa_outputs", "cls")


class Items(NamedTuple):
    """The sequential layers of a model. prefix: of the names of decoder layers (`model.`)."""

    prefix: str
    layers: int
    mtp: int

    @property
    def total(self) -> int:
        """Embedding, decoder layers, norm, MTP layers, head."""
        return self.layers + self.mtp + 3

    def at(self, name: str) -> int:
        """The position of the layer that parameter `name` belongs to. What no layer's name says stands with the embedding."""
        found = _LAYER.match(name)
        if found and found[1] == self.prefix:
            number = int(found[2])
            return 1 + number if number < self.layers else 2 + number
        ahead = _MTP.search(name)
        if ahead:
            return 2 + self.layers + min(int(ahead[1]), max(self.mtp - 1, 0))
        words = [word for word in name.split(".") if not word.isdecimal()]
        if any(word in _HEADS for word in words[:-1]):
            return self.total - 1
        return 1 + self.layers if not found and any("norm" in word for word in words) else 0


def items_of(names: Iterable[str], config: Mapping[str, Any]) -> Items:
    """The sequential layers that `names` (structured, global numbers) show. config: tells decoder layers from MTP layers."""
    names = list(names)
    by_prefix: dict[str, set[int]] = {}
    ahead: dict[str, set[int]] = {}
    own: set[int] = set()
    for name in names:
        found = _LAYER.match(name)
        if found:
            by_prefix.setdefault(found[1], set()).add(int(found[2]))
            if any(f".{word}." in name for word in _AHEAD):
                ahead.setdefault(found[1], set()).add(int(found[2]))
        elif mtp := _MTP.search(name):
            own.add(int(mtp[1]))
    if not by_prefix:
        return Items("", 0, len(own))
    prefix = max(by_prefix, key=lambda key: len(by_prefix[key]))
    numbers = by_prefix[prefix]
    said = text_config(config).get("num_hidden_layers")
    layers = most = bounded(max(numbers) + 1, len(names), "layers by the tensors' names")
    if type(said) is int and 0 < said <= layers:
        layers = said
    elif prefix in ahead:
        layers = min(ahead[prefix])
    return Items(prefix, layers, max(most - layers, len(own)))


class Stages(NamedTuple):
    """borders: `pp + 1` positions in the list of layers; stage s holds [borders[s], borders[s + 1]). method: in Paddle's words."""

    items: Items
    borders: tuple[int, ...]
    method: str

    @property
    def pp(self) -> int:
        return len(self.borders) - 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Decoder layers of each stage."""
        last = 1 + self.items.layers
        return tuple(
            max(0, min(stop, last) - max(start, 1)) for start, stop in zip(self.borders, self.borders[1:], strict=False)
        )

    def of(self, name: str) -> int:
        """The stage that holds parameter `name`."""
        at = self.items.at(name)
        return next(stage for stage, stop in enumerate(self.borders[1:]) if at < stop)


def stages_of(items: Items, pp: int, wish: Sequence[int] = (), before: Sequence[int] = ()) -> Stages:
    """The stages of a job with `pp` of them. wish: `--pp-split`. before: decoder layers of each of the source's stages, kept
    where they fit. Raises UsageError E1250."""
    if wish:
        if len(wish) != pp or sum(wish) != items.layers or min(wish) < 0:
            raise UsageError(
                f"--pp-split {','.join(map(str, wish))} does not lay {items.layers} layers on {pp} stages", code=NO_SPLIT,
                hint=f"give {pp} numbers that sum to {items.layers}",
            )  # fmt: skip
        return _by_counts(items, wish, "as --pp-split says")
    if len(before) == pp and sum(before) == items.layers:
        return _by_counts(items, before, "as the source's")
    if pp > items.total:
        raise UsageError(
            f"--pp {pp}: the pipeline is a list of {items.total} layers", code=NO_SPLIT,
            hint=f"the nearest that it takes is --pp {items.total}",
        )  # fmt: skip
    if items.layers % pp == 0 and items.layers or pp == 1:
        return _by_counts(items, [items.layers // pp] * pp, "layer:DecoderLayer")
    size, extra = divmod(items.total, pp)
    sizes = [size + (stage >= pp - extra) for stage in range(pp)]
    return Stages(items, tuple(accumulate(sizes, initial=0)), "uniform")


def _by_counts(items: Items, counts: Sequence[int], method: str) -> Stages:
    inner = tuple(accumulate(counts[:-1], initial=1))[1:]
    return Stages(items, (0, *inner, items.total), method)
