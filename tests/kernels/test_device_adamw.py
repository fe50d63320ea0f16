"""The AdamW step and the EMA swap on the device against their NumPy formula and against the harness's torch one."""

from __future__ import annotations

from contextlib import ExitStack
from ctypes import byref

import ml_dtypes
import numpy as np
import pytest

from ckpt_tool.device.adamw import Constants, Flat, _Constants, step, swap
from ckpt_tool.device.library import Device
from ckpt_tool.errors import StorageError, UsageError

STATES = ("master", "exp_avg", "exp_avg_sq", "ema")
SIZES = (1, 2, 3, 4, 5, 31, 64, 1000, 4099)


def by_numpy(c: Constants, g: np.ndarray, s: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The formula of kernels/adamw_ema.cu, line by line; every operation rounds to fp32."""
    k = {name: np.float32(value) for name, value in c._asdict().items()}
    g = g.astype(np.float32) * k["scale"]
    m = s["exp_avg"] * k["beta1"] + g * k["beta1_rest"]
    v = s["exp_avg_sq"] * k["beta2"] + (g * g) * k["beta2_rest"]
    p = s["master"] * k["decay"] - (m / k["correction1"]) / (np.sqrt(v / k["correction2"]) + k["eps"]) * k["rate"]
    return {"master": p, "exp_avg": m, "exp_avg_sq": v, "ema": s["ema"] * k["average"] + p * k["average_rest"]}


def fresh(count: int, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    scale = np.float32(10.0) ** rng.integers(-12, 3, count).astype(np.float32)
    gradient = rng.standard_normal(count, np.float32) * scale
    state = {name: rng.standard_normal(count, np.float32) for name in STATES}
    state["exp_avg_sq"] = np.square(state["exp_avg_sq"]) * scale
    return gradient, state


class Held:
    """Arrays on the device, each `shift` bytes behind a grid of 256, with guard bytes around."""

    GUARD = 0xC3

    def __init__(self, device: Device, stack: ExitStack, arrays: dict[str, np.ndarray], shift: int = 0) -> None:
        self.device = device
        self.arrays = arrays
        self.address = dict[str, int]()
        self.whole = dict[str, tuple[int, int]]()
        for name, array in arrays.items():
            raw = np.full(512 + array.nbytes + 64, self.GUARD, np.uint8)
            start = 256 + shift * array.itemsize // 4
            raw[start : start + array.nbytes] = array.view(np.uint8)
            memory = stack.enter_context(device.upload(raw))
            self.address[name], self.whole[name] = memory.address + start, (memory.address, start)

    def get(self, name: str) -> np.ndarray:
        base, start = self.whole[name]
        array = self.arrays[name]
        raw = self.device.download(base, 512 + array.nbytes + 64)
        guard = np.concatenate([raw[:start], raw[start + array.nbytes :]])
        assert (guard == self.GUARD).all(), f"{name}: bytes beside it were written"
        return raw[start : start + array.nbytes].view(array.dtype)


def same(got: np.ndarray, want: np.ndarray, note: str) -> None:
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"), err_msg=note)


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("gradients", ["F32", "BF16"])
@pytest.mark.parametrize("parameters", ["F32", "BF16", "none"])
def test_three_steps_have_the_bits_of_the_formula(device: Device, shift: int, gradients: str, parameters: str) -> None:
    types = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "none": np.dtype(np.float32)}
    for count in SIZES:
        _, state = fresh(count, count)
        with ExitStack() as stack:
            held = Held(device, stack, {**state, "parameter": np.zeros(count, types[parameters])}, shift)
            for number in (1, 2, 30):
                gradient = fresh(count, count + number)[0].astype(types[gradients])
                given = Held(device, stack, {"gradient": gradient}, shift)
                constants = Constants.of(step=number, rate=3e-3, scale=0.37)
                where = {**held.address, **given.address}
                where["parameter"] = where["parameter"] if parameters != "none" else 0
                kind = "F32" if parameters == "none" else parameters
                step(
                    device,
                    constants,
                    Flat(count, **where, gradient_kind=gradients, parameter_kind=kind),
                    blocks=2,
                    threads=64,
                )
                state = by_numpy(constants, gradient, state)
                same(given.get("gradient"), gradient, "the gradient")
                for name in STATES:
                    same(held.get(name), state[name], f"{name} of {count}, step {number}")
            want = (
                np.zeros(count, types[parameters])
                if parameters == "none"
                else state["master"].astype(types[parameters])
            )
            same(held.get("parameter"), want, f"parameter of {count}")


def test_without_an_average_it_stays_as_it_is(device: Device) -> None:
    gradient, state = fresh(100, 1)
    with ExitStack() as stack:
        held = Held(device, stack, {**state, "gradient": gradient})
        where = {**held.address, "ema": 0}
        step(device, Constants.of(step=1, rate=1e-3), Flat(100, **where))
        same(held.get("ema"), state["ema"], "ema")
        same(held.get("master"), by_numpy(Constants.of(step=1, rate=1e-3), gradient, state)["master"], "master")


def test_values_that_are_nothing_special_and_those_that_are(device: Device) -> None:
    special = np.array([0, -0.0, 1e-45, -1e-38, 3e38, np.inf, -np.inf, np.nan, 1, -1, 1e-20, 65504], np.float32)
    gradient, _ = (side.ravel() for side in np.meshgrid(special, special))
    state = {name: np.roll(gradient, k) for k, name in enumerate(STATES)}
    state["exp_avg_sq"] = np.abs(state["exp_avg_sq"])
    with ExitStack() as stack, np.errstate(all="ignore"):
        held = Held(device, stack, {**state, "gradient": gradient})
        step(device, Constants.of(step=3, rate=1e-2), Flat(len(gradient), **held.address))
        want = by_numpy(Constants.of(step=3, rate=1e-2), gradient, state)
        for name in STATES:
            np.testing.assert_array_equal(held.get(name), want[name], err_msg=name)  # NaN is NaN, whatever its bits
            numbers = ~np.isnan(want[name])
            same(held.get(name)[numbers], want[name][numbers], name)


def test_the_step_of_a_split_buffer_is_that_of_the_whole(device: Device) -> None:
    gradient, state = fresh(1001, 7)
    constants = Constants.of(step=5, rate=1e-3)
    with ExitStack() as stack:
        held = Held(device, stack, {**state, "gradient": gradient})
        for start, stop in ((0, 3), (3, 400), (400, 1001)):
            where = {name: address + start * 4 for name, address in held.address.items()}
            step(device, constants, Flat(stop - start, **where))
        want = by_numpy(constants, gradient, state)
        for name in STATES:
            same(held.get(name), want[name], name)


def test_the_harness_updates_with_it_to_the_same_bits(shim: Device) -> None:
    """What a training job does on a GPU, on the shim that compiles the same source for the CPU."""
    torch = pytest.importorskip("torch")
    from ckpt_tool.harness.optimizer import AdamW, Slices

    start = torch.linspace(-1, 1, 1003)
    adam = AdamW()
    ours = Slices.fresh(start)
    theirs = Slices.fresh(start)
    for step_number, gradient in enumerate(torch.randn(4, 1003), 1):
        decays = step_number % 2 == 0
        adam.update(ours, gradient, step=step_number, rate=1e-2, decays=decays)
        adam.update(theirs, gradient, step=step_number, rate=1e-2, decays=decays, device=shim)
        for state in STATES:
            assert torch.equal(getattr(ours, state), getattr(theirs, state)), (step_number, state)


def test_it_is_the_step_of_the_harness(device: Device) -> None:
    """But for the square root, which torch takes from MKL on a CPU: one in a hundred is a bit off the nearest."""
    torch = pytest.importorskip("torch")
    from ckpt_tool.harness.optimizer import AdamW, Slices

    _, state = fresh(777, 9)
    rule = AdamW()
    slices = Slices(**{name: torch.from_numpy(state[name].copy()) for name in STATES})
    with ExitStack() as stack:
        held = Held(device, stack, state)
        for number in (1, 2, 3, 50):
            gradient = fresh(777, 100 + number)[0]
            rule.update(slices, torch.from_numpy(gradient.copy()), step=number, rate=2e-3, decays=True)
            given = Held(device, stack, {"gradient": gradient})
            constants = Constants.of(
                step=number,
                rate=2e-3,
                beta1=rule.beta1,
                beta2=rule.beta2,
                eps=rule.eps,
                weight_decay=rule.weight_decay,
                ema=rule.ema,
            )
            step(device, constants, Flat(777, **held.address, **given.address))
            for name in ("exp_avg", "exp_avg_sq"):
                same(held.get(name), getattr(slices, name).numpy(), f"{name} at step {number}")
            for name in ("master", "ema"):
                got = held.get(name)
                want = getattr(slices, name).numpy()
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=3e-7, err_msg=f"{name} at step {number}")
                assert np.mean(got == want) > 0.9


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("kind", ["F32", "BF16", "none"])
def test_swap(device: Device, shift: int, kind: str) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16 if kind == "BF16" else np.float32)
    for count in SIZES:
        p, e = (np.arange(count, dtype=np.float32) * np.float32(factor) for factor in (1.001, -7.3))
        with ExitStack() as stack:
            held = Held(device, stack, {"p": p, "e": e, "out": np.zeros(count, dtype)}, shift)
            out = held.address["out"] if kind != "none" else 0
            swap(
                device,
                count,
                held.address["p"],
                held.address["e"],
                parameter=out,
                parameter_kind="F32" if kind == "none" else kind,
            )
            device.sync()
            same(held.get("p"), e, "p")
            same(held.get("e"), p, "e")
            same(held.get("out"), np.zeros(count, dtype) if kind == "none" else e.astype(dtype), "out")


def test_nothing_is_done_with_nothing_and_wrong_calls_are_refused(device: Device) -> None:
    constants = Constants.of(step=1, rate=1e-3)
    step(device, constants, Flat(0, 0, 0, 0, 0))
    swap(device, 0, 0, 0)
    with device.alloc(256) as memory:
        at = memory.address
        flat = Flat(4, at, at + 16, at + 32, at + 48)
        for wrong in (flat._replace(master=at + 18), flat._replace(gradient=at + 1, gradient_kind="BF16")):
            with pytest.raises(StorageError):
                step(device, constants, wrong)
        for threads in (33, 512, -32):
            with pytest.raises(StorageError):
                step(device, constants, flat, threads=threads)
            with pytest.raises(StorageError):
                swap(device, 4, at, at + 16, threads=threads)
        for where in ((at + 2, at + 16), (at, at + 18)):
            with pytest.raises(StorageError):
                swap(device, 4, *where)
        for kind in (0, 3):  # no BF16, no F32: what a caller of the C ABI may say
            with pytest.raises(StorageError):
                device.library.call("ema_swap", 4, at, at + 16, at + 32, kind, 0, 0, 0)
            for gradient, parameter in ((kind, 1), (1, kind)):
                with pytest.raises(StorageError):
                    device.library.call(
                        "adamw_ema",
                        byref(_Constants(*constants)),
                        4,
                        at,
                        gradient,
                        at + 16,
                        at + 32,
                        at + 48,
                        0,
                        at + 64,
                        parameter,
                        0,
                        0,
                        0,
                    )
        with pytest.raises(UsageError) as error:
            step(device, constants, flat._replace(parameter_kind="F16"))
        assert error.value.code == "E1575"
    with pytest.raises(UsageError) as error:
        Constants.of(step=0, rate=1e-3)
    assert error.value.code == "E1574"
