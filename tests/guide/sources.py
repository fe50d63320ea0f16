"""What the words of the guide's commands stand for in the tests: `SRC`, `BASE`, `CONFIG` and others, for each heading.

    Sources(made).put(RECIPES["How do I strip the optimizer?"], folder)     folder/SRC is what two ranks of FSDP2 saved

Most of them are one model in many forms: a Llama of four layers and eight heads, trained for one step of AdamW by
transformers, saved by PyTorch, peft or transformers itself, each made when a recipe first asks for it. Where a system
is not installed (Megatron, Paddle, DeepSpeed, JAX), the form is a fixture that the real system wrote, or the model
converted by `ckpt` and judged elsewhere (`test_answers.py`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from ckpt_tool.cli import run

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
SIZES = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERT_SIZES = {**SIZES, "num_hidden_layers": 2, "head_dim": 8, "num_experts": 8, "moe_intermediate_size": 16}

# heading -> what each word stands for: a path below fixtures/, or the name of a method of `Sources`
RECIPES: dict[str, dict[str, str]] = {
    "How do I load an FSDP2 checkpoint in transformers?": {"SRC": "fsdp2", "CONFIG": "hub"},
    "How do I strip the optimizer?": {"SRC": "fsdp2"},
    "How do I resume on another number of GPUs?": {"SRC": "fsdp2"},
    "How do I turn a DCP folder into one .pt file?": {"SRC": "fsdp2"},
    "How do I start an FSDP2 job from a Hugging Face model?": {"SRC": "hub"},
    "How do I convert an accelerate or Trainer checkpoint with its optimizer?": {"SRC": "safetensors/trainer_qwen3"},
    "How do I convert a DDP .pt file to Hugging Face?": {"SRC": "ddp", "CONFIG": "hub"},
    "How do I convert a Lightning .ckpt to Hugging Face?": {"SRC": "lightning", "CONFIG": "hub"},
    "How do I reshard Megatron TP8 PP4 to TP4 PP2 with the optimizer?": {"SRC": "megatron_tp8_pp4"},
    "How do I convert Megatron to Hugging Face?": {"SRC": "megatron_tp8_pp4"},
    "How do I convert Hugging Face to Megatron?": {"SRC": "hub"},
    "How do I convert Qwen3-MoE to Megatron with EP8?": {"SRC": "qwen3_moe"},
    "How do I convert legacy Megatron folders to torch_dist?": {"SRC": "megatron_tp8_pp4"},
    "How do I make a GGUF from a Megatron checkpoint?": {"SRC": "megatron_tp8_pp4"},
    "How do I convert Hugging Face to GGUF?": {"SRC": "hub"},
    "How do I convert GGUF to Hugging Face?": {"SRC": "quantised_gguf"},
    "How do I convert DeepSpeed ZeRO-3 to Hugging Face?": {"SRC": "zero3", "CONFIG": "hub"},
    "How do I resume DeepSpeed on another number of GPUs?": {"SRC": "deepspeed/z1_bf16_dp4"},
    "How do I convert a Paddle unified checkpoint to Hugging Face?": {"SRC": "paddle-unified/ernie_nm_tp2"},
    "How do I reshard a Paddle checkpoint?": {"SRC": "paddle/llama_bf16_legacy_tp2"},
    "How do I convert a MaxText checkpoint to Hugging Face?": {
        "SRC": "maxtext/qwen3/scanned",
        "CONFIG": "maxtext/qwen3/hub",
    },
    "How do I open an Orbax checkpoint in PyTorch?": {"SRC": "orbax/manager"},
    "How do I convert Meta's consolidated files to Hugging Face?": {"SRC": "meta/llama3_tp4"},
    "How do I convert NeMo to Hugging Face?": {"SRC": "nemo2/llama_tp2"},
    "How do I merge a LoRA adapter into its base?": {"BASE": "hub", "ADAPTER": "adapter"},
    "How do I merge a LoRA adapter into a DCP checkpoint?": {"BASE": "fsdp2", "ADAPTER": "adapter"},
    "How do I merge a LoRA adapter into an FP8 model?": {"BASE": "fp8", "ADAPTER": "adapter"},
    "How do I get a PEFT folder from a Megatron LoRA?": {
        "SRC": "megatron-lora/llama_tp2",
        "CONFIG": "megatron-lora/llama",
    },
    "How do I rename keys?": {"SRC": "hub"},
    "How do I remove the `module.` prefix?": {"SRC": "ddp"},
    "How do I repair the names of a checkpoint that vLLM or SGLang rejects?": {"SRC": "qwen3_moe_in_memory"},
    "How do I remove tensors?": {"SRC": "fsdp2"},
    "How do I drop the last layers?": {"SRC": "hub"},
    "How do I keep only some tensors?": {"SRC": "hub"},
    "How do I restore tensors that fine-tuning lost?": {"SRC": "headless", "BASE": "hub"},
    "How do I average the last checkpoints?": {"RUN": "a_run"},
    "How do I merge two models?": {"A": "hub", "B": "another"},
    "How do I write the EMA as the model?": {"SRC": "torch/ema.pt"},
    "How do I change the dtype?": {"SRC": "hub"},
    "How do I turn FP8 weights into bf16?": {"SRC": "quantized/fp8_block"},
    "How do I quantise to FP8 or INT4?": {"SRC": "hub"},
    "How do I load GPTQ or AWQ weights as compressed-tensors?": {"SRC": "quantized-inputs/gptq_int4"},
    "How do I change the shard size?": {"SRC": "hub"},
    "How do I merge all shards into one file?": {"SRC": "safetensors/hf_llama_sharded"},
    "How do I split or fuse the experts?": {"SRC": "qwen3_moe"},
    "How do I cut the padding off the vocabulary?": {"SRC": "hub"},
    "How do I see what is in a checkpoint?": {"SRC": "fsdp2"},
    "How do I report a fault without showing names?": {"SRC": "fsdp2"},
    "How do I compare two steps?": {"A": "hub", "B": "another"},
    "How do I find out which rank is corrupt?": {"SRC": "corrupt"},
    "How do I check that an export is complete?": {"SRC": "hub"},
    "How do I find the newest step that I can resume from?": {"RUN": "a_run"},
    "How do I delete old steps?": {"RUN": "a_run"},
    "How do I upload to S3?": {"SRC": "hub"},
    "How do I read a checkpoint that is in a store?": {},
    "How do I run a conversion on Slurm?": {"SRC": "hub"},
    "How do I run one plan on many machines?": {"SRC": "hub"},
    "How do I resume after a kill?": {"SRC": "fsdp2", "CONFIG": "hub"},
    "How do I sign a checkpoint?": {"SRC": "hub", "KEY.pem": "private_key", "KEY.pub": "public_key"},
    "How do I read one tensor in Python?": {"SRC": "fsdp2"},
    # verify
    "How do I check a checkpoint before I resume from it?": {"SRC": "fsdp2"},
    "How do I check a large checkpoint in seconds?": {"SRC": "fsdp2"},
    "How do I find the damaged file, tensor and rank?": {"SRC": "damaged"},
    "How do I know that nothing changed on the way?": {"SRC": "hub"},
    "How do I compare a conversion with its source?": {"A": "megatron_tp8_pp4", "B": "hub"},
    "How do I compare with a tolerance?": {"A": "hub", "B": "another"},
    "How do I compare checkpoints whose names differ?": {"A": "ddp", "B": "hub"},
    "How do I use it in CI?": {"SRC": "hub"},
    # python
    "How do I list what a checkpoint holds?": {"SRC": "fsdp2"},
    "How do I get names, shapes and dtypes as data?": {"SRC": "fsdp2"},
    "How do I read a slice without loading the tensor?": {"SRC": "fsdp2"},
    "How do I read optimizer states?": {"SRC": "fsdp2"},
    "How do I load a tensor into torch?": {"SRC": "fsdp2"},
    "How do I convert from Python?": {"SRC": "fsdp2", "CONFIG": "hub"},
    "How do I see a plan first?": {"SRC": "fsdp2"},
    "How do I save a plan and run it in parts?": {"SRC": "fsdp2"},
    "How do I compare and check from Python?": {"A": "hub", "B": "another"},
    "How do I handle errors?": {"SRC": "fsdp2"},
    "How do I show progress?": {"SRC": "fsdp2"},
}

# heading -> patterns of the lines of its output that the page shows; of others those of DEFAULT
DEFAULT = (r"^(from|to) ", r"^wrote ")
LEFT_OUT = (*DEFAULT, r"^left out", r"^  (step|exp_avg|exp_avg_sq|master):")
STATES = (*DEFAULT, r"^state ", r"^(model|master|step|exp_avg|exp_avg_sq) ")
NOTES = (
    *DEFAULT,
    r"^notes",
    r"^  (names|config|Megatron|data ranks|--|no tokenizer|RNG|\d+ )",
    r"^    (--|\S+\.weight$)",
)
SHOWN = {
    "How do I load an FSDP2 checkpoint in transformers?": LEFT_OUT,
    "How do I strip the optimizer?": LEFT_OUT,
    "How do I resume on another number of GPUs?": STATES,
    "How do I reshard Megatron TP8 PP4 to TP4 PP2 with the optimizer?": (*STATES, *NOTES),
    "How do I convert Megatron to Hugging Face?": NOTES,
    "How do I convert Hugging Face to Megatron?": NOTES,
    "How do I convert Qwen3-MoE to Megatron with EP8?": NOTES,
    "How do I make a GGUF from a Megatron checkpoint?": NOTES,
    "How do I convert a Paddle unified checkpoint to Hugging Face?": NOTES,
    "How do I convert a MaxText checkpoint to Hugging Face?": NOTES,
    "How do I merge a LoRA adapter into its base?": (*DEFAULT, r"^notes", "folded"),
    "How do I merge a LoRA adapter into a DCP checkpoint?": (*LEFT_OUT, r"^notes", "folded"),
    "How do I merge a LoRA adapter into an FP8 model?": (*DEFAULT, r"^notes", "folded", "quantised as"),
    "How do I rename keys?": NOTES,
    "How do I remove the `module.` prefix?": NOTES,
    "How do I repair the names of a checkpoint that vLLM or SGLang rejects?": NOTES,
    "How do I remove tensors?": (*DEFAULT, r"^removed", r"^  (model|step|exp_avg|exp_avg_sq):"),
    "How do I convert Hugging Face to GGUF?": NOTES,
    "How do I drop the last layers?": (*DEFAULT, r"^removed", r"^  model:", r"^notes", r"^  num_hidden"),
    "How do I keep only some tensors?": (*DEFAULT, r"^removed", r"^  model:"),
    "How do I average the last checkpoints?": NOTES,
    "How do I merge two models?": NOTES,
    "How do I change the dtype?": (*DEFAULT, r"^notes", r"^  dtype"),
    "How do I turn FP8 weights into bf16?": NOTES,
    "How do I quantise to FP8 or INT4?": (*DEFAULT, r"^quantised as", r"^  tensor ", r"^  model\.\S+ +[\d.]+ +[\d.]+$"),
    "How do I load GPTQ or AWQ weights as compressed-tensors?": NOTES,
    "How do I see what is in a checkpoint?": (r"",),
    "How do I report a fault without showing names?": (r"",),
    "How do I compare two steps?": (r"",),
    "How do I find out which rank is corrupt?": (r"^finding", r"^  +E\d{4}", r"mp_rank", r"tensor ", r"^not "),
    "How do I check that an export is complete?": (r"",),
    "How do I find the newest step that I can resume from?": (r"",),
    "How do I delete old steps?": (r"",),
    "How do I read a checkpoint that is in a store?": (r"^(path|format|total|state|model) ",),
    "How do I run a conversion on Slurm?": (r"^plan",),
    "How do I run one plan on many machines?": (r"^plan", r"^wrote"),
    "How do I sign a checkpoint?": (r"^wrote", r"sign"),
    "How do I check a checkpoint before I resume from it?": (r"^(path|format|mode) ", r"^(sound|complete|intact)[: ]"),
    "How do I check a large checkpoint in seconds?": (r"",),
    "How do I find the damaged file, tensor and rank?": (r"",),
    "How do I know that nothing changed on the way?": (),
    "How do I compare a conversion with its source?": (r"",),
    "How do I compare with a tolerance?": (r"",),
    "How do I compare checkpoints whose names differ?": (r"",),
    "How do I use it in CI?": (r"",),
}


class Sources:
    """The checkpoints that the recipes start from, made below a folder when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, words: dict[str, str], folder: Path) -> None:
        """Copy what each word of a recipe stands for into a folder, under the word."""
        for word, source in words.items():
            place = self.place(source)
            if place.is_dir():
                shutil.copytree(place, folder / word)
            else:
                shutil.copyfile(place, folder / word)

    def place(self, source: str) -> Path:
        if (FIXTURES / source).exists():
            return FIXTURES / source
        made: Path = getattr(self, source)
        return made

    # -- one model, trained for a step ---------------------------------------------------------------------------------

    @cached_property
    def hub(self) -> Path:
        """What transformers saves of the trained model: `config.json` and `model.safetensors`."""
        return self._train() / "hub"

    @cached_property
    def fsdp2(self) -> Path:
        """Two ranks of FSDP2 with AdamW, by `torch.distributed.checkpoint.save`."""
        return self._train() / "fsdp2"

    @cached_property
    def training(self) -> Path:
        """`torch.save` of the model and its optimizer."""
        return self._train() / "training.pt"

    def _train(self) -> Path:
        target = self.folder / "trained"
        if not target.exists():
            target.mkdir()
            script = Path(__file__).with_name("train_fsdp2.py")
            subprocess.run([sys.executable, str(script), str(target)], check=True)
        return target

    @cached_property
    def another(self) -> Path:
        """The same model with other values in one layer."""

        def change(state: dict[str, Any]) -> dict[str, Any]:
            return {name: value * 1.01 if ".layers.2.mlp" in name else value for name, value in state.items()}

        return self._hub_like("another", change)

    @cached_property
    def headless(self) -> Path:
        """The model after a fine-tuning that lost its head."""
        return self._hub_like("headless", lambda state: {k: v for k, v in state.items() if k != "lm_head.weight"})

    def _hub_like(self, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
        from safetensors.torch import load_file, save_file

        target = self.folder / name
        shutil.copytree(self.hub, target)
        state = load_file(target / "model.safetensors")
        save_file(change(state), target / "model.safetensors", {"format": "pt"})
        return target

    @cached_property
    def ddp(self) -> Path:
        """`torch.save` of a model that DDP wrapped."""
        return self._state_dict("ddp.pt", lambda state: {f"module.{name}": value for name, value in state.items()})

    @cached_property
    def lightning(self) -> Path:
        """As Lightning lays out a checkpoint of a module with an attribute `model`."""

        def nest(state: dict[str, Any]) -> dict[str, Any]:
            versions = {"epoch": 0, "global_step": 1, "pytorch-lightning_version": "2.6.6"}
            return {**versions, "state_dict": {f"model.{name}": value for name, value in state.items()}}

        return self._state_dict("lightning.ckpt", nest)

    def _state_dict(self, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
        import torch
        from safetensors.torch import load_file

        target = self.folder / name
        torch.save(change(load_file(self.hub / "model.safetensors")), target)
        return target

    @cached_property
    def a_run(self) -> Path:
        """Three steps of a Trainer."""
        for step in (100, 200, 300):
            shutil.copytree(self.hub, self.folder / "run" / f"checkpoint-{step}")
        return self.folder / "run"

    # -- by ckpt, from the trained model -------------------------------------------------------------------------------

    @cached_property
    def megatron_tp8_pp4(self) -> Path:
        return self._converted("megatron", self.training, "--to", "megatron", "--tp", "8", "--pp", "4")

    @cached_property
    def zero3(self) -> Path:
        return self._converted("zero3", self.training, "--to", "deepspeed", "--zero", "3", "--dp", "4")

    @cached_property
    def quantised_gguf(self) -> Path:
        return self._converted("model.gguf", self.hub, "--to", "gguf", "--gguf-type", "q8_0")

    @cached_property
    def fp8(self) -> Path:
        return self._converted("fp8", self.hub, "--to", "safetensors", "--quantize", "fp8-block")

    def _converted(self, name: str, source: Path, *options: str) -> Path:
        target = self.folder / name
        config = ["--config", str(self.hub)] if source == self.training else []
        assert run(["convert", str(source), str(target), *options, *config, "-q"]) == 0
        return target

    # -- others --------------------------------------------------------------------------------------------------------

    @cached_property
    def adapter(self) -> Path:
        """A LoRA of the trained model, by peft."""
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(3)
        settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(self.hub), settings)
        model.save_pretrained(self.folder / "adapter")
        return self.folder / "adapter"

    @cached_property
    def qwen3_moe(self) -> Path:
        return self._qwen3_moe("qwen3_moe")

    @cached_property
    def qwen3_moe_in_memory(self) -> Path:
        """Saved under the names of transformers' modules, which are not the released ones."""
        return self._qwen3_moe("qwen3_moe_in_memory", save_original_format=False)

    def _qwen3_moe(self, name: str, **options: Any) -> Path:
        import torch
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(2)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERT_SIZES)).save_pretrained(self.folder / name, **options)
        return self.folder / name

    @cached_property
    def corrupt(self) -> Path:
        """A Megatron checkpoint with one damaged byte in the weights of tensor rank 1, stage 0."""
        target = self.folder / "corrupt"
        shutil.copytree(FIXTURES / "megatron" / "hybrid_tp2pp2", target)
        file = target / "iter_0000002" / "mp_rank_01_000" / "model_optim_rng.pt"
        with zipfile.ZipFile(file) as archive:
            largest = max(archive.infolist(), key=lambda record: record.file_size * ("/data/" in record.filename))
        content = bytearray(file.read_bytes())
        content[largest.header_offset + 1000] ^= 1
        file.write_bytes(content)
        return target

    @cached_property
    def damaged(self) -> Path:
        """What four ranks of FSDP2 saved, with a damaged byte in a value of rank 1 and in the pickle of an item of rank
        2."""
        target = self.folder / "damaged"
        shutil.copytree(FIXTURES / "dcp" / "fsdp2_dp4", target)
        for name, offset in (("__1_0.distcp", 14700), ("__2_0.distcp", 23040)):
            file = target / name
            content = bytearray(file.read_bytes())
            content[offset] ^= 16
            file.write_bytes(content)
        return target

    @cached_property
    def private_key(self) -> Path:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (self.folder / "key.pem").write_bytes(private)
        (self.folder / "key.pub").write_bytes(public)
        return self.folder / "key.pem"

    @cached_property
    def public_key(self) -> Path:
        """The other half of the private key."""
        return self.private_key.with_suffix(".pub")
