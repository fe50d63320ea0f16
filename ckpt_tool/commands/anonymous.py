"""`ckpt inspect --anonymous`: the document without what says whose checkpoint it is, for a public bug report.

    model.layers.0.acme_gate.weight        becomes   model.layers.0.x7c1f9e02_gate.weight
    /data/acme/run7/iter_0000100           becomes   (hidden)

Only what is listed here stays: the format, the mesh, states, dtypes, shapes, sizes and boxes; of names and files the
numbers and the words that many models and trainers share. Every other word is a keyed hash, the same one wherever the
word appears in the document. Of extras and metadata the outer keys and the kinds of their values stay. Paths, values,
notes, messages and the text of faults are left out. What the document gains later is left out until it is listed here.

The key is new for each run, so that nobody can find a word by trying words. With the same CKPT_ANONYMOUS_KEY two runs
hash alike: for a report that compares two checkpoints. Cost: a microsecond or two for each tensor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NoReturn

from ckpt_tool.errors import UsageError

HIDDEN = "(hidden)"
KEY_VARIABLE = "CKPT_ANONYMOUS_KEY"
LONGEST_NUMBER = 7  # digits: a layer, a rank, an iteration; dates and identifiers are longer

# Words of tensor names that at least two of the known families have.
_MODEL_WORDS = """
    a alpha attention attn audio b base bias blk block blocks c conv core d decoder dense down dt e embed embedding
    embeddings embd expert experts exps f fc feed feedforward ffn final forward freq freqs fused g gate h head heads
    hidden in index indexer inp input inv k key kv language latent layer layernorm layers linear list lm ln local log
    lora mamba merger mixer mlp model module moe mqa mtp norm o out output patch per pos position post pre proj
    projection q qkv qkvz query res residual rope rotary router s scalar scale score self shared shexp sink softmax
    state statics switch t to tok token tokens tower transformer up v value vision visual w weight weights with wk wo
    word wq wv x y z
"""
# Words of files and states, and of what optimizers and quantisers add to a name.
_FILE_WORDS = """
    adam adamw adapter amax and args avg batch bf bin checkpoint checkpoints ckpt codes common config consolidated
    consumed count cp data dcp distcp dp ema ep epoch etp exp extra extras factor float float8 fp fsdp generation
    gguf global group groups gptq grad hf int iter iteration json latest loss lr main manifest master max megatron
    meta metadata min mm momentum mp nf npz num ocdbt of opt optim optimizer packed pad param parameter parameters
    params pdopt pdparams pkl pp process pt pth py pytorch qweight qzeros random rank ranks rng run safetensors
    samples save saved scale scales scheduler seed shape shard sharded sharding size sq stage standard states step
    steps tag temp tensor tensors time tokenizer torch total tp train trained trainer training tree txt txn universal
    version vpp world yaml yml zarr zero zeros
"""
_WORDS = frozenset(_MODEL_WORDS.split()) | frozenset(_FILE_WORDS.split())
_PIECE = re.compile(r"[^\W\d_]+|\d+|[^\w./:\[\] -]+")
# The top modules of classes that pickles name: public packages, whose names say nothing about a user.
_MODULES = frozenset(
    "argparse builtins collections copy_reg copyreg datetime enum functools ml_dtypes numpy omegaconf pathlib "
    "posixpath torch types".split()
)


def anonymize(document: Mapping[str, Any], key: str | None = None) -> dict[str, Any]:
    """What may be shown to anyone of a document of `inspect`. key: of the hashes; by default as the module says."""
    hide = _word_hider(key or os.environ.get(KEY_VARIABLE) or os.urandom(16).hex())
    name_of = cache(lambda text: _PIECE.sub(lambda piece: hide(piece[0]), text))
    public = {
        "schema_version": document["schema_version"],
        "anonymous": True,
        "format": document["format"],
        "path": HIDDEN,
        "resolved": HIDDEN if document["resolved"] else "",
        "mesh": dict(document["mesh"]),
        "total": dict(document["total"]),
        "states": {name_of(state): dict(total) for state, total in document["states"].items()},
        "tensors": [_public_tensor(row, name_of) for row in document["tensors"]],
        "extras": _outline(document["extras"], name_of),
        "notes": _count_hidden(document["notes"], "notes"),
    }
    if "metadata" in document:
        public["metadata"] = _outline(document["metadata"], name_of)
    if "quantization" in document:
        kept = ("scheme", "weights", "parameters", "bytes", "blocks", "bits", "dequantizes")
        public["quantization"] = {field: document["quantization"][field] for field in kept}

    if "security" in document:
        public["security"] = _public_security(document["security"], name_of)
    if "delta" in document:
        delta = document["delta"].items()
        public["delta"] = {field: value for field, value in delta if field != "archive"}

    if "missing" in document:
        public["missing"] = _public_missing(document["missing"], name_of)
    return public


def refuse_with(option: str, shown: str) -> NoReturn:
    """Raise UsageError E3050: this option shows what --anonymous leaves out."""
    raise UsageError(
        f"--anonymous leaves out what {option} shows: {shown}",
        code="E3050",
        hint=f"leave out {option} or --anonymous",
    )


def _word_hider(key: str) -> Callable[[str], str]:
    """The function that gives each word of names as it may be shown."""
    from hashlib import blake2b

    secret = key.encode()[:64]

    @cache
    def hide(word: str) -> str:
        is_common = word.lower() in _WORDS or (word.isdecimal() and len(word) <= LONGEST_NUMBER)
        if is_common:
            return word
        return "x" + blake2b(word.encode("utf-8", "surrogatepass"), key=secret, digest_size=4).hexdigest()

    return hide


def _public_tensor(row: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, Any]:
    public = {
        "name": name_of(row["name"]),
        "state": name_of(row["state"]),
        "dtype": row["dtype"],
        "shape": list(row["shape"]),
        "bytes": row["bytes"],
    }
    if "chunks" in row:
        public["chunks"] = [{**chunk, "file": name_of(chunk["file"])} for chunk in row["chunks"]]
    return public


def _outline(values: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, str]:
    """The keys, with the kind of each value: `int`, `dict of 12`."""
    outline = {}
    for name, value in values.items():
        size = f" of {len(value)}" if isinstance(value, dict | list | tuple) else ""
        outline[name_of(str(name))] = type(value).__name__ + size
    return outline


def _count_hidden(lines: list[str], what: str) -> list[str]:
    return [f"{what} that are left out: {len(lines)}"] if lines else []


def _public_security(security: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, Any]:
    def global_of(name: str) -> str:
        return name if name.partition(".")[0] in _MODULES else name_of(name)

    public: dict[str, Any] = {
        "unsafe": _count_hidden(security["unsafe"], "findings"),
        "globals": [global_of(name) for name in security["globals"]],
    }
    if "files" in security:
        public["files"] = []
        for pickle in security["files"]:
            public["files"].append(
                {
                    "file": name_of(pickle["file"]),
                    "member": name_of(pickle["member"]),
                    "globals": [global_of(name) for name in pickle["globals"]],
                    "unsafe": _count_hidden(pickle["unsafe"], "findings"),
                    "unseen": HIDDEN if pickle["unseen"] else "",
                }
            )
    return public


def _public_missing(missing: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, Any]:
    """What is missing; of the error its code alone."""
    hidden = dict.fromkeys(missing["error"])
    return {
        "files": [{**file, "path": name_of(file["path"])} for file in missing["files"]],
        "tensors": [
            {**tensor, "name": name_of(tensor["name"]), "state": name_of(tensor["state"])}
            for tensor in missing["tensors"]
        ],
        "bytes": missing["bytes"],
        "error": {
            **hidden,
            "code": missing["error"]["code"],
            "path": HIDDEN,
            "exit_code": missing["error"].get("exit_code"),
            "message": f"something of the checkpoint is missing: ckpt explain {missing['error']['code']}",
            "hint": "without --anonymous the error names the files",
            "faults": [],
        },
        "lenient": missing["lenient"],
    }
