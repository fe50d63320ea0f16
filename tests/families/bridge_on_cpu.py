"""Megatron-Bridge and mcore-bridge on a machine without a GPU: what their packages want is replaced by plain torch.

Import this before `megatron`. CUDA calls go to the CPU; Transformer Engine becomes plain modules that hold the
parameters which the real ones hold, under the same names and with the same shapes a rank; packages of kernels become
modules in which any name can be looked up. Nothing here computes what a model computes: it is enough to build a model
and to load its weights, and `bridge_golden.py` uses it for that.

Source of the names and shapes: TransformerEngine 2.x `pytorch/module/{linear,layernorm_linear,grouped_linear}.py`,
`pytorch/attention/dot_product_attention/dot_product_attention.py` (`softmax_offset`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

KERNELS = ("transformer_engine", "transformer_engine_torch", "fla", "mamba_ssm", "causal_conv1d",
           "fast_hadamard_transform", "flash_mla", "nvidia_resiliency_ext", "modelopt", "mistral_common", "diffusers",
           "datasets", "tensorboard", "wandb", "qwen_vl_utils", "timm", "open_clip", "mlflow", "comet_ml",
           "megatron.energon", "modelscope", "librosa", "soxr", "av", "PIL", "imageio", "decord",
           "webdataset")  # fmt: skip
VERSIONS = {"transformer_engine": "2.13.0", "mamba_ssm": "2.3.0", "causal_conv1d": "1.5.0", "flash_mla": "1.0.0"}


class _Meta(type):
    """A class of which any attribute can be looked up."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


def _anything(name: str) -> Any:
    return _Meta(name, (), {"__init__": lambda self, *a, **k: None, "__call__": lambda self, f=None, *a, **k: f,
                            "__class_getitem__": classmethod(lambda cls, item: cls)})  # fmt: skip


class _Package(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _anything(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == each or name.startswith(f"{each}.") for each in KERNELS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        made = _Package(spec.name)
        made.__version__ = VERSIONS.get(spec.name, "99.0.0")  # type: ignore[attr-defined]
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in MADE.get(module.__name__, {}).items():
            setattr(module, name, value)


def _empty(*shape: int, dtype: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype or torch.float32, device="cpu"))


def _filled(parameter: torch.Tensor, init: Any) -> None:
    with torch.no_grad():
        parameter.zero_()
    if init is not None:
        init(parameter)


class _Module(torch.nn.Module):
    fp8_meta: dict[str, Any] = {}

    def get_extra_state(self) -> Any:
        return None

    def set_extra_state(self, state: Any) -> None:
        pass

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass


class Norm(_Module):
    def __init__(self, normalized_shape: Any = None, eps: float = 1e-5, *, zero_centered_gamma: bool = False,
                 params_dtype: Any = None, hidden_size: Any = None, **_: Any) -> None:  # fmt: skip
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = _empty(normalized_shape or hidden_size, dtype=params_dtype)
        _filled(self.weight, None if zero_centered_gamma else torch.nn.init.ones_)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, self.eps)


class LayerNorm(Norm):
    def __init__(self, *args: Any, params_dtype: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, params_dtype=params_dtype, **kwargs)
        self.bias = _empty(*self.weight.shape, dtype=params_dtype)
        _filled(self.bias, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, self.bias, self.eps)


class Linear(_Module):
    def __init__(self, in_features: int, out_features: int, *, tp_size: int = 1, tp_group: Any = None,
                 init_method: Any = None, bias: bool = True, return_bias: bool = False,
                 parallel_mode: str | None = None, params_dtype: Any = None, **_: Any) -> None:  # fmt: skip
        super().__init__()
        if tp_group is not None:
            tp_size = tp_group.size()
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.parallel_mode = parallel_mode
        self.use_bias = bias
        self.tp_size = tp_size
        self.weight = _empty(self.out_features, self.in_features, dtype=params_dtype)
        _filled(self.weight, init_method)
        self._cut(self.weight, 0 if parallel_mode == "column" else 1)
        self.bias = None
        if bias:
            self.bias = _empty(self.out_features, dtype=params_dtype)
            _filled(self.bias, None)
            if parallel_mode == "column":
                self._cut(self.bias, 0)

    def _cut(self, parameter: Any, dim: int) -> None:
        parameter.tensor_model_parallel = self.parallel_mode is not None and self.tp_size > 1
        parameter.partition_dim = dim
        parameter.partition_stride = 1


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, *, normalization: str = "LayerNorm",
                 zero_centered_gamma: bool = False, params_dtype: Any = None, **kwargs: Any) -> None:  # fmt: skip
        super().__init__(in_features, out_features, params_dtype=params_dtype, **kwargs)
        self.layer_norm_weight = _empty(in_features, dtype=params_dtype)
        _filled(self.layer_norm_weight, None if zero_centered_gamma else torch.nn.init.ones_)
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = _empty(in_features, dtype=params_dtype)
            _filled(self.layer_norm_bias, None)


class GroupedLinear(_Module):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, *, tp_size: int = 1,
                 init_method: Any = None, bias: bool = True, parallel_mode: str | None = None,
                 params_dtype: Any = None, **_: Any) -> None:  # fmt: skip
        super().__init__()
        self.num_gemms = num_gemms
        self.use_bias = bias
        self.tp_size = tp_size
        self.parallel_mode = parallel_mode
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        for number in range(num_gemms):
            weight = _empty(self.out_features, self.in_features, dtype=params_dtype)
            _filled(weight, init_method)
            weight.partition_dim = 0 if parallel_mode == "column" else 1  # type: ignore[attr-defined]
            weight.tensor_model_parallel = parallel_mode is not None  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", weight)
            if bias:
                self.register_parameter(f"bias{number}", _empty(self.out_features, dtype=params_dtype))
                _filled(getattr(self, f"bias{number}"), None)


class DotProductAttention(_Module):
    def __init__(self, num_attention_heads: int, *_: Any, tp_size: int = 1, tp_group: Any = None,
                 softmax_type: str = "vanilla", **__: Any) -> None:  # fmt: skip
        super().__init__()
        if softmax_type == "learnable":
            size = tp_group.size() if tp_group is not None else tp_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // size, dtype=torch.float32))


class CudaRNGStatesTracker:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.states_: dict[str, Any] = {}


class DelayedScaling:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass


_PYTORCH = {"Linear": Linear, "LayerNormLinear": LayerNormLinear, "GroupedLinear": GroupedLinear,
            "LayerNorm": LayerNorm, "RMSNorm": Norm, "DotProductAttention": DotProductAttention}  # fmt: skip


class RMSNormGated(torch.nn.Module):
    """mamba_ssm's and fla's: one weight."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))


class ShortConvolution(torch.nn.Conv1d):
    """fla's: depthwise."""

    def __init__(self, hidden_size: int, kernel_size: int, *, bias: bool = False, dtype: Any = None, **_: Any) -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, dtype=dtype)


MADE: dict[str, dict[str, Any]] = {
    "transformer_engine.pytorch": _PYTORCH,
    "transformer_engine.pytorch.distributed": {"CudaRNGStatesTracker": CudaRNGStatesTracker},
    "transformer_engine.common.recipe": {"DelayedScaling": DelayedScaling},
    "transformer_engine.pytorch.cpu_offload": {"get_cpu_offload_context": lambda *a, **k: (nullcontext(), None)},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNormGated},
    "fla.modules": {"FusedRMSNormGated": RMSNormGated, "ShortConvolution": ShortConvolution},
}


def _cuda_on_cpu() -> None:
    here = torch.device("cpu")
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[assignment,method-assign]
    torch.nn.Module.cuda = lambda self, *a, **k: self  # type: ignore[assignment,method-assign]
    cuda: Any = torch.cuda
    cuda.current_device = lambda: here
    for name in ("set_device", "synchronize", "empty_cache", "set_rng_state", "manual_seed", "current_stream"):
        setattr(cuda, name, lambda *a, name=name, **k: None)  # one function each: torch keeps rules by function
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.random.set_rng_state = cuda.set_rng_state
    cuda.initial_seed = lambda *a, **k: 0
    cuda.get_device_capability = lambda *a, **k: (9, 0)
    cuda.Stream = _anything("Stream")


class OnCpu(TorchFunctionMode):
    """Inside, a literal `cuda` device is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(_here(each) for each in args) if func in (torch.Tensor.to, torch.device) else args
        return func(*args, **{key: _here(value) if key == "device" else value for key, value in (kwargs or {}).items()})


def _here(value: Any) -> Any:
    return torch.device("cpu") if str(value).startswith("cuda") and isinstance(value, str | torch.device) else value


def install() -> None:
    """Make `import megatron` work here."""
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: VERSIONS.get(name.replace("-", "_")) or real(name)
    sys.meta_path.insert(0, _Finder())
    _cuda_on_cpu()
    for name in (  # the submodules that are looked up as attributes
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.distributed",
        "transformer_engine.common",
        "transformer_engine.common.recipe",
        "transformer_engine.pytorch.ops",
    ):
        module = importlib.import_module(name)
        front, _, last = name.rpartition(".")
        if front:
            setattr(sys.modules[front], last, module)


install()
