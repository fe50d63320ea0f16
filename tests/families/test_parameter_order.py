"""The order in which a model's parameters are numbered, against the real classes on no device."""

from __future__ import annotations

import pytest
from family_models import config_of, real_class, saved_shapes

from ckpt_tool.families.models import family_of
from ckpt_tool.formats.state_dict.parameter_order import MODEL_TYPES, class_order


@pytest.mark.share(3)
@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_the_table_has_the_order_of_the_real_class(model_type: str) -> None:
    torch = pytest.importorskip("torch", reason="the real classes need torch")
    family = family_of(model_type)
    known = next(each for each in family.classes if each.model_type == model_type)
    config = {**config_of(family.name), "model_type": model_type, "architectures": [known.architecture]}
    with torch.device("meta"):
        names = [name for name, _ in real_class(config).named_parameters()]
    assert set(names) <= saved_shapes(config).keys(), "a class that renames on saving numbers other tensors"
    assert class_order(sorted(names), model_type) == names
