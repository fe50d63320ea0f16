"""What Megatron's arguments say of the model, and what `--spec` changes in them."""

from __future__ import annotations

import pytest

from ckpt_tool.systems.megatron.args import facts_of, with_spec
from ckpt_tool.systems.megatron.stored_names import GROUPED, SEQUENTIAL, TE_GROUPED

DENSE = {"num_layers": 4, "transformer_impl": "local", "num_experts": None}
MOE = {"num_layers": 4, "transformer_impl": "local", "num_experts": 8, "moe_grouped_gemm": True}


@pytest.mark.parametrize(
    ("args", "spec", "te", "container"),
    [
        (DENSE, None, False, SEQUENTIAL),
        (DENSE, "te", True, SEQUENTIAL),
        (DENSE, "local", False, SEQUENTIAL),
        (MOE, None, False, GROUPED),
        (MOE, "te", True, TE_GROUPED),
        (MOE, "local", False, SEQUENTIAL),
        ({}, "te", True, TE_GROUPED),
        ({}, "local", False, SEQUENTIAL),
        ({}, None, False, SEQUENTIAL),
    ],
)
def test_a_spec_that_is_asked_for_comes_before_the_arguments(
    args: dict[str, object], spec: str | None, te: bool, container: str
) -> None:
    facts = facts_of(with_spec(args, spec), spec)
    assert (facts.te, facts.container, facts.stated) == (te, container, bool(args))


def test_the_arguments_say_what_was_written() -> None:
    told = with_spec(MOE, "te")
    assert told["transformer_impl"] == "transformer_engine" and told["moe_grouped_gemm"] is True
    assert with_spec(told, "local")["moe_grouped_gemm"] is False and with_spec(told, None) is told
    assert "moe_grouped_gemm" not in with_spec(DENSE, "te")
