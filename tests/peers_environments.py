"""Environments of the real systems that tests marked `peers` run: one each, with a CPU build of torch.

    python tests/peers_environments.py FOLDER megatron mergekit    # FOLDER/megatron and so on; without names: all
    source FOLDER/variables.sh && python -m pytest -m peers tests/acceptance

Every environment is made by `python -m venv` and pip, and asked for what it is for; those that were made are added to
FOLDER/variables.sh. `tests/README.md` says which tests ask for which variable. PIP_* variables are honoured; where the
index has no `+cpu` build of torch, its own is taken. What it does not do: fetch Megatron-LM's sources (MEGATRON_LM).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import NamedTuple

TORCH = "torch==2.13.0"


class Peer(NamedTuple):
    """packages: for pip, beside torch. asks: a line that an environment must run. python: the least, as (3, minor)."""

    variable: str
    packages: tuple[str, ...]
    asks: str
    torch: bool = True
    python: tuple[int, int] = (3, 11)


PEERS = {
    "megatron": Peer(
        "CKPT_MEGATRON_PYTHON",
        ("megatron-core>=0.17,<0.20", "safetensors", "six", "regex", "pyyaml", "pydantic", "triton", "transformers"),
        "import megatron.core.dist_checkpointing, six, regex",
        python=(3, 12),  # megatron-core 0.17 and newer; 0.16 runs on 3.11
    ),
    "deepspeed": Peer(
        "CKPT_DEEPSPEED_PYTHON", ("deepspeed>=0.19,<0.20", "safetensors", "numpy"), "import deepspeed, safetensors"
    ),
    "paddle": Peer(
        "CKPT_PADDLE_PYTHON",
        ("paddlepaddle>=3.3,<3.4", "paddleformers>=1.2,<1.3", "pyarrow<26", "safetensors"),
        "import paddle, paddleformers",
        torch=False,
    ),
    "mergekit": Peer(
        "CKPT_MERGEKIT_PYTHON", ("mergekit>=0.1.5,<0.2", "safetensors", "pyyaml", "pydantic"), "import mergekit.config"
    ),
    "signing": Peer(
        "CKPT_SIGNING_PYTHON", ("model-signing>=1.1", "pyopenssl>=25"), "import model_signing", torch=False
    ),
}
# Imported by tests themselves, where they are installed: `pip install` them into the environment that runs pytest.
BESIDE = ("compressed-tensors>=0.20", "sentence-transformers>=6", "ray>=2.30", "pre-commit>=4")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PEERS))
    asked = parser.parse_args()
    wrong = [name for name in asked.names if name not in PEERS]
    if wrong:
        parser.error(f"no such peer: {', '.join(wrong)}; there are {', '.join(PEERS)}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    failed = [name for name in asked.names or PEERS if not _made(asked.folder.resolve(), name, PEERS[name])]
    print(f"beside them, for the environment that runs pytest: pip install {' '.join(map(repr, BESIDE))}")
    return 1 if failed else 0


def _made(folder: Path, name: str, peer: Peer) -> bool:
    """Is the environment there, and does it run what it is for? Says why not."""
    python = _interpreter(peer.python)
    if python is None:
        print(f"{name}: needs Python {'.'.join(map(str, peer.python))} or newer on the PATH")
        return False
    own = str(folder / name / "bin" / "python")
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = [[python, "-m", "venv", str(folder / name)]]
    torch = [TORCH] if peer.torch else []
    cpu = peer.torch and subprocess.run(steps[0]).returncode == 0
    if cpu and subprocess.run([*pip, f"{TORCH}+cpu"], stderr=subprocess.DEVNULL).returncode == 0:
        torch = [f"{TORCH}+cpu"]
    for step in (*steps, [*pip, *torch, *peer.packages], [own, "-c", peer.asks]):
        if subprocess.run(step).returncode:
            print(f"{name}: failed at {' '.join(step[1:])}")
            return False
    with (folder / "variables.sh").open("a") as file:
        file.write(f"export {peer.variable}={own}\n")
    print(f"{name}: {peer.variable}={own}")
    return True


def _interpreter(least: tuple[int, int]) -> str | None:
    """A Python of at least that version: this one, or one on the PATH that runs."""
    if sys.version_info[:2] >= least:
        return sys.executable
    for minor in range(least[1], least[1] + 3):
        found = which(f"python3.{minor}")
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


if __name__ == "__main__":
    sys.exit(main())
