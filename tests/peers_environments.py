"""Environments of the real systems that tests marked `peers` run: one each, with a CPU build of torch.

    python tests/peers_environments.py FOLDER megatron mergekit    # FOLDER/megatron and so on; without names: all
    source FOLDER/variables.sh && python -m pytest -m peers

Every environment is made by `python -m venv` and pip, and asked for what it is for; those that were made stand in
FOLDER/variables.sh. megatron-core 0.17 and newer need Python 3.12 (`--python python3.12`); with 3.11 it is 0.16.
`tests/README.md` says which tests ask for which variable. PIP_* variables are honoured; where the index has no `+cpu`
build of torch for that Python, its own is taken (with CUDA's libraries 5 GB). What it does not do: fetch Megatron-LM's
sources (MEGATRON_LM).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TORCH = "torch==2.13.0"


class Peer(NamedTuple):
    """packages: for pip, beside torch, with markers where a release needs a newer Python. asks: a line that it must
    run. built: of the packages, one that pip compiles here, and the variables that ask for it."""

    variable: str
    packages: tuple[str, ...]
    asks: str
    torch: bool = True
    built: tuple[str, dict[str, str]] | None = None


PEERS = {
    "megatron": Peer(
        "CKPT_MEGATRON_PYTHON",
        (
            "megatron-core>=0.17,<0.20; python_version >= '3.12'",
            "megatron-core>=0.16,<0.17; python_version < '3.12'",
            "emerging-optimizers>=0.3,<0.4; python_version >= '3.12'",
            *("safetensors", "six", "regex", "pyyaml", "pydantic", "triton", "psutil", "transformers"),
        ),
        "import megatron.core.dist_checkpointing, psutil, six, regex",
    ),
    # Without its shared-memory op DeepSpeed compiles it when a first test starts two ranks: minutes on two cores, past
    # any limit of a test on a loaded machine, and again in the next; a killed build may leave a lock that all wait for.
    "deepspeed": Peer(
        "CKPT_DEEPSPEED_PYTHON",
        ("safetensors", "numpy", "setuptools", "wheel", "ninja"),
        "from deepspeed.git_version_info import installed_ops; assert installed_ops['deepspeed_shm_comm']",
        built=("deepspeed>=0.19,<0.20", {"DS_BUILD_SHM_COMM": "1", "DS_ACCELERATOR": "cpu"}),
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
    "libraries": Peer(
        "CKPT_LIBRARIES_PYTHON",
        ("sentence-transformers>=6", "diffusers>=0.35", "transformers", "accelerate"),
        "import sentence_transformers, diffusers",
    ),
    "orbax": Peer(
        "CKPT_ORBAX_PYTHON",
        ("orbax-checkpoint>=0.12,<0.13", "jax>=0.10,<0.11", "flax>=0.12", "optax>=0.2.8"),
        "import orbax.checkpoint, flax, optax",
        torch=False,
    ),
    "signing": Peer(
        "CKPT_SIGNING_PYTHON", ("model-signing>=1.1", "pyopenssl>=25"), "import model_signing", torch=False
    ),
}
# Imported by tests themselves, where they are installed: `pip install` them into the environment that runs pytest.
BESIDE = ("compressed-tensors>=0.20", "torchao>=0.18", "ray>=2.30", "pre-commit>=4")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--python", default=sys.executable, help="the interpreter that they are made of; this one")
    asked = parser.parse_args()
    wrong = [name for name in asked.names if name not in PEERS]
    if wrong:
        parser.error(f"no such peer: {', '.join(wrong)}; there are {', '.join(PEERS)}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    made = {name: _made(asked.folder.resolve(), name, PEERS[name], asked.python) for name in asked.names or PEERS}
    print(f"beside them, for the environment that runs pytest: pip install {' '.join(map(repr, BESIDE))}")
    return 0 if all(made.values()) else 1


def _made(folder: Path, name: str, peer: Peer, python: str) -> bool:
    """Is the environment there, and does it run what it is for? Says why not."""
    own = str(folder / name / "bin" / "python")
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = [[python, "-m", "venv", str(folder / name)], [*pip, *peer.packages], [own, "-c", peer.asks]]
    if peer.torch:
        steps[1:1] = [[*pip, _torch_of(python)]]
    environment = dict(os.environ)
    if peer.built is not None:  # with the torch that is there; not a wheel that pip built before without the variables
        environment |= peer.built[1]
        steps[-1:-1] = [[*pip, "--no-build-isolation", "--no-cache-dir", peer.built[0]]]
    for step in steps:
        if subprocess.run(step, env=environment).returncode:
            print(f"{name}: failed at {' '.join(step[1:])}")
            return False
    _note(folder / "variables.sh", peer.variable, own)
    print(f"{name}: {peer.variable}={own}; {_versions(own, peer)}")
    return True


def _torch_of(python: str) -> str:
    """The CPU build of torch, where the index has one for this Python."""
    asked = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", f"{TORCH}+cpu"]
    found = subprocess.run(asked, capture_output=True).returncode == 0
    if not found:
        print(f"no {TORCH}+cpu for {python} in pip's index: its own build is taken")
    return f"{TORCH}+cpu" if found else TORCH


def _note(file: Path, variable: str, value: str) -> None:
    """Put the variable into the file, in place of what it was."""
    old = file.read_text().splitlines() if file.exists() else []
    kept = [line for line in old if not line.startswith(f"export {variable}=")]
    file.write_text("".join(f"{line}\n" for line in (*kept, f"export {variable}={value}")))


def _versions(own: str, peer: Peer) -> str:
    """What was installed of what is pinned, as `megatron-core 0.16.1`."""
    packages = (*peer.packages, *(peer.built[:1] if peer.built else ()))
    names = [re.split("[<>=;]", package)[0] for package in packages if re.search("[<>=]", package)]
    code = "import sys, importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    return subprocess.run([own, "-c", code, *dict.fromkeys(names)], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
