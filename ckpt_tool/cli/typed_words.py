"""What people type who know another tool: the verb, option or value of ours that does what they mean.

Shown in hints alone. Nothing typed is taken for another word, and no hint leads to a verb that deletes.
"""

from __future__ import annotations

DELETING = frozenset(("prune", "clean"))  # verbs that no near miss may suggest

# verb -> what to write
VERBS_MEANT = {
    "split": "ckpt convert SRC OUT --to safetensors --max-shard-size 5GB, or ckpt reshard SRC OUT --tp N",
    "shard": "ckpt reshard SRC OUT --tp N, or ckpt convert SRC OUT --to safetensors --max-shard-size 5GB",
    "join": "ckpt merge SRC OUT",
    "consolidate": "ckpt convert SRC OUT --to safetensors",
    "unshard": "ckpt convert SRC OUT --to safetensors",
    "gather": "ckpt convert SRC OUT --to safetensors",
    "edit": "ckpt merge SRC OUT --remove-keys PATTERN, or ckpt convert SRC OUT --to FORMAT --rename OLD=NEW",
    "rename": "ckpt convert SRC OUT --to FORMAT --rename OLD=NEW",
    "quantize": "ckpt convert SRC OUT --to safetensors --quantize SCHEME",
    "quantise": "ckpt convert SRC OUT --to safetensors --quantize SCHEME",
    "dequantize": "ckpt convert SRC OUT --to safetensors --dequantize",
    "dequantise": "ckpt convert SRC OUT --to safetensors --dequantize",
    "cast": "ckpt convert SRC OUT --to FORMAT --dtype bf16",
    "export": "ckpt convert SRC OUT --to safetensors",
    "import": "ckpt convert SRC OUT --to FORMAT",
    "copy": "ckpt convert SRC OUT --to FORMAT",
    "cp": "ckpt convert SRC OUT --to FORMAT",
    "upload": "ckpt convert SRC s3://BUCKET/OUT --to FORMAT",
    "rm": "ckpt merge SRC OUT --remove-keys PATTERN (a copy without these tensors)",
    "remove": "ckpt merge SRC OUT --remove-keys PATTERN (a copy without these tensors)",
    "delete": "ckpt merge SRC OUT --remove-keys PATTERN (a copy without these tensors)",
    "strip": "ckpt reshard SRC OUT --drop optimizer, or ckpt merge SRC OUT --remove-keys PATTERN",
    "list": "ckpt inspect SRC",
    "ls": "ckpt inspect SRC",
    "info": "ckpt inspect SRC",
    "show": "ckpt inspect SRC",
    "view": "ckpt inspect SRC",
    "tree": "ckpt inspect SRC",
    "describe": "ckpt inspect SRC",
    "cat": "ckpt inspect SRC --match NAME --stats",
    "stats": "ckpt inspect SRC --stats",
    "compare": "ckpt diff A B",
    "check": "ckpt verify SRC",
    "hash": "ckpt verify SRC -v",
    "checksum": "ckpt verify SRC -v",
    "validate-checkpoint": "ckpt verify SRC",
    "lora": "ckpt merge BASE ADAPTER OUT --method lora",
    "fold": "ckpt merge BASE ADAPTER OUT --method lora",
    "average": "ckpt merge RUN OUT --method average --last N",
}

# option -> option, whatever the verb
OPTIONS_MEANT = {
    "--tensor-parallel-size": "--tp",
    "--tensor-model-parallel-size": "--tp",
    "--target-tensor-parallel-size": "--tp",
    "--tp-size": "--tp",
    "--pipeline-parallel-size": "--pp",
    "--pipeline-model-parallel-size": "--pp",
    "--target-pipeline-parallel-size": "--pp",
    "--pp-size": "--pp",
    "--expert-parallel-size": "--ep",
    "--expert-model-parallel-size": "--ep",
    "--target-expert-parallel-size": "--ep",
    "--ep-size": "--ep",
    "--expert-tensor-parallel-size": "--etp",
    "--context-parallel-size": "--cp",
    "--data-parallel-size": "--dp",
    "--world-size": "--dp",
    "--num-gpus": "--dp",
    "--num-ranks": "--dp",
    "--num-layers-per-virtual-pipeline-stage": "--vpp",
    "--virtual-pipeline-model-parallel-size": "--vpp",
    "--format": "--to",
    "--output-format": "--to",
    "--target-format": "--to",
    "--saver": "--to",
    "--loader": "--from",
    "--input-format": "--from",
    "--torch-dtype": "--dtype",
    "--out-dtype": "--dtype",
    "--precision": "--dtype",
    "--quantization": "--quantize",
    "--outtype": "--gguf-type",
    "--max-shard": "--max-shard-size",
    "--shard-size": "--max-shard-size",
    "--overwrite": "--force",
    "--exclude": "--remove-keys",
    "--include": "--keep-keys",
    "--drop-layers": r"--remove-keys 're:\.layers\.(2|3)\.'",
    "--remove-layers": r"--remove-keys 're:\.layers\.(2|3)\.'",
    "--lora": "--method lora",
    "--average": "--method average",
    "--strip": "--drop",
    "--safe-serialization": "--to safetensors",
    "--drop-optimizer": "--drop optimizer",
    "--no-optimizer": "--drop optimizer",
    "--strip-optimizer": "--drop optimizer",
}

# options of other tools for what are arguments here
ARGUMENTS_MEANT = frozenset(
    ("--input", "--in", "--src", "--source", "--load", "--load-dir", "--checkpoint", "--checkpoint-dir", "--model")
    + ("--output", "--dst", "--dest", "--target", "--save", "--save-dir", "--output-dir", "--out-dir", "-o", "-i")
)
