"""How a job is laid out: degrees, who sits where, which layers a rank holds; and whether the model can take it.

    Layout.parse("tp2,pp2,dp2,ep2")        8 ranks; ZeRO 1 where dp > 1 unless `zero0`..`zero3` says otherwise
    Layout.parse("pp3,split=2-1-1")        an uneven pipeline; `vpp2` interleaves, then the split has pp * vpp numbers

Rank order: tp fastest, then dp, then pp, Megatron's default. Expert ranks are carved out of the data ranks: `ep` = dp %
EP, and the ranks that hold the same experts ("edp") are those of equal dp % EP. A virtual stage g = chunk * PP + pp.

Sums are joined in a fixed order in canonical mode (see `tape`, `gradients`), and that needs degrees that divide: TP 4
virtual shards, DP the microbatches, both powers of two. `check` says what doesn't fit and names the nearest layout that
does.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace

from ckpt_tool.errors import UsageError
from ckpt_tool.harness.pieces import Coordinates
from ckpt_tool.harness.shape import VIRTUAL, ModelShape

Group = tuple[int, ...]  # global ranks, in the order of the group's coordinates

_WORD = re.compile(r"(tp|pp|dp|ep|vpp|zero)(\d{1,4})|split=(\d{1,3}(?:-\d{1,3})*)")


@dataclass(frozen=True, slots=True)
class HarnessLayout:
    """Degrees; `dp` counts all data ranks. `split`: layers a virtual stage, () for as even as can be, larger ones
    first."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    vpp: int = 1
    zero: int = 0
    split: tuple[int, ...] = ()

    # -- text ---------------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str) -> HarnessLayout:
        """A layout from "tp2,pp2,dp2,ep2,vpp2,zero1,split=2-1-1"; what is left out is 1. Raises UsageError."""
        degrees: dict[str, int] = {}
        split: tuple[int, ...] = ()
        for word in filter(None, re.split(r"[,\s]+", text.strip())):
            match = _WORD.fullmatch(word)
            if not match or (match[1] and match[1] in degrees):
                raise UsageError(
                    f"a layout is words like tp2,pp2,dp2,ep2, not {word!r} in {text!r}",
                    code="E1500",
                    hint="words: tpN ppN dpN epN vppN zero0..zero3 split=2-1-1, each once, joined by commas",
                )
            if match[3]:
                split = tuple(map(int, match[3].split("-")))
            else:
                degrees[match[1]] = int(match[2])
        zero = degrees.pop("zero", 1 if degrees.get("dp", 1) > 1 else 0)
        return cls(**degrees, zero=zero, split=split)

    def __str__(self) -> str:
        words = [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "dp", "ep", "vpp") if getattr(self, name) > 1]
        if self.zero != (1 if self.dp > 1 else 0):
            words.append(f"zero{self.zero}")
        if self.split:
            words.append("split=" + "-".join(map(str, self.split)))
        return ",".join(words) or "tp1"

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        """The number of ranks. Experts do not count: `ep` divides `dp`."""
        return self.tp * self.dp * self.pp

    @property
    def stages(self) -> int:
        """Virtual stages."""
        return self.pp * self.vpp

    # -- the position of each rank ------------------------------------------------------------------------------------

    def rank(self, *, tp: int, dp: int, pp: int) -> int:
        """The global rank at these coordinates: tp fastest, then dp, then pp."""
        return tp + self.tp * (dp + self.dp * pp)

    def at(self, rank: int, shape: ModelShape) -> Coordinates:
        """The coordinates of a global rank, and the layers of its chunks."""
        tp = rank % self.tp
        dp = rank // self.tp % self.dp
        pp = rank // self.tp // self.dp
        layers = self.stage_layers(shape)
        chunks = tuple(layers[chunk * self.pp + pp] for chunk in range(self.vpp))
        return Coordinates(rank, tp, pp, dp, dp % self.ep, chunks)

    def stage_layers(self, shape: ModelShape) -> list[tuple[int, ...]]:
        """The global layer numbers of each virtual stage."""
        split = self.split
        if not split:
            least, extra = divmod(shape.layers, self.stages)
            split = tuple(least + (stage < extra) for stage in range(self.stages))
        ends = list(itertools.accumulate(split))
        return [tuple(range(end - count, end)) for end, count in zip(ends, split, strict=True)]

    def tp_group(self, at: Coordinates) -> Group:
        """The tensor parallel group of a rank."""
        return tuple(self.rank(tp=tp, dp=at.dp, pp=at.pp) for tp in range(self.tp))

    def dp_group(self, at: Coordinates) -> Group:
        """The data parallel group of a rank."""
        return tuple(self.rank(tp=at.tp, dp=dp, pp=at.pp) for dp in range(self.dp))

    def ep_group(self, at: Coordinates) -> Group:
        """The expert parallel group of a rank: consecutive data ranks, which together have all experts."""
        first_rank = at.dp - at.ep
        return tuple(self.rank(tp=at.tp, dp=dp, pp=at.pp) for dp in range(first_rank, first_rank + self.ep))

    def edp_group(self, at: Coordinates) -> Group:
        """The data ranks that have the same experts as a rank."""
        return tuple(self.rank(tp=at.tp, dp=dp, pp=at.pp) for dp in range(at.ep, self.dp, self.ep))

    def ends_group(self, at: Coordinates) -> Group:
        """First and last stage: where a tied embedding lives twice. One rank where pp is 1."""
        ends = sorted({0, self.pp - 1})
        return tuple(self.rank(tp=at.tp, dp=at.dp, pp=pp) for pp in ends)

    def groups(self, shape: ModelShape) -> list[Group]:
        """Every group of more than one rank that the job talks in, in an order that is the same on all ranks."""
        groups: dict[Group, None] = {}
        for rank in range(self.world):
            coordinates = self.at(rank, shape)
            for group in (
                self.tp_group(coordinates),
                self.dp_group(coordinates),
                self.ep_group(coordinates),
                self.edp_group(coordinates),
                self.ends_group(coordinates),
            ):
                if len(group) > 1:
                    groups[group] = None
        return sorted(groups)

    # -- whether the model can take it --------------------------------------------------------------------------------

    def faults(self, shape: ModelShape, *, canonical: bool = True, steps: bool = True, muon: bool = False) -> list[str]:
        """What doesn't fit, as lines; `steps` False asks only whether the state can be held, not whether it can
        train."""
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "dp", "ep", "vpp")}
        if small := [f"{name} is {size}, at least 1 is wanted" for name, size in sizes.items() if size < 1]:
            return small

        faults = []
        if VIRTUAL % self.tp:
            faults.append(f"tp is {self.tp}, but the model is made of {VIRTUAL} shards, so tp must divide {VIRTUAL}")

        if self.dp % self.ep:
            faults.append(
                f"ep is {self.ep}, but experts are spread over the {self.dp} data ranks, so ep must divide dp"
            )

        if (shape.experts or 1) % self.ep:
            faults.append(
                f"ep is {self.ep}, but the model has {shape.experts} experts, so ep must divide {shape.experts}"
            )

        if not 0 <= self.zero <= 3:
            faults.append(f"zero is {self.zero}, wanted 0, 1, 2 or 3")
        if muon and self.zero == 3 and self.dp > 1:
            faults.append("zero is 3, but Muon steps whole matrices, so zero must be 0, 1 or 2")
        if self.split and (len(self.split) != self.stages or sum(self.split) != shape.layers or min(self.split) < 1):
            text = "-".join(map(str, self.split))
            faults.append(f"split {text} is not {self.stages} numbers from 1 that add up to {shape.layers} layers")

        if self.stages > shape.layers:
            faults.append(
                f"pp {self.pp} x vpp {self.vpp} is {self.stages} stages, but the model has {shape.layers} layers"
            )

        if self.vpp > 1 and self.pp == 1:
            faults.append(f"vpp is {self.vpp}, but one pipeline stage can't be interleaved")
        if steps and shape.batch % self.dp:
            faults.append(
                f"dp is {self.dp}, but a step has {shape.batch} microbatches, so dp must divide {shape.batch}"
            )

        if steps and canonical and shape.batch & (shape.batch - 1):
            faults.append(
                f"a step has {shape.batch} microbatches: canonical sums pair them, so it must be a power of two"
            )

        return faults

    def check(self, shape: ModelShape, *, canonical: bool = True, steps: bool = True, muon: bool = False) -> None:
        """Raise UsageError (E1501) naming all that doesn't fit, and the nearest layout that does."""
        faults = self.faults(shape, canonical=canonical, steps=steps, muon=muon)
        if faults:
            near = self.nearest(shape, canonical=canonical, steps=steps, muon=muon)
            raise UsageError(
                f"the model can't be laid out as {self}: {faults[0]}",
                code="E1501",
                hint=f"the nearest layout that it can take is {near}",
                faults=faults[1:],
            )

    def nearest(
        self, shape: ModelShape, *, canonical: bool = True, steps: bool = True, muon: bool = False
    ) -> HarnessLayout:
        """The layout closest in all degrees (by ratios) that fits, of at most 64 ranks."""
        zero = min(max(self.zero, 0), 2 if muon else 3)
        degrees = itertools.product((1, 2, 4), range(1, 17), range(1, 17), range(1, 17), range(1, 5))
        fitting = (
            layout
            for tp, pp, dp, ep, vpp in degrees
            if tp * pp * dp <= 64
            and not (layout := HarnessLayout(tp, pp, dp, ep, vpp, zero)).faults(
                shape, canonical=canonical, steps=steps, muon=muon
            )
        )

        def distance(other: HarnessLayout) -> float:
            pairs = zip(self._degrees(), other._degrees(), strict=True)
            return sum(abs(math.log2(max(degree, 0.5) / other_degree)) for degree, other_degree in pairs)

        closest = min(fitting, key=distance)
        keeps_split = replace(closest, split=self.split)
        return closest if keeps_split.faults(shape, canonical=canonical, steps=steps, muon=muon) else keeps_split

    def _degrees(self) -> tuple[int, ...]:
        return self.tp, self.pp, self.dp, self.ep, self.vpp
