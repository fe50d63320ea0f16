"""Lists the files that trainers write next to the weights of a step, by their exact names.

    checkpoint-100/optimizer.pt, rng_state_3.pth, trainer_state.json     transformers' Trainer
    checkpoint-100/notes.txt, eval_results.json, plots/loss.png          not listed: a person's own files

What a reader takes (weights, indexes, states) and what a signature covers is not listed: readers say that themselves
(`conversion.accounted`). A name counts only where the step shows that its trainer was there (`sign`), and only in the
folder that the trainer puts it into. A trainer that is not listed, or writes more than is listed, costs space: its
steps stay until `--with-other-files`.

Each row names its source. Cost: none. What it does not do: read files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_RANK = r"\d{1,6}"

# What `save_pretrained` of transformers' configs, tokenizers and processors writes. Source: transformers 5.23.0
# `utils/__init__.py` (CONFIG_NAME, GENERATION_CONFIG_NAME, ...), `tokenization_utils_base.py` (*_FILE),
# `VOCAB_FILES_NAMES` of `models/*/tokenization_*.py`, `processing_utils.py` (chat templates).
PRETRAINED = (
    r"config\.json|generation_config\.json"
    r"|tokenizer\.(?:json|model)|tokenizer\.model\.v\d{1,3}|tokenizer_config\.json|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.(?:json|txt|bpe)|merges\.txt|\w+\.tiktoken|entity_vocab\.json|bpe\.codes|normalizer\.json"
    r"|spiece\.model|spm\.model|spm_char\.model|sentencepiece\.model|sentencepiece\.bpe\.model|(?:source|target)\.spm"
    r"|chat_template\.(?:jinja|json)|additional_chat_templates/\w+\.jinja"
    r"|(?:video_)?preprocessor_config\.json|processor_config\.json|audio_tokenizer_config\.json"
    r"|params\.json|README\.md|LICENSE(?:\.txt|\.md)?"
)
# What its models and PEFT's write: `utils/__init__.py` (WEIGHTS_NAME, ...), peft 0.21.2 `utils/constants.py`.
_WEIGHTS = (
    rf"model(?:-{_RANK}-of-{_RANK})?\.safetensors|model\.safetensors\.index\.json"
    rf"|pytorch_model(?:-{_RANK}-of-{_RANK})?\.bin|pytorch_model\.bin\.index\.json"
)
_ADAPTER = r"adapter_config\.json|adapter_model\.(?:safetensors|bin|pt)"


class TrainerFiles(NamedTuple):
    """What one trainer writes into a step, next to the weights."""

    trainer: str
    source: str  # the file of the trainer's code that contains these names
    sign: str  # a path that only a step of this trainer has, "" where any step may have these files
    files: str  # the paths that are its own, below the folder that holds the sign


_ROWS = (
    TrainerFiles(
        "any that saves with transformers or PEFT",
        "as above",
        "",
        rf"{PRETRAINED}|{_ADAPTER}",
    ),
    TrainerFiles(
        "transformers' Trainer",
        "transformers 5.23.0 trainer.py (*_NAME, _save_rng_state, _save_optimizer_and_scheduler)",
        r"trainer_state\.json|training_args\.bin|optimizer\.pt|scheduler\.pt|rng_state(?:_\d+)?\.pth",
        rf"optimizer\.(?:pt|bin)|rank{_RANK}-of-{_RANK}-optimizer\.pt|scheduler\.pt|scaler\.pt"
        rf"|rng_state(?:_{_RANK})?\.pth|trainer_state\.json|training_args\.bin|user_content\.pt"
        rf"|pytorch_model_fsdp\.bin|{_WEIGHTS}|{_ADAPTER}",
    ),
    TrainerFiles(
        "ms-swift",
        "ms-swift 4.6.0 trainers/mixin.py (_save)",
        r"training_args\.bin",
        r"args\.json|predict\.jsonl",
    ),
    TrainerFiles(
        "accelerate",
        "accelerate 1.15.0 utils/constants.py, checkpointing.py, utils/fsdp_utils.py; diffusers 0.42.1 lora_base.py",
        rf"random_states_{_RANK}\.pkl",
        rf"random_states_{_RANK}\.pkl|optimizer(?:_{_RANK})?\.bin|scheduler(?:_{_RANK})?\.bin|sampler(?:_{_RANK})?\.bin"
        rf"|dl_state_dict(?:_{_RANK})?\.bin|custom_checkpoint_{_RANK}\.pkl|scaler\.pt"
        rf"|model(?:_{_RANK})?\.safetensors|pytorch_model(?:_{_RANK})?\.bin"
        rf"|pytorch_model_fsdp(?:_{_RANK})?(?:_rank{_RANK})?\.bin|optimizer_{_RANK}_rank{_RANK}\.bin"
        r"|pytorch_lora_weights\.safetensors",
    ),
    TrainerFiles(
        "DeepSpeed, and what saves through it",
        "DeepSpeed runtime/engine.py (save_checkpoint, _copy_recovery_script), checkpoint/ds_to_universal.py",
        r"latest|(?:[\w.\-]+/)?(?:mp_rank_\d+|(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+)_(?:model|optim)_states\.pt",
        r"latest|latest_universal|zero_to_fp32\.py",
    ),
    TrainerFiles(
        "Lightning",
        "lightning 2.6.6 fabric/utilities/load.py (_METADATA_FILENAME), fabric/strategies/fsdp.py",
        r"\.metadata",
        r"meta\.pt",
    ),
    TrainerFiles(
        "Megatron-Bridge",
        "megatron-bridge 0.3.1 training/checkpointing.py, training/utils/checkpoint_utils.py",
        r"\.metadata|common\.pt|metadata\.json|mp_rank_\d+.*",
        rf"run_config\.yaml|train_state\.pt|latest_train_state\.pt|train_dataloader_dprank{_RANK}\.pt"
        rf"|layer_wise_optimizer_{_RANK}\.pt|tokenizer/(?:{PRETRAINED})",
    ),
    TrainerFiles(
        "Megatron's torch_dist",
        "megatron-core 0.16.1 dist_checkpointing/core.py (CONFIG_FNAME), strategies/common.py, strategies/torch.py",
        r"\.metadata|common\.pt",
        r"common\.pt|metadata\.json|\.metadata",
    ),
    TrainerFiles(
        "NeMo 2",
        "nemo-toolkit 2.4.0 lightning/io/mixin.py (io_dump), pytorch/callbacks/model_checkpoint.py, io/artifact/",
        r"context/io\.json",
        r"context/io\.json|context/model\.yaml"
        r"|context/[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
        rf"|context/(?:\w+/)?(?:{PRETRAINED})",
    ),
    TrainerFiles(
        "veRL: a step, and a component of it",
        "verl 0.9.1 trainer/ppo/ray_trainer.py, utils/checkpoint/*.py, utils/megatron_utils.py (get_*_path)",
        r"(?:actor|critic)/.+|(?:model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|transformer_config\.json"
        r"|(?:model/)?dist_ckpt/.+|fsdp_config\.json",
        rf"data(?:_{_RANK})?\.pt|lora_train_meta\.json|fsdp_config\.json|transformer_config\.json|ckpt_contents\.json"
        rf"|(?:model/)?huggingface/(?:adapter/)?(?:{PRETRAINED}|{_WEIGHTS}|{_ADAPTER})",
    ),
    TrainerFiles(
        "torchtune",
        "torchtune 0.6.1 training/checkpointing/_utils.py, _checkpointer.py",
        r"adapter_model\.pt|recipe_state\.pt|recipe_state/recipe_state\.pt|original_repo_id\.json"
        rf"|model-{_RANK}-of-{_RANK}\.(?:bin|safetensors)",
        rf"recipe_state\.pt|recipe_state/recipe_state\.pt|original_repo_id\.json|model-{_RANK}-of-{_RANK}\.bin|{_ADAPTER}",
    ),
    TrainerFiles(
        "torch's DCP, and Paddle's: files of an older save that the index no longer names",
        "torch 2.13.0 distributed/checkpoint/filesystem.py (DEFAULT_SUFFIX, prefix); paddle save_state_dict.py",
        r"\.metadata|\d{1,6}\.metadata",
        rf"__{_RANK}_{_RANK}\.distcp|{_RANK}_{_RANK}\.distcp|{_RANK}\.metadata",
    ),
    TrainerFiles(
        "torch's own safetensors of DCP",
        "torch 2.13.0 distributed/checkpoint/_hf_utils.py (SHARDED_DIR_NAME, _gen_file_name)",
        rf"sharded/shard-{_RANK}-model-{_RANK}-of-{_RANK}\.safetensors",
        rf"sharded/shard-{_RANK}-model-{_RANK}-of-{_RANK}\.safetensors",
    ),
    TrainerFiles(
        "OLMo-core",
        "ai2-olmo-core 3.0.0 train/checkpoint.py, train/callbacks/config_saver.py",
        r"model_and_optim/\.metadata",
        rf"\.metadata\.json|train/rank{_RANK}\.pt|config\.json|data_paths\.txt",
    ),
    TrainerFiles(
        "prime-rl",
        "PrimeIntellect-ai/prime-rl src/prime_rl/trainer/ckpt.py, orchestrator/ckpt.py",
        r"trainer/\.metadata",
        rf"trainer/dataloader/rank_{_RANK}\.pt|orchestrator/progress\.pt|trainer/STABLE",
    ),
    TrainerFiles(
        "VeOmni",
        "ByteDance-Seed/VeOmni veomni/checkpoint/dcp_checkpointer.py (_EXTRA_STATE_FORMAT)",
        r"model/\.metadata|\.metadata",
        rf"extra_state/extra_state_rank_{_RANK}\.pt|trainer_state_rank_{_RANK}\.pt|checkpoint_metadata\.json",
    ),
    TrainerFiles(
        "Paddle's Trainer",
        "paddleformers 1.2.0 utils/env.py (*_NAME), trainer/trainer.py, trainer/trainer_utils.py",
        r"[\w.\-]+\.(?:pdparams|pdopt|distcp)|saved_signal_\d+|\.saving_info",
        rf"training_args\.bin|trainer_state\.(?:bin|json)|rng_state(?:_{_RANK})?\.pth|\.saving_info|async_save_info\.json"
        rf"|scheduler\.pdparams|scaler\.pdparams|model_meta\.json|shard_meta\.json|model_config\.json"
        rf"|static_name_to_dyg_name\.json|save(?:d)?_signal(?:_TMP)?_{_RANK}"
        rf"|\.(?:model|master|optimizer)_weight\.done\.-?\d{{1,6}}|\.model_done",
    ),
)
_KNOWN = tuple((re.compile(row.sign), re.compile(row.files)) for row in _ROWS)
_PRETRAINED = re.compile(PRETRAINED)


def is_pretrained_file(path: str) -> bool:
    """Is it a config's, a tokenizer's or a processor's file, by its exact name?

    >>> is_pretrained_file("tokenizer.json"), is_pretrained_file("tokenizer_notes.txt")
    (True, False)
    """
    return _PRETRAINED.fullmatch(path) is not None


def written_by_trainers(paths: Iterable[str]) -> Iterator[str]:
    """Those of the paths below a folder that a trainer writes there. The folder: a step, or a checkpoint inside one.

    >>> list(written_by_trainers(["trainer_state.json", "scaler.pt", "eval.json"]))
    ['trainer_state.json', 'scaler.pt']
    """
    listed = list(paths)
    for sign, files in _KNOWN:
        if not sign.pattern or any(sign.fullmatch(path) for path in listed):
            yield from filter(files.fullmatch, listed)
