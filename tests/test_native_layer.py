"""The layer in the extension, on a CPU: equal to the one in Python, and as PyTorch uses it."""

from cases import RunPython, needs_toolchain

TWINS = """
import dataclasses, itertools, random, torch, fp8lt
from fp8lt import ops, recipe
from fp8lt.linear import _Linear
from fp8lt.main_grad import NO_MAIN_GRAD, MainGrad

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
                y = _Linear.apply(
                    args[0], args[1], bias, None, how, out_dtype, ops.OPERATORS, None, NO_MAIN_GRAD
                )
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
# Of all that may meet, a third: some 25 of the 72 mixtures for each recipe.
mixtures = list(itertools.product(
    [(), (0,), (3, 5), (90,)], [(bf16, bf16), (bf16, f32), (f32, bf16)], [None, bf16, f32],
    [bf16, f32], recipes,
))
for lead, (x_dtype, w_dtype), bias_dtype, out_dtype, how in random.Random(0).sample(
    mixtures, len(mixtures) // 3
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
                        args[0], args[1], bias, None, how, out_dtype, ops.OPERATORS, histories,
                        NO_MAIN_GRAD,
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

for how in [tensorwise, lean, *recipes]:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    # Without the transposed copy backward makes it, where there is one scale.
    for transposed in (True, False)[: 1 + (how.name == "tensorwise")]:
        if isinstance(how, recipe.DelayedScaling):
            continue
        wq = fp8lt.quantize_weight(w, recipe=how, transposed=transposed)
        y = ops.linear(x, w, None, wq, how, f32)
        gradients = torch.autograd.grad(y.sum(), (x, w))
        want = fp8lt.linear(x, w, recipe=how)
        assert torch.equal(y, want)
        assert all(map(torch.equal, gradients, torch.autograd.grad(want.sum(), (x, w))))

# dw added up elsewhere: in two calls, and with each of what autograd may get for it.
for how, n, w_dtype, returns in itertools.product(
    [tensorwise, *recipes], (24, 21), (bf16, f32), range(3)
):
    w, results = torch.randn(n, 40, dtype=w_dtype), []
    xs = [torch.randn(6, 40, dtype=w_dtype) for _ in range(2)]
    for native in (True, False):
        delayed = isinstance(how, recipe.DelayedScaling)
        state, total = fp8lt.DelayedState(how) if delayed else None, torch.ones(n, 40)
        for one in xs:
            x, wi = leaves((one, True), (w, True))
            histories, _ = state.histories(True) if state else (None, None)
            main_grad = MainGrad(total, returns)
            if native:
                y = ops.linear(x, wi, None, None, how, w_dtype, histories, main_grad)
            else:
                y = _Linear.apply(
                    x, wi, None, None, how, w_dtype, ops.OPERATORS, histories, main_grad
                )
            y.backward(torch.ones_like(y))
            assert (wi.grad is None) == (returns == 0)
            assert wi.grad is None or (wi.grad.dtype, wi.grad.shape) == (w_dtype, w.shape)
            assert returns != 2 or not wi.grad.any()
            results += [y.detach(), x.grad]
        results.append(total)
    half = len(results) // 2
    assert all(map(torch.equal, results[:half], results[half:])), how

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
def test_it_equals_the_layer_in_python_bit_for_bit(run_python: RunPython) -> None:
    """BUG-35."""
    assert int(run_python(TWINS).stdout) > 1000


@needs_toolchain
def test_it_is_a_citizen_of_pytorch(run_python: RunPython) -> None:
    assert run_python(CITIZENS).stdout == "done\n"
