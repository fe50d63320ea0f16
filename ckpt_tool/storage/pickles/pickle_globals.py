"""Which names a pickle may hold: three tiers, decided from the name alone, nothing is ever imported.

    tier 1  `builtins.set`, `torch._utils._rebuild_tensor_v2`, DCP's metadata classes: the exact table below; understood
    tier 2  other classes under the frameworks' own modules (`megatron.`, `deepspeed.`, `transformers.`, ...) and
            the few standard classes that real checkpoints carry: kept as records of their arguments and state
    tier 3  everything else: `os.system`, `builtins.eval`, unknown modules, dotted names, torch's loaders: unsafe

    >>> tier("torch._utils", "_rebuild_tensor_v2"), tier("megatron.training.x", "Thing"), tier("posix", "system")
    (1, 2, 3)
    >>> tier("collections", "OrderedDict.__reduce__")      # a dotted name walks attributes: never in a table
    3

A framework's functions (lower-case names) may be values in a file (`torch.nn.functional.gelu` among a trainer's
arguments), but a pickle that calls one is unsafe: `function_like` separates them from classes, the machine judges
calls. `builtins.getattr` is tier 3 unless every call of it takes a member of a known enum, as Python 3.11 pickled
enums, or the one class inside another that torch pickles (`ShardedTensor.ProcessGroupState`), and `operator.getitem`
unless every call of it subscripts an annotation of `typing`.

Where the names come from: torch 2.13 `_utils.py`, `_weights_only_unpickler.py`, `distributed/checkpoint/metadata.py`,
`distributed/tensor/_dtensor_spec.py`; NumPy 1.26 and 2.x `core/multiarray`; megatron-core 0.16; DeepSpeed 0.19;
PaddlePaddle 3.3 `distributed/flex_checkpoint/dcp/metadata.py`; CPython `_compat_pickle.py`. Denied parts of torch:
those that published gadget lists for pickles use (loaders, compilers, process starters).
"""

from __future__ import annotations

import sys

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.extras import Opaque

# -- tier 1 -----------------------------------------------------------------------------------------------------------

# Storage class -> (DType, bytes of an element). DType None: torch's type has no twin here.
STORAGE_CLASSES: dict[str, tuple[DType | None, int]] = {
    "DoubleStorage": (DTYPES["F64"], 8),
    "FloatStorage": (DTYPES["F32"], 4),
    "HalfStorage": (DTYPES["F16"], 2),
    "BFloat16Storage": (DTYPES["BF16"], 2),
    "LongStorage": (DTYPES["I64"], 8),
    "IntStorage": (DTYPES["I32"], 4),
    "ShortStorage": (DTYPES["I16"], 2),
    "CharStorage": (DTYPES["I8"], 1),
    "ByteStorage": (DTYPES["U8"], 1),
    "BoolStorage": (DTYPES["BOOL"], 1),
    "ComplexFloatStorage": (DTYPES["C64"], 8),
    "ComplexDoubleStorage": (DTYPES["C128"], 16),
    "UntypedStorage": (DTYPES["U8"], 1),  # its numel counts bytes, and torch itself reads it as uint8
    "_UntypedStorage": (DTYPES["U8"], 1),
    "QInt8Storage": (None, 1),
    "QUInt8Storage": (None, 1),
    "QInt32Storage": (None, 4),
    "QUInt4x2Storage": (None, 1),
    "QUInt2x4Storage": (None, 1),
}
STORAGES: dict[str, str] = {
    f"{module}.{name}": name for name in STORAGE_CLASSES for module in ("torch", "torch.cuda", "torch.storage")
}
TORCH_DTYPES = frozenset(f"torch.{d.torch}" for d in DTYPES.values() if d.torch)
LAYOUTS = frozenset(
    f"torch.{name}"
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn")
)
_TORCH_CONSTANTS = (
    TORCH_DTYPES
    | LAYOUTS
    | {
        f"torch.{name}"
        for name in (
            "complex32",
            "qint8",
            "quint8",
            "qint32",
            "quint4x2",
            "quint2x4",
            "float4_e2m1fn_x2",
            "bits8",
            "bits16",
            "bits1x8",
            "bits2x4",
            "bits4x2",
            *(f"uint{n}" for n in range(1, 8)),
            *(f"int{n}" for n in range(1, 8)),
            "contiguous_format",
            "channels_last",
            "channels_last_3d",
            "preserve_format",
            "per_tensor_affine",
            "per_tensor_symmetric",
            "per_channel_affine",
            "per_channel_symmetric",
            "per_channel_affine_float_qparams",
        )
    }
)

# Rebuild functions of torch whose tensors have no row-major bytes of their own: kept as Opaque, refused by those who
# want the values. name -> what it is, for people.
UNSUPPORTED_TENSORS: dict[str, str] = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils._rebuild_qtensor": "a quantised tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor without values",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of a device without storage",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of a device without storage",
    "torch._utils._rebuild_xla_tensor": "an XLA tensor",
    "torch._utils._rebuild_mlc_tensor": "an MLC tensor",
}

# Of these, what torch makes of a NumPy array: read where the array's values are the tensor's (`pickle_numpy`).
FROM_NUMPY = (
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_xla_tensor",
    "torch._utils._rebuild_mlc_tensor",
)
META_TENSOR = "torch._utils._rebuild_meta_tensor_no_storage"

_DCP = "torch.distributed.checkpoint"
_SPEC = "torch.distributed.tensor._dtensor_spec"
_PADDLE_DCP = ("paddle.distributed.flex_checkpoint.dcp.metadata", "paddle.distributed.checkpoint.metadata")
_PLACES = ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types")

_SHARDED = "torch.distributed._shard.sharded_tensor"
SHARDED_TENSOR = f"{_SHARDED}.api.ShardedTensor"
PROCESS_GROUP = f"{_SHARDED}.api:ShardedTensor.ProcessGroupState"  # a class inside another: a dotted name

# Classes read into Record: name -> the fields, in the order of constructor arguments or of a state that is a tuple.
RECORDS: dict[str, tuple[str, ...]] = {
    f"{_DCP}.metadata.Metadata": ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    f"{_DCP}.metadata.TensorStorageMetadata": ("properties", "size", "chunks"),
    f"{_DCP}.metadata.ChunkStorageMetadata": ("offsets", "sizes"),
    f"{_DCP}.metadata.BytesStorageMetadata": (),
    f"{_DCP}.metadata.MetadataIndex": ("fqn", "offset", "index"),
    f"{_DCP}.metadata.TensorProperties": ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"),
    f"{_DCP}.metadata.StorageMeta": ("checkpoint_id", "save_id", "load_id", "modules"),
    f"{_DCP}.filesystem._StorageInfo": ("relative_path", "offset", "length", "transform_descriptors"),
    f"{_DCP}.filesystem._StoragePrefix": ("prefix",),
    "olmo_core.distributed.checkpoint.filesystem._StorageInfo": ("relative_path", "offset", "length"),  # 2.4.0
    f"{_DCP}.planner.SavePlan": ("items", "storage_data", "planner_data", "usable"),
    f"{_DCP}.planner.WriteItem": ("index", "type", "bytes_io_data", "tensor_data"),
    f"{_DCP}.planner.TensorWriteData": ("chunk", "properties", "size"),
    f"{_DCP}.planner.BytesIOWriteData": ("nbytes",),
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": ("mesh", "placements", "tensor_meta", "shard_order"),
    f"{_SPEC}.TensorMeta": ("shape", "stride", "dtype"),
    f"{_SPEC}.ShardOrderEntry": ("tensor_dim", "mesh_dims"),
    "torch.distributed._tensor._dtensor_spec.DTensorSpec": ("mesh", "placements", "tensor_meta"),
    "torch.distributed._tensor._dtensor_spec.TensorMeta": ("shape", "stride", "dtype"),
    "torch.distributed._tensor.placement_types.DTensorSpec": ("mesh", "placements", "tensor_meta"),
    "torch.distributed._tensor.placement_types.TensorMeta": ("shape", "stride", "dtype"),
    "torch.distributed.device_mesh.DeviceMesh": ("device_type", "mesh", "mesh_dim_names"),
    "torch.distributed._tensor.device_mesh.DeviceMesh": ("device_type", "mesh", "mesh_dim_names"),
    "torch.distributed._mesh_layout._MeshLayout": ("axes",),
    f"{_SHARDED}.shard.Shard": ("tensor", "metadata"),
    f"{_SHARDED}.metadata.ShardedTensorMetadata": ("shards_metadata", "size", "tensor_properties"),
    f"{_SHARDED}.metadata.TensorProperties": (
        "dtype",
        "layout",
        "requires_grad",
        "memory_format",
        "pin_memory",
    ),
    PROCESS_GROUP: ("local_rank", "global_rank", "local_world_size", "global_world_size"),
    "torch.distributed._shard.metadata.ShardMetadata": ("shard_offsets", "shard_sizes", "placement"),
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec": ("dim", "placements"),
    "torch.distributed._shard.sharding_spec.api.EnumerableShardingSpec": ("shards",),
    "torch.distributed.remote_device._remote_device": ("_worker_name", "_rank", "_device"),
    "torch.distributed._mesh_layout._FlatLayout": ("shape", "stride"),
    **{
        f"{module}.{name}": fields
        for module in _PLACES
        for name, fields in (
            ("Shard", ("dim",)),
            ("Replicate", ()),
            ("Partial", ("reduce_op",)),
            ("_Partial", ("reduce_op",)),
            ("_StridedShard", ("dim", "split_factor")),
            ("_MaskPartial", ("reduce_op",)),
        )
    },
    **{
        f"{module}.{name}": fields
        for module in _PADDLE_DCP
        for name, fields in (
            ("Metadata", ("state_dict_metadata", "storage_metadata", "flat_mapping")),
            (
                "LocalTensorMetadata",
                ("global_offset", "local_shape", "dtype", "global_shape", "is_flattened", "flattened_range"),
            ),
            (
                "LocalTensorIndex",
                ("tensor_key", "global_offset", "is_flattened", "flattened_range", "replica_id", "local_shape"),
            ),
        )
    },
}

# Fields through which an object may hold itself (a mesh and its flattened slices name each other): left out, no layout
# needs
# them. torch 2.13 `distributed/device_mesh.py`.
BACK_REFERENCES: dict[str, frozenset[str]] = {
    "torch.distributed.device_mesh.DeviceMesh": frozenset(("_root_mesh", "_flatten_mapping", "_pg_registry")),
}

# Tensor subclasses that wrap a local tensor, and tensor types that add nothing to their bytes.
WRAPPERS = frozenset(
    {
        "torch.distributed.tensor.DTensor",
        "torch.distributed._tensor.api.DTensor",
        "torch.distributed.tensor._api.DTensor",
        SHARDED_TENSOR,
        "torch.distributed._tensor.DTensor",
    }
)
PLAIN_TENSORS = frozenset(
    {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch._tensor.Tensor"}
)

# Optimizer states that torchao keeps as codes: kept as Opaque, their tensors are read by `coded_states`.
CODED_STATES = frozenset(
    f"{package}.subclass_{module}.{name}"
    for package in ("torchao.optim", "torchao.prototype.low_bit_optim")
    for module, name in (("8bit", "OptimState8bit"), ("4bit", "OptimState4bit"), ("fp8", "OptimStateFp8"))
)

# Weights that torchao keeps as codes, the same (`coded_weights`), and what says of them how they are multiplied.
CODED_WEIGHTS = frozenset(
    f"torchao.{module}.{name}"
    for name, modules in {
        "Float8Tensor": ("quantization", "quantization.quantize_.workflows.float8.float8_tensor"),
        "Int8Tensor": ("quantization", "quantization.quantize_.workflows.int8.int8_tensor"),
        "IntxUnpackedToInt8Tensor": (
            "quantization",
            "quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor",
        ),
        "MXTensor": ("prototype.mx_formats.mx_tensor",),
        "NVFP4Tensor": ("prototype.mx_formats.nvfp4_tensor",),
        "AffineQuantizedTensor": ("dtypes.affine_quantized_tensor",),
        "PlainAQTTensorImpl": ("dtypes.uintx.plain_layout",),
        "QDQTensorImpl": ("dtypes.uintx.q_dq_layout",),
        "Float8AQTTensorImpl": ("dtypes.floatx.float8_layout",),
        "LinearActivationQuantizedTensor": ("quantization.linear_activation_quantized_tensor",),
    }.items()
    for module in modules
)
_OF_CODED_WEIGHTS = frozenset(
    f"torchao.{name}"
    for name in """
    dtypes.floatx.float8_layout.Float8Layout
    dtypes.uintx.q_dq_layout.QDQLayout
    dtypes.utils.PlainLayout
    quantization.quant_api._input_activation_quant_func_fp8
    quantization.quant_api._int8_asymm_per_token_quant
    quantization.quant_api._int8_symm_per_token_reduced_range_quant
    float8.inference.Float8MMConfig
    prototype.mx_formats.mx_tensor.QuantizeTensorToMXKwargs
    prototype.mx_formats.nvfp4_tensor.QuantizeTensorToNVFP4Kwargs
    quantization.granularity.PerRow
    quantization.granularity.PerTensor
    quantization.granularity.PerGroup
    quantization.granularity.PerBlock
    quantization.quantize_.workflows.float8.float8_tensor.QuantizeTensorToFloat8Kwargs
    quantization.quantize_.workflows.int8.int8_tensor.QuantizeTensorToInt8Kwargs
    """.split()
)

# Enums, read as Symbol(name, (value,)); the members map names to values where old pickles hold the name.
ENUMS: dict[str, dict[str, int]] = {
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": {
        "TORCH_CONTIGUOUS_FORMAT": 0,
        "TORCH_CHANNELS_LAST": 1,
        "TORCH_PRESERVE_FORMAT": 2,
    },
    f"{_SHARDED}.metadata.MEM_FORMAT_ENCODING": {
        "TORCH_CONTIGUOUS_FORMAT": 0,
        "TORCH_CHANNELS_LAST": 1,
        "TORCH_PRESERVE_FORMAT": 2,
    },
    f"{_DCP}.planner.WriteItemType": {"TENSOR": 1, "SHARD": 2, "BYTE_IO": 3},
    "deepspeed.runtime.zero.config.ZeroStageEnum": {
        "disabled": 0,
        "optimizer_states": 1,
        "gradients": 2,
        "weights": 3,
        "max_stage": 3,
    },
    "megatron.core.enums.ModelType": {},
    "megatron.core.enums.Fp8Recipe": {},
    "megatron.core.enums.Fp4Recipe": {},
    "megatron.core.transformer.enums.AttnBackend": {},
    "megatron.core.transformer.enums.AttnMaskType": {},
    "megatron.core.transformer.enums.AttnType": {},
    "megatron.core.transformer.enums.CudaGraphModule": {},
    "megatron.core.transformer.enums.CudaGraphScope": {},
    "megatron.core.transformer.enums.InferenceCudaGraphScope": {},
    "megatron.core.transformer.enums.LayerType": {},
    "megatron.core.transformer.enums.ModelType": {},
    "torchao.prototype.mx_formats.config.ScaleCalculationMode": {},
    "torchao.quantization.quant_primitives.MappingType": {},
    "torchao.quantization.quant_primitives.ZeroPointDomain": {"INT": 1, "FLOAT": 2, "NONE": 3},
    "torchao.quantization.quantize_.common.kernel_preference.KernelPreference": {},
    "signal.Signals": {},
    "signal.Handlers": {},
}

# Plain classes understood as Opaque: their arguments and state are all there is to them. The writer may emit these.
PLAIN_OBJECTS = frozenset(
    {
        "argparse.Namespace",
        "types.SimpleNamespace",
        "io.BytesIO",
        "_io.BytesIO",
        "builtins.object",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib.PurePosixPath",
        "pathlib.PureWindowsPath",
        "pathlib.Path",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
        "pathlib._local.PurePosixPath",
        "pathlib._local.PureWindowsPath",
        "pathlib._local.Path",
        "datetime.datetime",
        "datetime.date",
        "datetime.time",
        "datetime.timedelta",
        "datetime.timezone",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    }
)

# NumPy's generators of random numbers, read as records: their constructors, and the classes that these are passed.
RANDOM = frozenset(
    {
        *(f"numpy.random._pickle.__{kind}_ctor" for kind in ("generator", "bit_generator", "randomstate")),
        *(f"numpy.random._pcg64.{name}" for name in ("PCG64", "PCG64DXSM")),
        "numpy.random._mt19937.MT19937",
        "numpy.random._philox.Philox",
        "numpy.random._sfc64.SFC64",
        "numpy.random.bit_generator.SeedSequence",
        "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
    }
)
# Annotations of types, which configs of typed fields carry. They have no effects, and subscripting one has none.
ANNOTATIONS = frozenset(
    f"typing.{name}"
    for name in (
        "Any",
        "Callable",
        "ClassVar",
        "Dict",
        "Final",
        "List",
        "Literal",
        "Mapping",
        "Optional",
        "Sequence",
        "Set",
        "Tuple",
        "Type",
        "Union",
    )
)

# Called through builders of their own (`pickle_builders`), or kept as values.
_BUILT = frozenset(
    {
        "builtins.set",
        "builtins.frozenset",
        "builtins.list",
        "builtins.tuple",
        "builtins.dict",
        "builtins.bytes",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.slice",
        "builtins.range",
        "_codecs.encode",
        "collections.OrderedDict",
        "collections.defaultdict",
        "collections.Counter",
        "collections.deque",
        "copyreg._reconstructor",
        "copyreg.__newobj__",
        "copyreg.__newobj_ex__",
        "torch.Size",
        "torch.device",
        "torch.serialization._get_layout",
        "torch.storage.TypedStorage",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_wrapper_subclass",
        "torch._tensor._rebuild_from_type_v2",
        "numpy.ndarray",
        "numpy.dtype",
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
        *(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")),
    }
)
_VALUES = frozenset(
    {
        *(f"builtins.{name}" for name in ("int", "float", "bool", "str", "type", "NoneType")),
        *(
            f"numpy.{name}"
            for name in (
                "bool_",
                "bool",
                "int8",
                "int16",
                "int32",
                "int64",
                "uint8",
                "uint16",
                "uint32",
                "uint64",
                "float16",
                "float32",
                "float64",
                "complex64",
                "complex128",
                "longlong",
                "ulonglong",
                "intc",
                "uintc",
                "str_",
                "bytes_",
            )
        ),
        *(
            f"ml_dtypes.{name}"
            for name in (
                "bfloat16",
                "float8_e4m3fn",
                "float8_e5m2",
                "float8_e8m0fnu",
                "float8_e4m3fnuz",
                "float8_e5m2fnuz",
            )
        ),
        *(
            f"numpy.dtypes.{name}DType"
            for name in (
                "Bool",
                "Int8",
                "Int16",
                "Int32",
                "Int64",
                "UInt8",
                "UInt16",
                "UInt32",
                "UInt64",
                "Float16",
                "Float32",
                "Float64",
                "Complex64",
                "Complex128",
            )
        ),
    }
)

KNOWN = frozenset().union(
    STORAGES,
    _TORCH_CONSTANTS,
    UNSUPPORTED_TENSORS,
    RECORDS,
    WRAPPERS,
    PLAIN_TENSORS,
    CODED_STATES,
    CODED_WEIGHTS,
    _OF_CODED_WEIGHTS,
    ENUMS,
    PLAIN_OBJECTS,
    RANDOM,
    ANNOTATIONS,
    _BUILT,
    _VALUES,
)

# -- tier 2 -----------------------------------------------------------------------------------------------------------

FRAMEWORKS = frozenset(
    {
        "megatron",
        "deepspeed",
        "transformers",
        "accelerate",
        "paddle",
        "torch",
        "paddleformers",
        "paddlenlp",
        "transformer_engine",
        "peft",
        "torchtitan",
    }
)
_STANDARD = frozenset({"datetime", "pathlib", "enum", "signal"})  # classes of these modules, no functions

# Parts of frameworks that load, compile, fetch or start things: never tier 2, classes included.
_DENIED = (
    "torch.hub",
    "torch.jit",
    "torch.ops",
    "torch._ops",
    "torch.classes",
    "torch._classes",
    "torch.package",
    "torch.load",
    "torch.save",
    "torch.compile",
    "torch.serialization",
    "torch.storage",
    "torch._C",
    "torch.utils.cpp_extension",
    "torch.utils.model_zoo",
    "torch.utils._config_module",
    "torch.utils.bottleneck",
    "torch.utils.collect_env",
    "torch.utils.data.datapipes",
    "torch.utils.file_baton",
    "torch.utils._import_utils",
    "torch.utils.show_pickle",
    "torch.utils.hipify",
    "torch.utils.benchmark",
    "torch.utils._python_dispatch",
    "torch.distributed.rpc",
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "torch.distributed.elastic",
    "torch.distributed.distributed_c10d",
    "torch.distributed.nn.jit",
    "torch.distributed.argparse_util",
    "torch.multiprocessing",
    "torch.testing",
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch._export",
    "torch.export",
    "torch.fx",
    "torch.onnx",
    "torch.backends",
    "torch.library",
    "torch._library",
    "torch._lobpcg",
    "torch.profiler",
    "torch.autograd",
    "torch._appdirs",
    "torch._sources",
    "torch._utils_internal",
    "torch._weights_only_unpickler",
    "torch._higher_order_ops",
    "torch._subclasses",
    "torch._logging",
    "torch._guards",
    "torch._lazy",
    "torch.cuda._utils",
    "torch.cuda.jiterator",
    "deepspeed.launcher",
    "deepspeed.autotuning",
    "deepspeed.elasticity",
    "deepspeed.nebula",
    "deepspeed.inference",
    "deepspeed.ops.op_builder",
    "accelerate.commands",
    "accelerate.launchers",
    "accelerate.test_utils",
    "transformers.commands",
    "transformers.cli",
    "transformers.dynamic_module_utils",
    "transformers.utils.hub",
    "transformers.testing_utils",
    "transformers.pipelines",
    "transformers.agents",
    "transformers.tools",
    "paddle.hub",
    "paddle.hapi",
    "paddle.jit",
    "paddle.utils.cpp_extension",
    "paddle.utils.download",
    "paddle.distributed.launch",
    "paddle.distributed.spawn",
    "paddle.distributed.fleet.launch",
    "paddle.names",
    "paddle.inference",
    "paddle.dataset",
    "paddle.load",
    "paddle.save",
    "megatron.core.datasets.helpers",
    "megatron.core._jit",
)
_PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_PYTHON2_NAMES = {"unicode": "str", "long": "int", "xrange": "range"}
GETATTR = "builtins.getattr"
GETITEM = frozenset(("_operator.getitem", "operator.getitem"))  # how `Optional[int]` is pickled
NONE_TYPE = "builtins.NoneType"


def canonical(module: str, name: str, protocol: int) -> tuple[str, str]:
    """The Python 3 spelling: protocols below 3 carry Python 2's module names."""
    if protocol < 3 and module in _PYTHON2:
        return _PYTHON2[module], _PYTHON2_NAMES.get(name, name) if module == "__builtin__" else name
    return module, name


def full_name(module: str, name: str) -> str:
    """`module.name`; `module:na.me` for a dotted name, so that no dotted name can be taken for a table's entry."""
    return f"{module}:{name}" if "." in name or not name or not module else f"{module}.{name}"


def is_tensor_record(value: object) -> bool:
    """Is it the record of a tensor that torch rebuilds from something else than dense values: sparse, quantised, meta?
    Such a record represents a tensor whatever it contains; that of a meta tensor contains no values at all."""
    return type(value) is Opaque and value.name in UNSUPPORTED_TENSORS


def function_like(name: str) -> bool:
    """Does the last part of a full name look like a function (first letter lower-case), not like a class?"""
    last = name.rpartition(".")[2].lstrip("_")
    return not last[:1].isupper()


def class_of(line: str) -> str:
    """The name in a line of `Catalog.unsafe`, without the position.

    >>> class_of("__main__.Config at a.pt, opcode 4")
    '__main__.Config'
    """
    return line.partition(" at ")[0]


def users_own(line: str) -> bool:
    """Is a line of `Catalog.unsafe` of a class that no library here is known to have: a dataclass or enum of the job's
    own code? Such an object may be dropped if the user asks for it; a function, or anything of Python's own, may not.

    >>> users_own("__main__.Config at a.pt, opcode 4"), users_own("os.PathLike at a.pt, opcode 4")
    (True, False)
    """
    full = class_of(line)
    at = " at " in line
    module = full.rpartition(".")[0]
    root = module.partition(".")[0]
    plain = all(part.isidentifier() for part in full.split("."))
    known = root in FRAMEWORKS or root in sys.stdlib_module_names or root in {name.partition(".")[0] for name in KNOWN}
    return bool(at and module) and plain and not function_like(full) and (root == "__main__" or not known)


def tier(module: str, name: str) -> int:
    """1, 2 or 3 of a canonical (module, name); see the module's docstring."""
    full = full_name(module, name)
    if full in KNOWN:
        return 1
    if ":" in full:
        return 3
    root = module.partition(".")[0]
    if module in _STANDARD:
        return 3 if function_like(name) else 2
    if root not in FRAMEWORKS or any(full == denied or full.startswith(denied + ".") for denied in _DENIED):
        return 3
    return 2
