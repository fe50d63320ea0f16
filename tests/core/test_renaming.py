"""Rules of `--rename`: what each makes of a name, and which rules can't be read."""

from __future__ import annotations

import pytest

from ckpt_tool.core.renaming import BadRule, read_rule, rename


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        ("module.*=*", "module.layers.0.weight", "layers.0.weight"),
        ("*=model.*", "layers.0.weight", "model.layers.0.weight"),
        ("blocks.*.attn.*=layers.*.self_attn.*", "blocks.11.attn.q.weight", "layers.11.self_attn.q.weight"),
        ("*.gamma=*.weight", "norm.gamma", "norm.weight"),
        ("head.weight=lm_head.weight", "head.weight", "lm_head.weight"),
        ("h.[0-9].*=x.*", "h.3.w", "x.w"),  # a class is matched and not taken back
        ("*.a.*=*-*", "p.a.q.a.r", "p.a.q-r"),  # a * matches as much as it can
        (r"w\=1=w_1", "w=1", "w_1"),
        (r"re:^h\.(\d+)\.=layers.\1.", "h.12.mlp.weight", "layers.12.mlp.weight"),
        (r"re:(?P<part>gate|up)_proj=\g<part>", "mlp.gate_proj.up_proj", "mlp.gate.up"),  # every place, as re.sub does
        (r"re:weight$(?<\=weight)=kernel", "a.weight", "a.kernel"),
    ],
)
def test_a_rule_gives_a_name(rule: str, old: str, new: str) -> None:
    assert rename([old], [read_rule(rule)]).names == {old: new}


def test_a_name_that_no_rule_matches_stays() -> None:
    assert rename(["lm_head.weight"], [read_rule("module.*=*")]).names == {}


def test_the_first_rule_that_matches_wins() -> None:
    rules = [read_rule(text) for text in ("a.*=first.*", "*.w=*.second", "a.*=third.*", "zz*=*")]
    renamed = rename(["a.w", "b.w"], rules)
    assert renamed.names == {"a.w": "first.w", "b.w": "b.second"}
    assert (renamed.shadowed, renamed.unmatched) == (["a.*=third.*"], ["zz*=*"])


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("module.*", "has no ="),
        (r"a\=b", "has no ="),
        ("=b", "nothing before"),
        ("a=", "nothing after"),
        ("a=*", "has 1 *, the old one 0"),
        ("a.*=b.?", "no other wildcard"),
        ("re:(a=b", "not a regular expression"),
        (r"re:a=\1", "invalid group reference"),
        ("re:(?=a)b=c", "not a regular expression"),  # the = of the look-ahead splits it
        ("a" * 20_000 + "=b", "want at most"),
    ],
)
def test_a_rule_that_can_not_be_read_says_why(rule: str, said: str) -> None:
    with pytest.raises(BadRule, match=said.replace("*", r"\*").replace("(", r"\(")):
        read_rule(rule)
