"""The build: found tools, cache keys, one builder, messages. Real compilers, real processes.

Compiling takes most of a minute, so the whole thing happens once, for all tests of this file; it
needs a CUDA build of torch and an nvcc, and is skipped, with the reason, where there is none.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import needs_toolchain

from fp8lt import build, toolchain

Run = Callable[..., subprocess.CompletedProcess]
LOAD = "import fp8lt; from fp8lt import build; print(build.loaded_library()); print(build.ensure())"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(cache: Path) -> Run:
    """Run Python code in a process whose extension is built whether it has a GPU or not."""

    def call(code: str = LOAD, wait: bool = True, **env: str) -> subprocess.CompletedProcess:
        environment = {
            **os.environ,
            "FP8LT_BUILD": "force",
            "FP8LT_CACHE_DIR": str(cache),
            "TORCH_CUDA_ARCH_LIST": "9.0a",
            **env,
        }
        child = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        if not wait:
            return child  # type: ignore[return-value]
        out, err = child.communicate(timeout=300)
        assert child.returncode == 0, err
        return subprocess.CompletedProcess(code, 0, out, err)

    return call


@needs_toolchain
def test_two_processes_starting_cold_build_once_and_both_load(run: Run, cache: Path) -> None:
    start = time.monotonic()
    children = [run(wait=False), run(wait=False)]
    outputs = [child.communicate(timeout=300) for child in children]  # type: ignore[attr-defined]
    seconds = time.monotonic() - start
    (library,) = cache.glob("*/fp8lt.so")
    assert [out.splitlines() for out, _ in outputs] == [[str(library), "None"]] * 2
    errors = "".join(err for _, err in outputs)
    assert errors.count("compiling the CUDA extension") == 1
    assert errors.count("waiting for another process") == 1
    assert not list(cache.glob("*.build-*"))
    print(f"cold build: {seconds:.0f} s")


@needs_toolchain
def test_a_second_import_loads_from_the_cache_quietly_and_fast(run: Run) -> None:
    run()  # built by the test before, or now
    done = run(
        "import time, torch; t = time.perf_counter(); import fp8lt\n"
        "print(time.perf_counter() - t); from fp8lt import build; assert build.loaded_library()"
    )
    assert done.stderr == ""
    assert float(done.stdout) < 0.3  # measured 0.04 on two cores


@needs_toolchain
def test_the_binary_holds_code_for_hopper_and_links_the_libraries_of_torch(
    run: Run, cache: Path
) -> None:
    run()
    binary = next(cache.glob("*/fp8lt.so")).read_bytes()
    assert b"sm_90a" in binary
    assert b"libcublasLt.so.1" in binary
    code = (
        "import torch, fp8lt, re\n"
        "maps = open('/proc/self/maps').read()\n"
        "for name in ('libcublasLt.so', 'libcudart.so'):\n"
        "    files = {f for f in maps.split() if '/' + name in f}\n"
        "    assert len(files) == 1, files\n"
        "compiled, loaded = torch.ops.fp8lt.cublaslt_versions()\n"
        "assert compiled // 10000 == loaded // 10000 >= 12"
    )
    run(code)


TWINS = """
import dataclasses, itertools, torch, fp8lt
from fp8lt import ops, recipe
from fp8lt.linear import _Linear

def leaves(*tensors): return [t.clone().requires_grad_(need) for t, need in tensors]

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
tensorwise, count = recipe.resolve("tensorwise"), 0
lean = recipe.DynamicScaling(recompute_weight=True)
for lead, x_dtype, w_dtype, bias_dtype, out_dtype, how in itertools.product(
    [(), (0,), (3, 5), (90,)], [bf16, f32], [bf16, f32], [None, bf16, f32], [bf16, f16, f32],
    [tensorwise, lean],
):
    x, w = torch.randn(*lead, 40, dtype=x_dtype), torch.randn(24, 40, dtype=w_dtype)
    b = [] if bias_dtype is None else [torch.randn(24, dtype=bias_dtype)]
    for needs in itertools.product([True, False], repeat=2 + len(b)):
        results = []
        for native in (True, False):
            args = leaves(*zip([x, w, *b], needs, strict=True))
            bias = args[2] if b else None
            if native:
                y = ops.linear(args[0], args[1], bias, None, how, out_dtype)
            elif any(needs):
                y = _Linear.apply(args[0], args[1], bias, None, how, out_dtype, False, None)
            else:
                y = fp8lt.linear(args[0], args[1], bias, out_dtype=out_dtype)
            if any(needs):
                y.backward(torch.ones((), dtype=out_dtype).expand(y.shape))
            results.append([y.detach(), *(a.grad for a in args)])
        for got, want in zip(*results, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                assert (got.dtype, got.stride()) == (want.dtype, want.stride())
                assert got.shape == want.shape and torch.equal(got, want)
                count += 1

# The other recipes, in two calls: what the first leaves in a history, the second scales by.
recipes = [recipe.resolve(name) for name in recipe.NAMES[1:]]
recipes += [dataclasses.replace(one, recompute_weight=True) for one in recipes]
recipes += [
    recipe.DelayedScaling(margin=1, amax_compute_algo="most_recent", power_of_two_scales=True),
    recipe.RowwiseScaling(power_of_two_scales=False, fp8_format="hybrid"),
]
for lead, (x_dtype, w_dtype), bias_dtype, out_dtype, how in itertools.product(
    [(), (0,), (3, 5), (90,)], [(bf16, bf16), (bf16, f32), (f32, bf16)], [None, bf16, f32],
    [bf16, f32], recipes,
):
    w = torch.randn(24, 40, dtype=w_dtype)
    b = [] if bias_dtype is None else [torch.randn(24, dtype=bias_dtype)]
    xs = [torch.randn(*lead, 40, dtype=x_dtype) * size for size in (1, 3)]
    dys = [torch.randn(*lead, 24, dtype=out_dtype) for _ in xs]
    for needs in itertools.product([True, False], repeat=2 + len(b)):
        if not any(needs):
            continue
        results = []
        for native in (True, False):
            delayed = isinstance(how, recipe.DelayedScaling)
            state, result = fp8lt.DelayedState(how) if delayed else None, []
            for x, dy in zip(xs, dys, strict=True):
                args = leaves(*zip([x, w, *b], needs, strict=True))
                bias = args[2] if b else None
                histories, _ = state.histories(True) if state else (None, None)
                if native:
                    y = ops.linear(args[0], args[1], bias, None, how, out_dtype, histories)
                else:
                    y = _Linear.apply(
                        args[0], args[1], bias, None, how, out_dtype, False, histories
                    )
                y.backward(dy)
                result += [y.detach(), *(a.grad for a in args)]
            results.append([*result, state.amaxes] if state else result)
        for got, want in zip(*results, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                assert (got.dtype, got.stride()) == (want.dtype, want.stride())
                assert got.shape == want.shape and torch.equal(got, want), how
                count += 1

for how in recipes:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    if not isinstance(how, recipe.DelayedScaling):
        wq = fp8lt.quantize_weight(w, recipe=how)
        y = ops.linear(x, w, None, wq, how, f32)
        gradients = torch.autograd.grad(y.sum(), (x, w))
        want = fp8lt.linear(x, w, recipe=how)
        assert torch.equal(y, want)
        assert all(map(torch.equal, gradients, torch.autograd.grad(want.sum(), (x, w))))

x, w = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
run = lambda: ops.linear(x, w, None, None, tensorwise, f32)
assert run().add_(1).grad_fn is not None
(dx,) = torch.autograd.grad(run().sum(), x, create_graph=True)
try:
    dx.pow(2).sum().backward()
except RuntimeError as error:
    assert "fp8lt.linear cannot be differentiated twice" in str(error)
else:
    raise AssertionError("differentiated twice")

class Blind(torch.autograd.Function):  # gives no gradient to what it was made of
    @staticmethod
    def forward(ctx, y): return y.clone()
    @staticmethod
    def backward(ctx, dy): return None

for y in (run(), fp8lt.linear(x, w)):
    assert torch.autograd.grad(Blind.apply(y).sum(), (x, w), allow_unused=True) == (None, None)

# What torch.func nests is a derivative of the operators, which have none.
for how in map(recipe.resolve, (name for name in recipe.NAMES if name != "delayed")):
    loss = lambda x, w: ops.linear(x, w, None, None, how, f32).pow(2).sum()
    want = torch.autograd.grad(loss(x, w), w)[0]
    assert torch.equal(torch.func.grad(loss, 1)(x.detach(), w.detach()), want)
    by_value = lambda w: torch.func.grad_and_value(lambda x: loss(x, w))(x.detach())[1]
    twice = lambda w: torch.func.grad(loss, 1)(x.detach(), w).sum()
    for nested in (torch.func.grad(by_value), torch.func.grad(twice)):
        try:
            nested(w.detach())
        except RuntimeError as error:
            assert "derivative for fp8lt::" in str(error), error
        else:
            raise AssertionError("a derivative was lost")
wq = fp8lt.quantize_weight(w)
assert torch.equal(ops.linear(x, w, None, wq, tensorwise, f32), run())
assert torch.equal(ops.linear(x, w, None, wq, lean, f32), run())
with torch.inference_mode():
    assert torch.equal(ops.linear(x, w, None, None, tensorwise, f32), run())
print(count)
"""

# What others do with a layer: each must find in the extension what it finds in Python.
CITIZENS = """
import torch, fp8lt
from torch.utils.checkpoint import checkpoint
from torch.overrides import TorchFunctionMode
from fp8lt import build, ops, recipe

assert build.module() is not None
tensorwise = recipe.resolve("tensorwise")
linear = lambda x, w, bias=None: ops.linear(x, w, bias, None, tensorwise, x.dtype)
torch.manual_seed(0)
x, w = torch.randn(6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

# A checkpoint runs its forward again while backward unpacks what was saved.
block = lambda t: linear(linear(t, w).relu(), w.t().contiguous() * 2)
want = torch.autograd.grad(block(x).pow(2).sum(), (x, w))
y = checkpoint(block, x, use_reentrant=False)
assert all(map(torch.equal, torch.autograd.grad(y.pow(2).sum(), (x, w)), want))
y = checkpoint(block, x, use_reentrant=True)
y.pow(2).sum().backward()
assert torch.equal(x.grad, want[0]) and torch.equal(w.grad, want[1])

for how in map(recipe.resolve, recipe.NAMES):
    found = []
    for again in (None, False, True):
        states = [fp8lt.DelayedState() if how.name == "delayed" else None for _ in range(2)]
        def one(x, w, state):
            histories, _ = state.histories(torch.is_grad_enabled()) if state else (None, None)
            return ops.linear(x, w, None, None, how, x.dtype, histories)
        two = lambda t: one(one(t, w, states[0]).relu(), w.t().contiguous() * 2, states[1])
        for _ in range(2):
            y = two(x) if again is None else checkpoint(two, x, use_reentrant=again)
            gradients = torch.autograd.grad(y.pow(2).sum(), (x, w)) if not again else ()
        found.append([y.detach(), *gradients, *(state.amaxes for state in states if state)])
    assert all(map(torch.equal, found[0], found[1])), how.name
    assert torch.equal(found[0][0], found[2][0]) or how.name == "delayed"

# A transform, a subclass, a mode, a profiler hear of the operator.
W = torch.randn(3, 8, 8, requires_grad=True)
torch.vmap(lambda w: linear(x.detach(), w))(W).sum().backward()
loop = torch.randn(3, 8, 8).copy_(W.detach()).requires_grad_()
sum(linear(x.detach(), w).sum() for w in loop).backward()
assert torch.equal(W.grad, loop.grad)

class Mine(torch.Tensor):
    pass

assert type(linear(x.detach().as_subclass(Mine), w)) is Mine

class Listen(TorchFunctionMode):
    heard = []
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))

with Listen():
    linear(x, w)
assert any("fp8lt.linear" in name for name in Listen.heard)
with torch.profiler.profile() as profiler:
    linear(x, w)
assert {"fp8lt::linear", "fp8lt::quantize_tensorwise", "fp8lt::gemm_nt"} <= {
    event.name for event in profiler.events()
}

# A selective checkpoint keeps what a GEMM gave: nothing may be added to that in place.
import functools
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

def policy(ctx, op, *args, **kwargs):
    kept = op == torch.ops.fp8lt.gemm_nt.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

b = torch.randn(8, requires_grad=True)
for shape in ((6, 8), (2, 3, 8)):
    t = torch.randn(shape, requires_grad=True)
    block = lambda t: linear(torch.nn.functional.silu(linear(t, w, b)), w)
    want = torch.autograd.grad(block(t).pow(2).sum(), (t, w, b))
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    y = checkpoint(block, t, use_reentrant=False, context_fn=contexts)
    assert all(map(torch.equal, torch.autograd.grad(y.pow(2).sum(), (t, w, b)), want))

# Nothing to sum; nothing to multiply.
bias = torch.zeros(0, requires_grad=True)
linear(x.detach(), torch.zeros(0, 8), bias).sum().backward()
assert bias.grad.shape == (0,)
try:
    ops.linear(torch.zeros(()), w, None, None, tensorwise, torch.float32)
except RuntimeError as error:
    assert "want x [..., K] and w [N, K], got [] and [8, 8]" in str(error)
else:
    raise AssertionError("a number has no rows")

# Built without Python's headers there is no such function.
want = linear(x, w)
build._module = None
assert torch.equal(linear(x, w), want)
print("done")
"""


@needs_toolchain
def test_the_layer_in_the_extension_equals_the_one_in_python_bit_for_bit(run: Run) -> None:
    assert int(run(TWINS).stdout) > 1000


@needs_toolchain
def test_the_layer_in_the_extension_is_a_citizen_of_pytorch(run: Run) -> None:
    assert run(CITIZENS).stdout == "done\n"


@needs_toolchain
def test_a_damaged_binary_is_built_anew(run: Run, cache: Path) -> None:
    run()
    library = next(cache.glob("*/fp8lt.so"))
    library.write_bytes(library.read_bytes()[:1000])
    done = run()
    assert done.stdout.splitlines() == [str(library), "None"]
    assert "compiling" in done.stderr


@needs_toolchain
def test_a_failed_compile_is_one_warning_with_the_reason_and_the_log(
    run: Run, tmp_path: Path
) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *--version*|*-v*|*-dump*) exec c++ "$@";; esac\n'
        'echo "gemm.cpp:1: error: this compiler is broken" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    done = run(CXX=str(compiler))
    assert done.stdout.splitlines()[0] == "None"
    assert done.stderr.count("error: this compiler is broken") == 1
    assert "without its CUDA extension: compiling the CUDA extension failed" in done.stderr
    log = Path(done.stdout.splitlines()[-1].removeprefix("The whole log: "))
    assert "this compiler is broken" in log.read_text()


def test_a_missing_nvcc_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain.torch.version, "cuda", "97.1")
    with pytest.raises(
        toolchain.ToolchainError, match=r"no nvcc of CUDA 97.*\n?.*fp8lt\[toolkit\]"
    ):
        toolchain.find()


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.torch.version, "cuda", None)
    with pytest.raises(toolchain.ToolchainError, match="built without CUDA"):
        toolchain.find()


def test_a_missing_compiler_or_one_with_arguments_is_named() -> None:
    for cxx in ("no-such-compiler", "c++ -m64"):
        with pytest.raises(toolchain.ToolchainError, match=f"{re.escape(repr(cxx))} does not run"):
            toolchain._cxx_version(cxx)


def test_build_off_neither_compiles_nor_loads(run: Run) -> None:
    done = run(FP8LT_BUILD="off")
    assert done.stdout.splitlines()[0] == "None"
    assert "FP8LT_BUILD=off" in done.stdout
    assert done.stderr == ""


def test_nowhere_to_write_is_an_error_that_lists_what_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FP8LT_CACHE_DIR", "/dev/null/a")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/dev/null/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/c")
    with pytest.raises(build.BuildError, match="set FP8LT_CACHE_DIR") as caught:
        build._cache_dir()
    assert all(f"/dev/null/{name}" in str(caught.value) for name in "abc")


def test_any_failure_is_kept_and_does_not_break_the_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full_disk() -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "_load", full_disk)
    monkeypatch.setattr(build, "_outcome", None)
    assert build.ensure() == "OSError: [Errno 28] No space left on device"
    monkeypatch.setattr(build, "_load", lambda: 1 / 0)
    assert build.ensure() == build.failure() == "OSError: [Errno 28] No space left on device"


def test_a_file_system_without_locks_does_not_stop_a_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(build.fcntl, "flock", no_locks)
    with build._locked(tmp_path / "lock"):
        pass


def test_flags_that_nvcc_takes_from_the_environment_are_in_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools = toolchain.Toolchain(Path(), "13.0.88", "c++", "12", (), Path(), Path(), Path())
    keys = {tuple(build._versions(tools))}
    for name in ("CC", "PYTORCH_NVCC", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.setenv(name, "changed")
        keys.add(tuple(build._versions(tools)))
    assert len(keys) == 5


def test_everything_that_changes_the_binary_changes_the_key() -> None:
    base = ({"a.cu": "x"}, "-O3", ["torch 1", "nvcc 13"])
    others = [
        ({"a.cu": "y"}, *base[1:]),
        ({"b.cu": "x"}, *base[1:]),
        (base[0], "-O2", base[2]),
        (*base[:2], ["torch 2", "nvcc 13"]),
    ]
    keys = {build.cache_key(*inputs) for inputs in (base, *others)}
    assert len(keys) == 5
    assert build.cache_key(*base) == build.cache_key(*base)
    assert all(len(key) == 16 for key in keys)


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ("7.5 8.0;9.0a", "9.0a"),
        ("8.9;9.0+PTX", "8.9;9.0+PTX"),
        ("8.0", "9.0"),
        ("", "9.0"),
        ("Hopper", "9.0"),
    ],
)
def test_architectures_are_those_asked_for_that_have_fp8(
    monkeypatch: pytest.MonkeyPatch, asked: str, got: str
) -> None:
    monkeypatch.setattr(build.device, "gpus", lambda: ())
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert build.architectures() == got


def test_architectures_default_to_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = build.device.Gpu("a GPU", (8, 9), 0, "580")
    old = gpu._replace(capability=(8, 0))
    monkeypatch.setattr(build.device, "gpus", lambda: (gpu._replace(capability=(9, 0)), gpu, old))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert build.architectures() == "8.9;9.0"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a;10.0")  # lacks one of the GPUs here
    assert build.architectures() == "9.0a;10.0;8.9"
