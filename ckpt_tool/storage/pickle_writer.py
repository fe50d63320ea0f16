"""The skeleton writer: plain values and our own records as a pickle of constant globals. (API first.)"""

from __future__ import annotations

from typing import Any


def dumps(value: Any, *, protocol: int = 2) -> bytes:
    """`value` as a pickle, deterministic: equal values give equal bytes.

    Takes plain values, Symbol, Opaque and Record of allow-listed names, OrderedMap (as OrderedDict), TensorRef (as
    `torch._utils._rebuild_tensor_v2`, or `_v3` over an UntypedStorage for dtypes without a storage class; storages
    by persistent id `("storage", class, key, "cpu", numel)`), NumpyArray with loaded bytes.
    protocol: 2 for torch files, 4 for DCP metadata.
    Raises UsageError E0375 naming anything that is not on the list.
    """
    raise NotImplementedError
