"""The order in which a model's parameters are numbered, and what they are called in memory, against the real classes on
no device."""

from __future__ import annotations

import pytest
from family_models import config_of, real_class, saved_shapes

from ckpt_tool.families.models import family_of
from ckpt_tool.formats.state_dict.parameter_order import MODEL_TYPES, class_order
from ckpt_tool.sources.in_memory import in_memory


@pytest.mark.share(3)
@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_the_table_has_the_order_of_the_real_class(model_type: str) -> None:
    torch = pytest.importorskip("torch", reason="the real classes need torch")
    family = family_of(model_type)
    known = next(each for each in family.classes if each.model_type == model_type)
    config = {**config_of(family.name), "model_type": model_type, "architectures": [known.architecture]}
    with torch.device("meta"):
        parameters = {name: tuple(each.shape) for name, each in real_class(config).named_parameters()}
    saved = saved_shapes(config)
    walked = in_memory(config, saved)
    shapes = saved if walked is None else walked.shapes
    assert {name: shapes.get(name) for name in parameters} == parameters, "what is saved comes back as it was in memory"
    order = class_order(sorted(shapes), model_type)
    assert order is not None
    assert [name for name in order if name in parameters] == list(parameters)
