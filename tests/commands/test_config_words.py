"""Python's words for floats in a config.json, as the published configs of Mamba models have them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tool.errors import UsageError
from ckpt_tool.sources.config import parsed, read_config

PUBLISHED = (
    '{"model_type": "nemotron_h", "time_step_limit": [0.0, Infinity], "note": "Infinity, \\" NaN", "a": -Infinity}'
)


def test_infinity_is_read_as_transformers_5_writes_it(tmp_path: Path) -> None:
    found = parsed(PUBLISHED.encode(), "config.json")
    assert found["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert found["note"] == 'Infinity, " NaN' and found["a"] == {"__float__": "-Infinity"}
    (tmp_path / "config.json").write_text(PUBLISHED)
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert read_config(str(tmp_path)) == found
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("text", ['{"a": Infinit}', '{"a": InfinityX}', "{NaN: 1}", '{"a": infinity}'])
def test_other_words_stay_faults(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(text.encode(), "config.json")
    assert caught.value.code == "E0239"
