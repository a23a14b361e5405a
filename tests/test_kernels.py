"""The quantise kernels on a CPU: the CUDA sources themselves, compiled by a C++ compiler.

What a GPU would add is not seen: speed, copies that are still on their way, launches that begin
early, clusters, blocks that run at the same time and wait for each other. All else is: every index,
every barrier (threads take turns in an order that is drawn anew each time), every byte, compared
with the operators' definition in PyTorch.
"""

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cases import needs_toolchain
from torch import Tensor

from fp8lt import build, device, emulate, toolchain
from fp8lt.emulate import Scaling

HERE = Path(__file__).parent / "cuda_on_cpu"
E4M3, E5M2 = device.OCP
REAL = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # csrc/quantize.h
CANARY, CANARY_BYTES = 0xA5, 64
pytestmark = needs_toolchain


class History(ctypes.Structure):
    _fields_ = (
        ("state", ctypes.c_void_p), ("length", ctypes.c_int64), ("margin", ctypes.c_int),
        ("most_recent", ctypes.c_bool), ("record", ctypes.c_bool),
    )  # fmt: skip


class Quantize(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p), ("real", ctypes.c_int), ("fp8", ctypes.c_int),
        ("scaling", ctypes.c_int64), ("history", History), ("folded", ctypes.c_bool),
        ("power_of_two", ctypes.c_bool), ("rows", ctypes.c_int64), ("cols", ctypes.c_int64),
        ("data", ctypes.c_void_p), ("data_t", ctypes.c_void_p), ("scale_inv", ctypes.c_void_p),
        ("scale_inv_t", ctypes.c_void_p), ("scale_count", ctypes.c_int64),
        ("fold_cols", ctypes.c_void_p), ("fold_rows", ctypes.c_void_p),
        ("sums", ctypes.c_void_p), ("sums_type", ctypes.c_int), ("scratch", ctypes.c_void_p),
        ("counters", ctypes.c_void_p), ("zeros", ctypes.c_void_p), ("next_zeros", ctypes.c_void_p),
    )  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compile the kernels with tests/cuda_on_cpu in the place of the hardware."""
    folder, tools = tmp_path_factory.mktemp("kernels"), toolchain.find()
    for file in (*build.SOURCE_DIR.glob("*.cu*"), *build.SOURCE_DIR.glob("quantize.*"),
                 build.SOURCE_DIR / "scaling.h", *HERE.iterdir()):  # fmt: skip
        shutil.copy(file, folder)  # ours last: intrinsics.cuh replaces theirs
    includes = [f"-I{folder}", f"-I{tools.cuda_home / 'include'}"]
    includes += [f"-idirafter{directory}" for directory in tools.include_dirs]

    def compile_one(source: Path) -> str:
        target = source.with_suffix(".o")
        command = [tools.cxx, "-O1", "-std=c++17", "-w", "-fPIC", *includes, "-x", "c++"]
        run([*command, "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, [*folder.glob("*.cu"), *folder.glob("*.cpp")]))
    library = folder / "libkernels.so"
    # Symbolic: the runtime's functions are those in here, not those that torch has loaded.
    run([tools.cxx, "-shared", "-Wl,-Bsymbolic", *objects, "-o", str(library)])
    loaded = ctypes.CDLL(str(library))
    loaded.size_of_quantize.restype = ctypes.c_size_t
    assert loaded.size_of_quantize() == ctypes.sizeof(Quantize)
    return loaded


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def guarded(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory of the size of `like` amid canaries, and that memory as such a tensor."""
    memory = torch.full((like.nbytes + 2 * CANARY_BYTES,), CANARY, dtype=torch.uint8)
    inside = memory[CANARY_BYTES : CANARY_BYTES + like.nbytes]
    return memory, inside.view(like.dtype).view(like.shape)


def address(t: Tensor | None) -> int | None:
    return t.data_ptr() if t is not None and t.numel() else None


def same(got: Tensor, want: Tensor) -> bool:
    got, want = got.float(), want.float()  # every NaN is one
    return bool((torch.eq(got, want) & (got.signbit() == want.signbit())
                 | got.isnan() & want.isnan()).all())  # fmt: skip


def check(
    kernels: ctypes.CDLL, x: Tensor, dtype: torch.dtype, scaling: Scaling, want: tuple,
    sums_dtype: torch.dtype | None = None, **options: object,
) -> None:  # fmt: skip
    """Run a kernel and compare all that it writes with `want`: data, data_t, scales, sums."""
    names = ["data", "data_t", "scale_inv", *["scale_inv_t"] * (len(want) == 5), "sums"]
    places = {name: guarded(t) for name, t in zip(names, want, strict=True)}
    q = Quantize(
        x=address(x), real=REAL[x.dtype], fp8=int(dtype == E5M2), scaling=int(scaling),
        rows=x.shape[0], cols=x.shape[1], scale_count=want[2].numel(),
        **{name: address(t) for name, (_, t) in places.items()}, **options,
    )  # fmt: skip
    if sums_dtype is None or not x.shape[0]:  # as quantize_ops.cpp
        q.sums = None
    else:
        q.sums_type = REAL[sums_dtype]
    assert kernels.run_quantize(ctypes.byref(q)) == 0
    for name, t in zip(names, want, strict=True):
        memory, got = places[name]
        assert (memory[:CANARY_BYTES] == CANARY).all(), name
        assert (memory[-CANARY_BYTES:] == CANARY).all(), name
        if name == "sums":
            if q.sums:  # the order of a sum is the kernel's own
                torch.testing.assert_close(got, t, rtol=1e-2, atol=1e-2, equal_nan=True)
        else:
            assert same(got, t), name


def matrix(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return rows and columns of all magnitudes, with NaN, Inf and zeros where there is room."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    if x.numel() > 400:
        x[1] *= 1e-3
        x[3] = 0
        x[130:140] *= 300
        x.view(-1)[-3], x.view(-1)[7] = 1e4, torch.nan
    if shape[0] > 200:
        x[205, 2] = torch.inf
    return x.to(dtype)


def without_nan(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=3.0, posinf=1e4)


def check_tiles(kernels: ctypes.CDLL, x: Tensor) -> None:
    """Run the kernel that holds tiles, where it does: there are no sums."""
    for (row_major, transposed), fp8, power in (
        ((True, True), E4M3, False), ((False, True), E5M2, True), ((True, False), E4M3, True),
    ):  # fmt: skip
        want = emulate.quantize_tensorwise(x, fp8, row_major, transposed, None, power)
        check(kernels, x, fp8, Scaling.TENSORWISE, want, power_of_two=power)


SHAPES = [(0, 5), (5, 0), (1, 1), (17, 33), (127, 129), (1, 300), (260, 520)]
WANTED = [(True, True, torch.float32), (True, False, None), (False, True, torch.bfloat16)]


def cases() -> Iterator[tuple]:
    """Yield (row_major, transposed, sums_dtype, FP8 dtype, power of two), each a few times."""
    yield from (
        (*wanted, dtype, power)
        for wanted, (dtype, power) in zip(
            itertools.cycle(WANTED), itertools.product((E4M3, E5M2), (False, True)), strict=False
        )
    )


@pytest.mark.parametrize("dtype", list(REAL))
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_write_what_the_operators_mean(
    kernels: ctypes.CDLL, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = matrix(shape, dtype)
    fold_cols, fold_rows = (
        torch.rand(emulate.padded(size), generator=torch.Generator().manual_seed(1)) * 3 + 0.1
        for size in reversed(shape)
    )
    finite = without_nan(x)  # under one scale a NaN leaves nothing to compare
    check_tiles(kernels, x)
    check_tiles(kernels, finite)
    for rows, columns, sums, fp8, power in cases():
        common = {"sums_dtype": sums, "power_of_two": power}
        want = emulate.quantize_tensorwise(finite, fp8, rows, columns, sums, power)
        check(kernels, finite, fp8, Scaling.TENSORWISE, want, **common)
        for folded, cols_by, rows_by in (
            (True, None, None), (False, None, None), (False, fold_cols, fold_rows),
            (False, fold_cols, None), (False, None, fold_rows),
        ):  # fmt: skip
            want = emulate.quantize_rowwise(
                x, fp8, rows, columns, power, folded, cols_by, rows_by, sums
            )
            by = {"fold_cols": address(cols_by), "fold_rows": address(rows_by)}
            check(kernels, x, fp8, Scaling.ROWWISE, want, folded=folded, **by, **common)
        for scaling in emulate.BLOCKWISE:
            square = scaling == Scaling.BLOCKWISE_128X128
            want = emulate.quantize_blockwise(x, fp8, rows, columns, power, square, sums)
            check(kernels, x, fp8, scaling, want, **common)


STEPS = (  # what x is multiplied by, what its last element is, whether the amax enters
    (1.0, None, True), (1e-2, None, False), (30.0, torch.inf, True), (0.0, None, True),
    (10.0, None, True), (1.0, torch.nan, True), (0.1, None, True), (2.0, None, True),
)  # fmt: skip


def test_a_matrix_that_is_held_in_part_is_read_to_its_end(kernels: ctypes.CDLL) -> None:
    """40 tiles and 6 blocks: the first holds tiles 39, 33 and 27 of its 7, and reads 9 again."""
    x = torch.randn(130, 2500, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[5, 9 * 128 + 7] = -500
    check_tiles(kernels, x)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (16, 16), (128, 256), (144, 400)])
def test_bytes_are_transposed(kernels: ctypes.CDLL, shape: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    data = torch.randint(256, shape, generator=draw, dtype=torch.uint8)
    memory, data_t = guarded(data.t().contiguous())
    q = Quantize(rows=shape[0], cols=shape[1], data=address(data), data_t=address(data_t))
    assert kernels.run_transpose(ctypes.byref(q)) == 0
    assert torch.equal(data_t, data.t())
    for edge in (memory[:CANARY_BYTES], memory[-CANARY_BYTES:]):
        assert (edge == CANARY).all()


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (130, 300)])
@pytest.mark.parametrize("dtype", list(REAL))
@pytest.mark.parametrize(
    ("length", "margin", "most_recent"),
    [(1, 0, False), (3, 1, False), (4, -1, True), (2, 2, True)],
)
def test_the_delayed_kernel_scales_by_its_history_and_enters_every_amax(
    kernels: ctypes.CDLL, shape: tuple[int, int], dtype: torch.dtype,
    length: int, margin: int, most_recent: bool,
) -> None:  # fmt: skip
    """BUG-28."""
    draw = torch.Generator().manual_seed(0)
    state = torch.zeros(length + 2)
    for (factor, last, record), (rows, columns, sums) in zip(
        STEPS, itertools.cycle(WANTED), strict=False
    ):
        x = torch.randn(shape, generator=draw) * factor
        if last is not None and x.numel():
            x.view(-1)[-1] = last
        if factor == 10:
            state[length] = 99  # whoever wrote that
        x, mine, power = x.to(dtype), state.clone(), length == 3
        history = History(mine.data_ptr(), length, margin, most_recent, record)
        want = emulate.quantize_delayed(
            x, E5M2, rows, columns, state, margin, most_recent, record, sums, power
        )
        check(
            kernels, x, E5M2, Scaling.TENSORWISE, want,
            history=history, sums_dtype=sums, power_of_two=power,
        )  # fmt: skip
        assert torch.equal(mine, state)
