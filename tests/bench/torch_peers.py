"""What others use for the works of the kernels: PyTorch, and cub for lists of contiguous ranges.

Each peer is a function of the buffers that gives a call for a slot, as `workloads.Prepared.call` is; it leaves in the
target what the kernel leaves there, so that the two can be compared byte for byte. Views are made beforehand: a program
that does this often would keep them. PEERS names them by work; a name ends in " (approx.)" where the result is another
by nature.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from ckpt_tool.device.library import Device
from ckpt_tool.device.trial import workloads
from ckpt_tool.device.trial.workloads import Arena, Lists
from ckpt_tool.weight_schemes.written_schemes import SCHEMES

Call = Callable[[int], object]
T = torch.Tensor


class Buffers:
    """An arena of torch's: bytes of the source and of the target, a slot at a time."""

    def __init__(self, payload: int, slots: int, where: str) -> None:
        nbytes = Arena(0, 0, payload, slots).nbytes
        self.source, self.target = (torch.empty(nbytes, dtype=torch.uint8, device=where) for _ in range(2))
        self.arena = Arena(self.source.data_ptr(), self.target.data_ptr(), payload, slots)

    def sides(self, slot: int) -> tuple[T, T]:
        """The bytes of a slot, with what lies behind it."""
        at = slot % self.arena.slots * self.arena.stride
        return self.source[at : at + self.arena.stride], self.target[at : at + self.arena.stride]

    def each(self, make: Callable[[T, T], Call]) -> Call:
        """A call that has a call of its own for each slot."""
        calls = [make(*self.sides(slot)) for slot in range(self.arena.slots)]
        return lambda slot: calls[slot % self.arena.slots](slot)


def _windows(box: workloads.Strided, source: T, target: T, words: torch.dtype) -> tuple[T, T]:
    """Both sides of a box as views of bytes or wider words. Addresses are those of the buffers."""
    size = words.itemsize
    views = []
    for side, at, strides in ((source, box.source, box.source_strides), (target, box.target, box.target_strides)):
        flat = side[(at - side.data_ptr()) % size :]
        flat = flat[: len(flat) // size * size].view(words)
        first = (at - flat.data_ptr()) // size
        views.append(
            flat.as_strided(
                (*box.extents, box.run // size), (*(s // size for s in strides), 1), flat.storage_offset() + first
            )
        )
    return views[1], views[0]


def _pairs(lists: Lists, payload: int, source: T, target: T) -> list[tuple[T, T]]:
    """(to, from) of every box of a work, in the widest words that its strides allow: what a user's dtype would be at
    best."""
    out = []
    for box in lists(source.data_ptr(), target.data_ptr(), payload):
        numbers = (box.source, box.target, box.run, *box.source_strides, *box.target_strides)
        words = torch.int16 if all(n % 2 == 0 for n in numbers) else torch.uint8
        out.append(_windows(box, source, target, words))
    return out


def slices(lists: Lists) -> Callable[[Buffers], Call]:
    """One `copy_` a box."""

    def make(buffers: Buffers) -> Call:
        def of_slot(source: T, target: T) -> Call:
            pairs = _pairs(lists, buffers.arena.payload, source, target)

            def call(_: int) -> None:
                for to, from_ in pairs:
                    to.copy_(from_)

            return call

        return buffers.each(of_slot)

    return make


def foreach(lists: Lists) -> Callable[[Buffers], Call]:
    """`torch._foreach_copy_` of all boxes."""

    def make(buffers: Buffers) -> Call:
        def of_slot(source: T, target: T) -> Call:
            pairs = _pairs(lists, buffers.arena.payload, source, target)
            to = [pair[0] for pair in pairs]
            from_ = [pair[1] for pair in pairs]
            return lambda _: torch._foreach_copy_(to, from_)

        return buffers.each(of_slot)

    return make


def cat(lists: Lists) -> Callable[[Buffers], Call]:
    """`torch.cat` of the columns, into the target."""

    def make(buffers: Buffers) -> Call:
        def of_slot(source: T, target: T) -> Call:
            pairs = _pairs(lists, buffers.arena.payload, source, target)
            rows, wide = pairs[0][0].shape
            item = pairs[0][0].element_size()
            out = target[: rows * wide * len(pairs) * item].view(pairs[0][0].dtype).view(rows, wide * len(pairs))
            parts = [pair[1] for pair in pairs]
            return lambda _: torch.cat(parts, dim=1, out=out)

        return buffers.each(of_slot)

    return make


def cub(lists: Lists, library: Path, device: Device) -> Callable[[Buffers], Call]:
    """`cub::DeviceMemcpy::Batched`, its arrays of addresses on the device already."""
    batched = ctypes.CDLL(str(library)).cub_batched
    batched.argtypes = [
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        *[ctypes.c_void_p] * 3,
        ctypes.c_uint,
        ctypes.c_void_p,
    ]

    def make(buffers: Buffers) -> Call:
        def of_slot(source: T, target: T) -> Call:
            boxes = list(lists(source.data_ptr(), target.data_ptr(), buffers.arena.payload))
            numbers = np.array([(box.source, box.target, box.run) for box in boxes], np.int64)
            arrays = [torch.from_numpy(np.ascontiguousarray(column)).to(source.device) for column in numbers.T]
            size = ctypes.c_size_t(0)
            pointers = [array.data_ptr() for array in arrays]
            if batched(None, ctypes.byref(size), *pointers, len(boxes), None) != 0:
                raise RuntimeError("cub::DeviceMemcpy::Batched refused the list")
            scratch = torch.empty(max(1, size.value), dtype=torch.uint8, device=source.device)

            def call(_: int) -> None:
                status = batched(scratch.data_ptr(), ctypes.byref(size), *pointers, len(boxes), None)
                if status != 0:
                    raise RuntimeError(f"cub::DeviceMemcpy::Batched: error {status}")

            call.held = arrays  # type: ignore[attr-defined]
            return call

        return buffers.each(of_slot)

    return make


def swap(item: int, rows: int, columns: int, *, contiguous: bool) -> Callable[[Buffers], Call]:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item]

    def make(buffers: Buffers) -> Call:
        r = rows
        c = columns
        if r * c * item > buffers.arena.payload:
            r = c = workloads.isqrt(buffers.arena.payload // item)
        count = buffers.arena.payload // (r * c * item)

        def of_slot(source: T, target: T) -> Call:
            given = source[: count * r * c * item].view(words).view(count, r, c).transpose(1, 2)
            wanted = target[: count * r * c * item].view(words).view(count, c, r)
            if contiguous:  # with an allocation, as programs write it; its result is not in the target
                return lambda _: given.contiguous()
            return lambda _: wanted.copy_(given)

        return buffers.each(of_slot)

    return make


DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}


def cast(source: str, target: str, pieces_of: int = 0, *, loop: bool = False) -> Callable[[Buffers], Call]:
    """`copy_`; in pieces `_foreach_copy_`, or a loop."""
    given = DTYPES[source]
    wanted = DTYPES[target]

    def make(buffers: Buffers) -> Call:
        count = buffers.arena.payload // max(given.itemsize, wanted.itemsize)

        def of_slot(source: T, target: T) -> Call:
            from_ = source[: count * given.itemsize].view(given)
            to = target[: count * wanted.itemsize].view(wanted)
            if not pieces_of:
                return lambda _: to.copy_(from_)
            parts, outs = from_.split(pieces_of), to.split(pieces_of)
            if not loop:
                return lambda _: torch._foreach_copy_(outs, parts)

            def call(_: int) -> None:
                for one, other in zip(outs, parts, strict=True):
                    one.copy_(other)

            return call

        return buffers.each(of_slot)

    return make


def fp8_blocks(buffers: Buffers) -> Call:
    """As model code does it: to fp32, times the scales by broadcast, to bf16."""
    rows, wide = workloads.code_shape(buffers.arena.payload)
    scales = torch.from_numpy(np.asarray(workloads.code_scales(rows, wide, (128, 128), "F32"))).to(
        buffers.source.device
    )

    def of_slot(source: T, target: T) -> Call:
        given = source[: rows * wide].view(torch.float8_e4m3fn).view(rows // 128, 128, wide // 128, 128)
        wanted = target[: rows * wide * 2].view(torch.bfloat16).view(rows // 128, 128, wide // 128, 128)
        return lambda _: wanted.copy_(given.to(torch.float32) * scales[:, None, :, None])

    return buffers.each(of_slot)


def mxfp4(buffers: Buffers) -> Call:
    """A table of 16 values, then ldexp, as transformers does it."""
    rows, wide = workloads.code_shape(buffers.arena.payload)
    exponents = torch.from_numpy(
        np.asarray(workloads.code_scales(rows, wide, (1, 32), "F8_E8M0")).astype(np.int32) - 127
    )
    exponents = exponents.to(buffers.source.device)[:, :, None]
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(values + [-v for v in values], dtype=torch.bfloat16, device=buffers.source.device)

    def of_slot(source: T, target: T) -> Call:
        given = source[: rows * wide // 2].view(rows, wide // 32, 16)
        wanted = target[: rows * wide * 2].view(torch.bfloat16).view(rows, wide // 32, 16, 2)

        def call(_: int) -> None:
            wanted[..., 0] = torch.ldexp(table[(given & 15).to(torch.int32)], exponents)
            wanted[..., 1] = torch.ldexp(table[(given >> 4).to(torch.int32)], exponents)

        return call

    return buffers.each(of_slot)


E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway from each code to the next


def e2m1(ratio: T) -> T:
    """Codes of four bits, two a byte: how many halfway points lie below, of ties the even code."""
    size = ratio.abs()
    code = sum((size > tie if k % 2 == 0 else size >= tie).to(torch.uint8) for k, tie in enumerate(E2M1_TIES))
    code = code | (ratio < 0).to(torch.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4


def quantised(source: str, name: str) -> Callable[[Buffers], Call]:
    """As model code does it: the largest of a view, a division, a cast."""
    scheme = SCHEMES[name]
    dtype = DTYPES[source]
    (high, wide), most = scheme.block, {"F8_E4M3": 448.0, "I8": 127.5, "I32": 7.5, "U8": 6.0}[scheme.dtype]

    def make(buffers: Buffers) -> Call:
        rows, columns = workloads.code_shape(buffers.arena.payload, dtype.itemsize)
        width = wide or columns
        shape = (rows // high, high, columns // width, width)

        def of_slot(source: T, target: T) -> Call:
            # by a number torch multiplies with its reciprocal on a GPU, by a tensor it divides
            full, unit = (torch.tensor(value, device=target.device) for value in (most, workloads.WHOLE))
            given = source[: rows * columns * dtype.itemsize].view(dtype).view(shape)
            wanted = target[: rows * columns * scheme.bits // 8]

            def call(_: int) -> T:
                sizes = given.abs().amax((1, 3), keepdim=True).to(torch.float32)
                if scheme.scales == "U8":
                    exponents = (sizes.view(torch.int32) + (1 << 21) >> 23) - (8 if scheme.bits == 8 else 2)
                    scales: T = exponents.to(torch.uint8)
                    divisors = (exponents << 23).view(torch.float32)
                elif scheme.name == "nvfp4":
                    scales = (sizes / full * unit).to(torch.float8_e4m3fn)
                    divisors = scales.to(torch.float32) / unit
                else:
                    scales = (sizes / full).to(torch.float32 if scheme.scales else dtype)
                    divisors = scales.to(torch.float32)
                ratio = given.to(torch.float32) / divisors
                if scheme.dtype == "F8_E4M3":
                    wanted.view(torch.float8_e4m3fn).view(shape).copy_(ratio)
                elif scheme.dtype == "I8":
                    wanted.view(torch.int8).view(shape).copy_(ratio.clamp(-128, 127).round())
                elif scheme.dtype == "I32":
                    codes = (ratio.clamp(-8, 7).round() + 8).to(torch.uint8)
                    wanted.view(*shape[:3], width // 2).copy_(codes[..., 0::2] | codes[..., 1::2] << 4)
                else:
                    wanted.view(*shape[:3], width // 2).copy_(e2m1(ratio))
                return scales

            return call

        return buffers.each(of_slot)

    return make


def equal(dtype: torch.dtype, *, gap: bool) -> Callable[[Buffers], Call]:
    """`torch.equal`, or the greatest difference: both read the two sides, and answer less than the kernel does."""

    def make(buffers: Buffers) -> Call:
        def of_slot(source: T, target: T) -> Call:
            sides = [side[: buffers.arena.payload].view(dtype) for side in (source, target)]
            return (lambda _: (sides[0] - sides[1]).abs().max()) if gap else (lambda _: torch.equal(*sides))

        return buffers.each(of_slot)

    return make


def _flat(arena: Arena, source: T, target: T) -> dict[str, T]:
    """The buffers of `workloads.flat_buffers` as tensors."""
    flat = workloads.flat_buffers(Arena(source.data_ptr(), target.data_ptr(), arena.payload, 1), 0)

    def window(at: int, dtype: torch.dtype) -> T:
        side = source if source.data_ptr() <= at < source.data_ptr() + len(source) else target
        first = at - side.data_ptr()
        return side[first : first + flat.elements * dtype.itemsize].view(dtype)

    names = ("gradient", "master", "exp_avg", "exp_avg_sq", "ema")
    found = {name: window(getattr(flat, name), torch.float32) for name in names}
    return found | {"parameter": window(flat.parameter, torch.bfloat16)}


def adamw(buffers: Buffers) -> Call:
    """torch's fused AdamW on the master, then lerp of the average, then the cast."""

    def of_slot(source: T, target: T) -> Call:
        has = _flat(buffers.arena, source, target)
        master = torch.nn.Parameter(has["master"])
        master.grad = has["gradient"]
        stepper = torch.optim.AdamW([master], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        stepper.state[master] = {
            "step": torch.tensor(6.0, device=source.device),
            "exp_avg": has["exp_avg"],
            "exp_avg_sq": has["exp_avg_sq"],
        }

        def call(_: int) -> None:
            with torch.no_grad():
                stepper.step()
                has["ema"].lerp_(has["master"], 0.01)
                has["parameter"].copy_(has["master"])

        return call

    return buffers.each(of_slot)


def exchange(buffers: Buffers) -> Call:
    """A clone, two copies and a cast."""

    def of_slot(source: T, target: T) -> Call:
        has = _flat(buffers.arena, source, target)

        def call(_: int) -> None:
            kept = has["master"].clone()
            has["master"].copy_(has["ema"])
            has["ema"].copy_(kept)
            has["parameter"].copy_(has["master"])

        return call

    return buffers.each(of_slot)


def peers(
    cub_library: Path | None, device: Device
) -> Iterator[tuple[tuple[str, str], str, bool, Callable[[Buffers], Call]]]:
    """(work, name, leaves the same bytes in the target, how)."""
    lists = workloads.COPIES
    for name, boxes in lists.items():
        work = ("box_copy", name)
        yield work, "torch slices", True, slices(boxes)
        if name.startswith("pieces"):
            yield work, "_foreach_copy_", True, foreach(boxes)
            if cub_library is not None:
                yield work, "cub Batched", True, cub(boxes, cub_library, device)
        if name.startswith("merged"):
            yield work, "torch.cat", True, cat(boxes)
    for work, rows, columns in (("4096 x 4096", 4096, 4096), ("4095 x 4097", 4095, 4097), ("128 x 7168", 128, 7168)):
        for item in (1, 2, 4, 8):
            if ("box_transpose", f"{item} B, {work}") in workloads.WORKS:
                key = ("box_transpose", f"{item} B, {work}")
                yield key, "copy_", True, swap(item, rows, columns, contiguous=False)
                yield key, ".t().contiguous()", False, swap(item, rows, columns, contiguous=True)
    for source, target in (("F32", "BF16"), ("BF16", "F32"), ("F32", "F16"), ("BF16", "F8_E4M3")):
        yield ("box_cast", f"{source} to {target}"), "copy_", True, cast(source, target)
    small = ("box_cast", "F32 to BF16 by 16,384")
    yield small, "_foreach_copy_", True, cast("F32", "BF16", 16384)
    yield small, "torch loop", True, cast("F32", "BF16", 16384, loop=True)
    yield ("box_dequantise", "F8_E4M3, 128 x 128, to BF16"), "torch, 3 passes", True, fp8_blocks
    yield ("box_dequantise", "F4, 1 x 32, to BF16"), "torch, table and ldexp", True, mxfp4
    for source, name in workloads.QUANTISED:
        yield ("box_quantise", f"{source} to {name}"), "torch, amax and divide", True, quantised(source, name)
    for name, dtype in (("BF16", torch.bfloat16), ("F32", torch.float32)):
        yield ("compare", name), "torch.equal", False, equal(dtype, gap=False)
        yield ("compare", name), "(a-b).abs().max()", False, equal(dtype, gap=True)
    yield ("adamw_ema", "AdamW and average, BF16 parameters"), "fused AdamW, lerp_, copy_", False, adamw
    yield ("ema_swap", "weights and average swapped"), "clone, 3 copy_", False, exchange
