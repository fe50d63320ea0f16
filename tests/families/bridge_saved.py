"""What Megatron-Bridge saves of the models of `bridge_golden.py`. By hand:

    python tests/families/bridge_saved.py OUT CASE

The environment is that of `bridge_golden.py`, with protobuf. The bridge loads the case's hub files and saves the model
by its own `save_megatron_model`: `iter_0000000` with items, `.metadata`, `run_config.yaml` (the provider's fields),
`train_state.pt`. `fixtures/bridge/saved/CASE` is what it made; paths in it were given other names of the same length.
"""

from __future__ import annotations

import bridge_on_cpu  # isort: skip  # before megatron

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from bridge_cases import CASES
from bridge_golden import changed, hub_model, nvidia


def main(out: Path, name: str) -> None:
    import megatron.bridge.models  # noqa: F401
    from megatron.bridge.training.model_load_save import save_megatron_model
    from megatron.core.extensions import transformer_engine

    case = next(case for case in CASES if case.name == name)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp) / "model"
        hub_model(case, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(changed(config, case.posing)))
        torch.distributed.init_process_group("gloo", init_method=f"file://{temp}/store", rank=0, world_size=1)
        with bridge_on_cpu.OnCpu():
            if case.before:
                case.before()
            module, load = nvidia(case, folder, 1)
            load()
            transformer_engine.TEGroupedLinear._split_extra_state = lambda self, state: [state] * self.num_gemms
            save_megatron_model([module], str(out))
    os._exit(0)  # the saver's helpers wait for work


if __name__ == "__main__":  # which a helper of the saver imports anew
    main(Path(sys.argv[1]), sys.argv[2])
