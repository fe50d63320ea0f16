"""Names by class: what is told once of a class is what each name tells."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.target import WantedTensor
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.systems.megatron.torch_dist.alike import classes, spot_of

NUMBERS = st.sampled_from(["0", "1", "7", "03", "12", "1234567890", "\N{ARABIC-INDIC DIGIT THREE}"])
WORDS = st.sampled_from(
    [
        "decoder",
        "layers",
        "mtp",
        "experts",
        "local_experts",
        "experts.local_experts",
        "mlp",
        "weight",
        "",
        "vision_model",
    ]
)
NAMES = st.lists(st.one_of(WORDS, NUMBERS), min_size=1, max_size=7).map(".".join)
LIKELY = st.tuples(NUMBERS, NUMBERS, NUMBERS).map(
    lambda n: f"decoder.layers.{n[0]}.mlp.{'x.' * (n[2] == '7')}{n[2]}.experts.local_experts.{n[1]}.linear_fc1.weight"
)


@given(st.lists(st.one_of(NAMES, LIKELY), min_size=1, max_size=12, unique=True))
def test_each_member_is_what_its_name_tells(names: list[str]) -> None:
    tensors = [WantedTensor(TensorKey(name), (number % 2,), DTYPES["F32"]) for number, name in enumerate(names)]
    found = classes(enumerate(tensors))
    assert sorted(member.number for each in found for member in each.members) == list(range(len(names)))
    for each in found:
        assert each.spot == spot_of(each.name) and each.name == names[each.members[0].number]
        for number, layer, expert in each.members:
            assert spot_of(names[number]) == each.spot._replace(layer=layer, expert=expert)
            assert tensors[number].shape == each.shape
    firsts = [each.members[0].number for each in found]
    assert firsts == sorted(firsts)


def test_what_differs_in_layers_and_experts_alone_is_one_class() -> None:
    names = [
        f"decoder.layers.{i}.mlp.experts.local_experts.{e}.{name}.weight"
        for i in range(3)
        for e in range(4)
        for name in ("linear_fc1", "linear_fc2")
    ]
    tensors = [WantedTensor(TensorKey(name), (2, 2), DTYPES["BF16"]) for name in names]
    assert [len(each.members) for each in classes(enumerate(tensors))] == [12, 12]
    blocks = [WantedTensor(TensorKey(f"vision_model.blocks.{i}.weight"), (2,), DTYPES["BF16"]) for i in range(3)]
    assert [len(each.members) for each in classes(enumerate(blocks))] == [1, 1, 1]
