"""What type a value of a config must have is known by the class alone: no other family is loaded to read a config."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.families.config.forms import FORMS
from ckpt_tool.families.config.words import ConfigWords, kinds_of
from ckpt_tool.families.models import CLASSES

LLAMA = Path(__file__).parents[2] / "fixtures" / "convert" / "llama" / "hf"
SIZES = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 8}
ALL = {key: kind for facts in CLASSES.values() for key, kind in kinds_of(facts).items()}
RUN = """
import sys
import ckpt_tool
ckpt_tool.convert({source!r}, {out!r}, to={to!r}, tp=2, dry_run=True)
front = "ckpt_tool.families.models."
print(*sorted(name.removeprefix(front) for name in sys.modules if name.startswith(front)))
"""


class Watched(dict[str, Any]):
    """A config that notes which keys are looked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_key_that_a_form_reads_has_the_type_that_any_class_gives_it(kind: str) -> None:
    facts = CLASSES[kind]
    config = Watched({**SIZES, "intermediate_size": 8})
    for form in facts.forms:
        FORMS[form].to(ConfigWords(config, facts), {})
    own = kinds_of(facts)
    assert not {key: ALL[key] for key in config.read if key in ALL and key not in own}


def test_a_conversion_loads_the_family_that_its_config_names(tmp_path: Path) -> None:
    program = RUN.format(source=str(LLAMA), out=str(tmp_path / "out"), to="megatron-dist")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["llama"]
