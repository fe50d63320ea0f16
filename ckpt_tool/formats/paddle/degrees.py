"""Degrees of a Paddle job: what was asked for, what the source had, and what Paddle can run.

The one idea: `--dp` counts all data ranks. They are sharding ranks unless `--zero 0`, or the source's were not; what is left over
are copies, which keep no files. Expert ranks are carved out of all tensor and sharding ranks of a stage, and Paddle wants EP to be
a multiple of TP then and every data rank to shard:

    tp * sharding == ep * moe_sharding        --tp 2 --dp 4 --ep 4: sharding 4, moe_sharding 2

Sources: PaddleFormers 1.2.0 `trainer/training_args.py` (`_post_init_parallel_degree`), `nn/moe/utils.py` (`_parse_moe_group`).
Codes: E1251 tensor and expert degrees, E1252 degrees that Paddle lacks, E1253 sharding. What it does not do: stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import lcm
from typing import Any, NamedTuple

from ckpt_tool.core.mesh import divisors_near
from ckpt_tool.core.target import Wanted
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.paddle.rules import HEADS, model_type_of, text_config

DEGREE, LACKS, SHARDING = "E1251", "E1252", "E1253"
V1, V2 = "v1", "v2"
_TENSOR = ("mp", "model", "tp", "mpdp")  # `moe_group`s that are the tensor group


class Degrees(NamedTuple):
    """dp: all data ranks. sharding: those that share the states (1: nobody does). version: `v1`, `v2`, "" when nobody does."""

    tp: int
    pp: int
    ep: int
    dp: int
    sharding: int
    version: str

    @property
    def moe_sharding(self) -> int:
        """Ranks that share the states of one expert rank's experts."""
        return self.tp * self.sharding // self.ep if self.ep > 1 else self.sharding


def paddle_hints(wanted: Wanted) -> Mapping[str, Any]:
    """What the source's reader remembered for writing Paddle's formats; {} from a source of another system."""
    own = wanted.hints.get("paddle")
    return own if isinstance(own, Mapping) else {}


def config_of(wanted: Wanted) -> Mapping[str, Any]:
    """The model's config as far as anybody knows it: what `--config` says goes before the source's own."""
    said = (wanted.hints.get("config"), paddle_hints(wanted).get("config"), wanted.options.get("config"))
    known = {key: value for config in said if isinstance(config, Mapping) for key, value in config.items()}
    seen = wanted.extras.get(HEADS)
    return known or ({HEADS: seen} if isinstance(seen, Mapping) else {})


def degrees_of(wanted: Wanted, experts: int, notes: list[str]) -> Degrees:
    """The degrees of the job. experts: the number that expert ranks must divide. Raises UsageError E1251 to E1253."""
    said: Mapping[str, int] = wanted.options.get("degrees") or {}
    tp, pp, ep, dp = (max(1, said.get(name, 1)) for name in ("tp", "pp", "ep", "dp"))
    for name in ("vpp", "etp", "cp"):
        if said.get(name, 1) > 1 and not (name == "etp" and said["etp"] == tp):
            raise UsageError(
                f"--{name} {said[name]}: paddle is written for tensor, pipeline, expert and data ranks", code=LACKS,
                hint=f"the nearest that it takes is --{name} 1",
            )  # fmt: skip
    zero = wanted.options.get("zero")
    if ep > 1:
        dp = _with_experts(tp, ep, dp, experts, notes)
        if zero == 0 and dp > 1:
            raise UsageError(
                f"--zero 0 with --ep {ep}: Paddle's expert ranks are carved out of sharding ranks", code=SHARDING,
                hint="the nearest that it takes is --zero 1",
            )  # fmt: skip
        sharding = dp
    else:
        sharding = 1 if zero == 0 else dp if zero else _inherited(wanted, dp)
    wish = wanted.options.get("sharding") or paddle_hints(wanted).get("sharding") or (V2 if ep > 1 else V1)
    if sharding == 1 and wanted.options.get("sharding"):
        notes.append(nothing_shared(wish))
    if zero is not None and zero > 1:
        notes.append(f"--zero {zero} is written as sharding stage 1: Paddle's files share states, not gradients")
    return Degrees(tp, pp, ep, dp, sharding, wish if sharding > 1 else "")


def nothing_shared(version: object) -> str:
    """What to say where `--sharding` was asked for and one rank holds every state."""
    return f"--sharding {version}: no data ranks share states here, so it changes nothing"


def _with_experts(tp: int, ep: int, dp: int, experts: int, notes: list[str]) -> int:
    """The data ranks that expert ranks can be carved out of. Raises UsageError E1251."""
    if not experts:
        raise UsageError(f"--ep {ep}: the model has no experts", code=DEGREE, hint="leave --ep off")

    def runs(n: int) -> bool:
        return experts % n == 0 and (n == 1 or n % tp == 0)

    if not runs(ep):
        valid = [n for n in range(1, min(experts, 1 << 16) + 1) if runs(n)]
        near = sorted(sorted(valid, key=lambda n: abs(n - ep))[:3])
        why = f"{experts} experts do not divide by {ep}" if experts % ep else f"{ep} is no multiple of --tp {tp}"
        raise UsageError(
            f"--ep {ep}: {why}", code=DEGREE,
            hint=f"--ep that Paddle can run here: {', '.join(map(str, near))} (tp * sharding = ep * moe_sharding)",
        )  # fmt: skip
    least = lcm(tp * dp, ep) // tp
    if least != dp:
        notes.append(
            f"data ranks raised from {dp} to {least}: {ep} expert ranks are carved out of tensor and data ranks"
        )
    return least


def _inherited(wanted: Wanted, dp: int) -> int:
    """Sharding ranks where nobody says: as the source had it, all data ranks where that can't be."""
    own = paddle_hints(wanted)
    before = wanted.hints.get("degrees")
    had = own.get("sharding_degree")
    if type(had) is not int or not isinstance(before, Mapping):
        return dp
    if before.get("dp", 1) == dp and dp % max(had, 1) == 0:
        return max(had, 1)
    return dp if had > 1 or before.get("dp", 1) == 1 else 1


def check_heads(config: Mapping[str, Any], degrees: Degrees, names: Iterable[str]) -> None:
    """Raise UsageError E1251 where tensor ranks would part a head, or a group of heads that lies fused in one matrix."""
    facts = text_config(config)
    fused = any(".qkv_proj." in name for name in names)
    for key, what in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "groups of fused heads")):
        heads = facts.get(key)
        if type(heads) is int and heads > 0 and heads % degrees.tp and (fused or key == "num_attention_heads"):
            raise UsageError(
                f"--tp {degrees.tp} does not divide the {heads} {what}", code=DEGREE,
                hint=f"--tp near that does: {', '.join(map(str, _near(heads, degrees.tp)))}",
            )  # fmt: skip


def _near(n: int, wanted: int) -> list[int]:
    """Divisors of `n` near `wanted`; 1 alone for a number that no model has."""
    return divisors_near(n if n < 1 << 20 else 0, wanted) or [1]


def experts_by_tensor(experts: int, degrees: Degrees, config: Mapping[str, Any]) -> bool:
    """Do tensor ranks share the experts out among themselves (`moe_group`; "mp" is the default of ERNIE's classes)? Raises
    UsageError E1251 where they can't evenly."""
    if degrees.tp == 1 or degrees.ep > 1 or not experts:
        return False
    facts = text_config(config)
    said = facts.get("moe_group")
    default = said is None and model_type_of(facts).startswith("ernie4_5_moe")
    if not default and said not in _TENSOR:
        return False
    if experts % degrees.tp:
        near = _near(experts, degrees.tp)
        raise UsageError(
            f"--tp {degrees.tp}: tensor ranks share {experts} experts among themselves", code=DEGREE,
            hint=f"--tp near that does: {', '.join(map(str, near))}",
        )  # fmt: skip
    return True
