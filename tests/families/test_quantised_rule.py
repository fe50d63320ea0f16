"""Which weights `--quantize` takes, against the `nn.Linear` and the experts of every family's real class.

A library replaces linear layers alone, so nothing else may be taken; of linear layers inside the layers of a language
model those stay that choose or let pass, each of them by name here.
"""

from __future__ import annotations

import re

import pytest
from family_models import NAMES, config_of, real_class

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import StoredArray, TensorKey, simple_tensor
from ckpt_tool.quantised.layer_choice import OUTSIDE, TOWERS, why_not

# ends of modules that stay though they are linear layers of a layer
STAY = re.compile(
    r"(_gate|router|router\.(proj|classifier)|b_proj|forget_gate\.f(_[ab])?_proj|f_[ab]_proj|in_proj_(ba|a|b)"
    r"|indexer\.\w+|indexer\.scorer\.weights_proj|compressor\.(gate|kv)_proj|compressor\.indexer\.\w+"
    r"|time_mlp\.\d+|attn_norm\.linear)$"
)


@pytest.mark.parametrize("family", NAMES)
def test_only_linear_layers_are_taken_and_few_stay(family: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5")
    model = real_class(config_of(family))
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    taken = set()
    for name, tensor in model.state_dict().items():
        array = StoredArray("file", 0, DTYPES["BF16"], tuple(tensor.shape))
        module = name.removesuffix(".weight")
        why = why_not(simple_tensor(TensorKey(name), array))
        if not why:
            taken.add(module)
            assert module in linear or ".experts." in name, name
        elif module in linear and name.endswith(".weight") and why not in (OUTSIDE, TOWERS):
            assert STAY.search(module), (name, why)
    assert taken or family == "gpt2"  # whose layers are turned, of a class of their own
