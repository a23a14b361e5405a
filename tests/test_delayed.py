"""Delayed scaling: the operator against a model of its ring, and the layer on top of it."""

import math
import threading

import pytest
import torch
from cases import CountOps, assert_same, awkward, layouts, randn, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fp8lt
from fp8lt import DelayedScaling, DelayedState, device, ops

E4M3, E5M2 = device.OCP
CPU = torch.device("cpu")
GPU0 = torch.device("cuda", 0)


def state_of(*amaxes: float, length: int = 4, on: torch.device = CPU) -> Tensor:
    """Return the row of one role after these amaxes; at most `length` of them."""
    ring = [*amaxes, *[0.0] * (length - len(amaxes))]
    return torch.tensor([*ring, len(amaxes) % length, bool(amaxes)], device=on)


def one(amax: float) -> Tensor:
    return torch.tensor([[amax, -0.0]])


# ------------------------------------------------------------------------------------ the operator


class Ring:
    """Ten lines that say what the operator does to its state, in Python's floats."""

    def __init__(self, length: int) -> None:
        self.held, self.length = [], length  # the most recent last

    def scale(self, amax: float, margin: int, most_recent: bool, fp8_max: float) -> float:
        a = amax if not self.held else self.held[-1] if most_recent else max(self.held)
        return fp8_max / (max(a, 1e-12) * 2.0**margin)

    def record(self, amax: float) -> None:
        if math.isfinite(amax) and amax > 0:
            self.held = [*self.held, amax][-self.length :]


AMAXES = st.one_of(
    st.sampled_from([0.0, math.inf, math.nan, 2.0**-45, 448.0]),  # 2**-45 is below EPS
    st.floats(2.0**-60, 2.0**60, width=32),
)


@settings(max_examples=200, deadline=None)
@given(
    calls=st.lists(st.tuples(AMAXES, st.booleans()), min_size=1, max_size=12),
    length=st.integers(1, 5),
    most_recent=st.booleans(),
    margin=st.integers(-1, 2),
    dtype=st.sampled_from([E4M3, E5M2]),
)
def test_the_state_is_a_ring_of_amaxes(
    calls: list[tuple[float, bool]], length: int, most_recent: bool, margin: int, dtype: torch.dtype
) -> None:
    """BUG-28."""
    state, model, fp8_max = state_of(length=length), Ring(length), torch.finfo(dtype).max
    options = {"margin": margin, "most_recent": most_recent}
    for amax, record in calls:
        before, x = state.clone(), one(amax)
        q = ops.quantize_delayed(x, dtype, state, record=record, **options)
        scale = torch.tensor(model.scale(amax, margin, most_recent, fp8_max), dtype=torch.float32)
        if math.isfinite(amax):
            assert torch.equal(q.scale_inv, scale.reciprocal().expand(16))
            want = (x * scale).clamp(-fp8_max, fp8_max).to(dtype)
            assert torch.equal(q.data[:1, :2].float(), want.float())
        else:
            assert q.scale_inv.isnan().all()
        if not record:
            assert torch.equal(state, before)
            continue
        model.record(amax)
        position = int(state[length])
        oldest_first = [*state[position:length].tolist(), *state[:position].tolist()]
        assert oldest_first == [0.0] * (length - len(model.held)) + model.held
        assert state[length + 1] == bool(model.held)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 5), (1, 16), (17, 100), (130, 33)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_first_use_is_tensorwise(
    on: torch.device, dtype: torch.dtype, shape: tuple[int, int], power_of_two: bool
) -> None:
    x = randn(*shape, on=on, dtype=dtype)
    options = {"sums_dtype": torch.float32, "power_of_two": power_of_two, "emulated": True}
    for _, view in layouts(x):
        state = state_of(on=on)
        got = ops.quantize_delayed(view, E4M3, state, **options)
        want = ops.quantize_tensorwise(view, E4M3, **options)
        assert_same(got, want)
        assert torch.equal(got.sums, want.sums)
        amax = x.abs().max().item() if x.numel() else 0.0
        assert torch.equal(state, state_of(*([amax] if amax else []), on=on))


def test_only_the_layouts_asked_for_are_made() -> None:
    x = randn(5, 20, on=CPU, dtype=torch.float32)
    for row_major, transposed in ((True, False), (False, True)):
        layout = {"row_major": row_major, "transposed": transposed}
        q = ops.quantize_delayed(x, E5M2, state_of(1.0), **layout)
        assert (q.data.numel() > 0, q.data_t.numel() > 0) == (row_major, transposed)
        assert (q.data.dtype, q.sums.numel(), len(q.scale_inv)) == (E5M2, 0, 32)


def test_what_exceeds_the_history_saturates_and_a_margin_leaves_room() -> None:
    x = torch.tensor([[1.0, 3.0, -5.0]])
    for margin, want in ((0, [1.0, 2.0, -2.0]), (1, [1.0, 3.0, -4.0]), (2, [1.0, 3.0, -5.0])):
        q = ops.quantize_delayed(x, E4M3, state_of(2.0), margin=margin)
        assert (q.data[0, :3].float() * q.scale_inv[0]).tolist() == pytest.approx(want, rel=0.07)
    first = ops.quantize_delayed(one(2.0), E4M3, state_of(), margin=1)
    assert first.data[0, 0].item() == 224  # a margin from the first use on


@pytest.mark.parametrize("state", [state_of(), state_of(3.0)], ids=["first", "later"])
def test_nothing_finite_comes_of_what_is_not_and_it_never_enters(state: Tensor) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        x, before = torch.ones(3, 20), state.clone()
        x[1, 7] = bad
        q = ops.quantize_delayed(x, E4M3, state)
        assert q.scale_inv.isnan().all()
        assert torch.equal(state, before)


def test_zeros_and_empty_tensors_do_not_enter() -> None:
    state = state_of(3.0)
    for x in (torch.zeros(4, 4), torch.ones(0, 4), torch.ones(4, 0)):
        q = ops.quantize_delayed(x, E4M3, state)
        assert torch.equal(state, state_of(3.0))
        assert q.scale_inv.isfinite().all()
        assert not q.data.float().any()


@pytest.mark.parametrize("record", [True, False])
def test_the_operator_passes_opcheck(record: bool, opcheck_fp8: None) -> None:
    for x in (randn(17, 40, on=CPU, dtype=torch.bfloat16), torch.ones(1, 1), torch.ones(0, 3)):
        for most_recent in (False, True):
            for sums in (None, torch.bfloat16):
                args = (x, E4M3, True, True, state_of(0.5, 2.0), 1, most_recent, record, sums)
                torch.library.opcheck(torch.ops.fp8lt.quantize_delayed.default, args)


def test_meta_tensors_get_shapes() -> None:
    x, state = torch.empty(17, 35, device="meta"), torch.empty(6, device="meta")
    q = ops.quantize_delayed(x, E4M3, state, sums_dtype=torch.bfloat16)
    assert [t.shape for t in q[:5]] == [(32, 48), (48, 32), (48,), (48,), (35,)]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(2), r"want state \[H \+ 2\], H >= 1, contiguous, float32, got \[2\]"),
        (torch.zeros(1, 6), r"got \[1, 6\] torch.float32"),
        (torch.zeros(12)[::2], "contiguous"),
        (torch.zeros(6, dtype=torch.bfloat16), r"got \[6\] torch.bfloat16"),
        (torch.zeros(6, device="meta"), "want state on cpu, as x is, got it on meta"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.quantize_delayed(torch.ones(2, 2), E4M3, state, emulated=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_native_bytes_and_states_equal_emulated(dtype: torch.dtype) -> None:
    for shape in ((1, 16), (17, 100), (1027, 515)):
        for margin, most_recent, record in ((0, False, True), (1, True, True), (-1, True, False)):
            states = state_of(), state_of(on=GPU0)
            for step in range(6):
                x = awkward(*shape, dtype) if step == 2 else randn(*shape, on=CPU, dtype=dtype)
                options = {"margin": margin, "most_recent": most_recent, "record": record}
                want = ops.quantize_delayed(x * step, E4M3, states[0], **options)
                got = ops.quantize_delayed((x * step).cuda(), E4M3, states[1], **options)
                assert_same(got, want)
                assert torch.equal(states[1].cpu(), states[0])


@pytest.mark.gpu
def test_large_matrices_without_a_history_take_their_own_amax_in_one_launch() -> None:
    for shape in ((4096, 8192), (128, 65536), (65536, 16)):
        x = randn(*shape, on=GPU0, dtype=torch.bfloat16)
        for _ in range(20):
            state = state_of(on=GPU0)
            got = ops.quantize_delayed(x, E4M3, state)
            want = ops.quantize_tensorwise(x, E4M3)
            assert torch.equal(got.scale_inv, want.scale_inv)
            assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
            assert state[0] == x.abs().max()


@pytest.mark.gpu
def test_two_streams_that_share_a_state_end_and_leave_it_whole() -> None:
    """BUG-83."""
    x = [randn(2048, 4096, on=GPU0, dtype=torch.bfloat16) * size for size in (1, 3)]
    streams = [torch.cuda.Stream(GPU0) for _ in x]
    torch.cuda.synchronize()
    for _ in range(50):
        state = state_of(on=GPU0)
        torch.cuda.synchronize()
        for stream, mine in zip(streams, x, strict=True):
            with torch.cuda.stream(stream):
                ops.quantize_delayed(mine, E4M3, state)
        torch.cuda.synchronize()
        *ring, place, recorded = state.tolist()
        amaxes = {0.0, *(float(mine.abs().max()) for mine in x)}
        assert set(ring) <= amaxes
        assert recorded == 1
        assert place in (1, 2)  # one may have been lost


# ------------------------------------------------------------------------------------- the layer

RECIPE = DelayedScaling(amax_history_len=3)


def leaves(m: int = 12, n: int = 20, k: int = 36) -> list[Tensor]:
    """Return x, w, bias; N is not K."""
    shapes = [(m, k), (n, k), (n,)]
    return [
        randn(*s, on=CPU, dtype=torch.float32, seed=i).requires_grad_()
        for i, s in enumerate(shapes)
    ]


def ring(state: DelayedState) -> list[list[float]]:
    return state.amaxes[:, :-2].tolist()


def test_every_call_is_an_entry_of_x_w_and_dy() -> None:
    """BUG-44."""
    (x, w, b), state = leaves(), DelayedState(RECIPE)
    x_amax, w_amax = x.abs().max().item(), w.abs().max().item()
    for call in range(1, 5):
        y = fp8lt.linear(x * call, w, b, recipe=RECIPE, state=state)
        y.backward(torch.full_like(y, float(call)))
    assert ring(state) == [
        pytest.approx([4 * x_amax, 2 * x_amax, 3 * x_amax]), [w_amax] * 3, [4.0, 2.0, 3.0],
    ]  # fmt: skip
    assert state.amaxes[:, -2:].tolist() == [[1.0, 1.0]] * 3


def test_a_scale_comes_from_the_calls_before() -> None:
    (x, w, b), state = leaves(), DelayedState(RECIPE)
    for call in range(3):
        y = fp8lt.linear(x, w, b, recipe=RECIPE, state=state)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        if call == 0:
            want = y, dx
    assert torch.equal(y, want[0])
    assert torch.equal(dx, want[1])
    far = fp8lt.linear(100 * x, w, b, recipe=RECIPE, state=state)  # saturates
    assert far.abs().max() < 5 * y.abs().max()


def test_without_gradients_nothing_changes() -> None:
    """BUG-46."""
    (x, w, b), state = leaves(), DelayedState(RECIPE)
    fp8lt.linear(x, w, b, recipe=RECIPE, state=state).sum().backward()
    before = state.amaxes.clone()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            fp8lt.linear(1e3 * x, w, b, recipe=RECIPE, state=state)
    fp8lt.linear(1e3 * x.detach(), w.detach(), recipe=RECIPE, state=state)
    assert torch.equal(state.amaxes, before)


@pytest.mark.parametrize("kept", [{"recompute_weight": True}, {"fp8_format": "e4m3"}, {}])
def test_backward_takes_the_recipe_and_scales_of_its_forward(kept: dict) -> None:
    recipe = DelayedScaling(amax_history_len=3, **kept)
    x, w, b = leaves()
    dy = randn(12, 20, on=CPU, dtype=torch.float32, seed=5)
    want = run(x, w, b, dy, recipe=recipe)
    state = DelayedState(recipe)
    y = fp8lt.linear(x, w, b, recipe=recipe, state=state)
    with torch.no_grad():
        state.amaxes[:2, :3] *= 64  # other calls in between
        state.amaxes[:2, 4] = 1
    assert all(map(torch.equal, torch.autograd.grad(y, (x, w, b), dy), want[1:]))


def test_gradients_are_fp8_wherever_backward_runs() -> None:
    (x, w, b), model = leaves(), fp8lt.Linear(36, 20, recipe=RECIPE)
    for forward in (lambda: fp8lt.linear(x, w, b, recipe=RECIPE, state=DelayedState(RECIPE)),
                    lambda: model(x)):  # fmt: skip
        with torch.autocast("cpu", dtype=torch.bfloat16), fp8lt.reuse_weights(model):
            y, again = forward(), forward()
        counts: list[tuple[int, int]] = []

        def backward(y: Tensor = y, counts: list[tuple[int, int]] = counts) -> None:
            with CountOps() as count, fp8lt.disable_fp8(model):
                y.float().sum().backward()
            counts.append((count.counts["quantize_delayed"], count.counts["gemm_nt"]))

        backward(again)
        thread = threading.Thread(target=backward)  # as the engine of a GPU has
        thread.start()
        thread.join()
        assert counts == [(1, 2), (1, 2)]


@pytest.mark.parametrize("recompute_weight", [False, True])
def test_aot_autograd_traces_it_in_one_graph_with_its_state(recompute_weight: bool) -> None:
    recipe = DelayedScaling(amax_history_len=2, recompute_weight=recompute_weight)
    states = DelayedState(recipe), DelayedState(recipe)

    def step(x: Tensor, w: Tensor, b: Tensor, state: DelayedState) -> Tensor:
        hidden = fp8lt.linear(x, w, b, recipe=recipe, state=state)
        return hidden + fp8lt.linear(2 * x, w, recipe=recipe, state=state)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x, w, b = leaves()
    for call in range(1, 4):
        dy = torch.full((12, 20), float(call))
        ys = compiled(call * x, w, b, states[0]), step(call * x, w, b, states[1])
        assert torch.equal(*ys)
        assert torch.equal(states[0].amaxes, states[1].amaxes)
        assert all(map(torch.equal, *(torch.autograd.grad(y, (x, w, b), dy) for y in ys)))
        assert torch.equal(states[0].amaxes, states[1].amaxes)


def test_forty_layers_compile_once() -> None:
    layers = torch.nn.Sequential(*[fp8lt.Linear(16, 16, recipe="delayed") for _ in range(40)])
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layers, backend=counter, fullgraph=True)
    for _ in range(4):
        compiled(torch.randn(4, 16)).sum().backward()
    assert counter.frame_count == 1
    assert all((layer.fp8_state[:, -2] == 4).all() for layer in layers)


# ---------------------------------------------------------------------------------- what is refused


def test_a_function_needs_a_state_that_fits() -> None:
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"state: .* make fp8lt\.DelayedState\(recipe, device\)"):
        fp8lt.linear(x, w, recipe="delayed")
    with pytest.raises(ValueError, match=r"state: recipe 'delayed' needs one"):
        fp8lt.quantize_weight(w, recipe="delayed")
    with pytest.raises(ValueError, match="want None with recipe 'tensorwise'"):
        fp8lt.linear(x, w, state=DelayedState())
    with pytest.raises(TypeError, match=r"want a fp8lt\.DelayedState, got Tensor"):
        fp8lt.linear(x, w, recipe="delayed", state=torch.zeros(3, 18))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="want a history of 3 on cpu, got 16 on cpu"):
        fp8lt.linear(x, w, recipe=RECIPE, state=DelayedState())
    with pytest.raises(ValueError, match="on cpu, got 16 on meta"):
        fp8lt.linear(x, w, recipe="delayed", state=DelayedState(device="meta"))
    with pytest.raises(ValueError, match="want 'delayed' or a DelayedScaling, got 'tensorwise'"):
        DelayedState("tensorwise")


def test_it_runs_on_every_gpu_that_tensorwise_runs_on() -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):
        answers = [
            device.capability_support("a GPU", capability, n) for n in ("tensorwise", "delayed")
        ]
        assert answers[0] == answers[1]
    native = device.Support("native", "")
    assert device.with_cublaslt(native, 120804, "delayed") == native


def test_a_layer_converted_in_inference_mode_trains_outside_of_it() -> None:
    """BUG-55."""
    layer = nn.Linear(16, 16)
    with torch.inference_mode():
        fp8lt.convert_to_float8_training(layer, config="delayed")
    layer(torch.ones(4, 16)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.gpu
def test_a_replayed_graph_goes_on_from_where_its_state_is() -> None:
    """BUG-75."""
    draw = torch.Generator(GPU0).manual_seed(0)
    w = torch.randn(512, 256, generator=draw, device=GPU0).bfloat16().requires_grad_()
    x = torch.zeros(384, 256, device=GPU0, dtype=torch.bfloat16).requires_grad_()
    dy = torch.zeros(384, 512, device=GPU0, dtype=torch.bfloat16)
    states = DelayedState(RECIPE, GPU0), DelayedState(RECIPE, GPU0)

    def step(state: DelayedState) -> list[Tensor]:
        y = fp8lt.linear(x, w, recipe=RECIPE, state=state)
        return [y.detach(), *torch.autograd.grad(y, (x, w), dy)]

    step(states[1])  # the GEMMs of a shape are chosen before a capture
    states[1].amaxes.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(states[1])
    assert not states[1].amaxes.any()  # nothing has run yet
    for size in (1.0, 5.0, 0.1, 0.0, 2.0, 2.0):
        with torch.no_grad():
            x.normal_(generator=draw).mul_(size)
            dy.normal_(generator=draw)
        want = step(states[0])
        graph.replay()
        assert all(map(torch.equal, captured, want))
        assert torch.equal(states[1].amaxes, states[0].amaxes)
