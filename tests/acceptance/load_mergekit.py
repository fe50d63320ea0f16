"""Run by the Python of mergekit (CKPT_MERGEKIT_PYTHON): merge by each config of a JSON file, and print the versions.

python load_mergekit.py JOBS.json          [{"config": "a.yaml", "out": "merged/a", "seed": 1}, ...]
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import yaml
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.merge import run_merge
from mergekit.options import MergeOptions


def main(jobs: str) -> None:
    torch.set_num_threads(1)
    failed = {}
    for job in json.loads(Path(jobs).read_text()):
        config = MergeConfiguration.model_validate(yaml.safe_load(Path(job["config"]).read_text()))
        options = MergeOptions(quiet=True, copy_tokenizer=False, write_model_card=False, random_seed=job.get("seed"))
        LoaderCache().loaders.clear()
        try:
            run_merge(config, job["out"], options)
        except Exception as e:  # said in the verdict of that job
            failed[job["out"]] = repr(e)
    print(
        json.dumps(
            {"failed": failed, "versions": {name: version(name) for name in ("mergekit", "torch", "transformers")}}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
