"""A GPU that is not the current one, and two at once: they give what the first gives alone."""

import copy
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from cases import randn, state_for
from torch import Tensor, nn
from torch.utils import checkpoint

import fp8lt
from fp8lt import recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU"),
]
FIRST, SECOND = (torch.device("cuda", i) for i in range(2))
NAMES = pytest.mark.parametrize("name", recipe.NAMES)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def first_is_current() -> Iterator[None]:
    """No test, and nothing in it, may change the current GPU."""
    torch.cuda.set_device(FIRST)
    yield
    assert torch.cuda.current_device() == 0


def layers_on(where: torch.device, name: str = "tensorwise") -> nn.Sequential:
    """Return two layers with the same weights on every GPU."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 272)).to(BF16)
    return fp8lt.convert_to_float8_training(layers, config=name).to(where)


def inputs_on(where: torch.device, seed: int = 0, rows: int = 96) -> tuple[Tensor, Tensor]:
    """Return x, a leaf, and the gradient of what comes out."""
    x = randn(rows, 256, on=where, dtype=BF16, seed=seed).requires_grad_()
    return x, randn(rows, 272, on=where, dtype=BF16, seed=100 + seed)


def step(layers: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Return y and all gradients."""
    y = layers(x)
    return [y.detach(), *torch.autograd.grad(y, (x, *layers.parameters()), dy)]


def on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    return [t.cpu() for t in tensors]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, on_cpu(a), on_cpu(b)))


# ------------------------------------------------------------------------------------ device index


@NAMES
def test_tensors_on_a_gpu_that_is_not_current(name: str) -> None:
    """BUG-82."""
    results = []
    for where in (FIRST, SECOND):
        layers = layers_on(where, name)
        for seed in range(2):  # the second of recipe "delayed" scales by a history
            got = step(layers, *inputs_on(where, seed))
            assert {t.device for t in got} == {where}
        results.append(got)
    assert same(*results)


@NAMES
def test_tensors_of_two_gpus_are_refused(name: str) -> None:
    """BUG-82."""
    layers = layers_on(SECOND, name)
    x, _ = inputs_on(FIRST)
    with pytest.raises(RuntimeError, match="all tensors on one device, got x on cuda:0"):
        layers(x)
    state = state_for(name, FIRST)
    if state is not None:
        x, weight = x.detach().to(SECOND), layers[0].weight
        with pytest.raises(
            ValueError, match=r"state: want a history of .* on cuda:1, got .* cuda:0"
        ):
            fp8lt.linear(x, weight, recipe=name, state=state)


@NAMES
def test_a_layer_may_move_to_another_gpu(name: str) -> None:
    layers, still = layers_on(FIRST, name), layers_on(FIRST, name)
    for seed, where in enumerate((FIRST, SECOND, SECOND, FIRST)):
        layers.to(where)
        assert same(step(layers, *inputs_on(where, seed)), step(still, *inputs_on(FIRST, seed)))


def test_quantised_weights_are_not_reused_on_another_gpu() -> None:
    layers, (x, _) = layers_on(FIRST), inputs_on(FIRST)
    with torch.no_grad(), fp8lt.reuse_weights(layers):
        want = layers(x)
        layers.to(SECOND)
        assert torch.equal(layers(x.to(SECOND)).cpu(), want.cpu())


@NAMES
def test_a_model_may_be_split_between_two_gpus(name: str) -> None:
    """As in pipelines, and models too large for one GPU."""
    whole, split = layers_on(FIRST, name), layers_on(FIRST, name)
    split[2].to(SECOND)

    def pipeline(x: Tensor) -> Tensor:
        return split[2](split[1](split[0](x)).to(SECOND)).to(FIRST)

    for seed in range(2):
        x, dy = inputs_on(FIRST, seed)
        want = step(whole, x, dy)
        for run in (pipeline, lambda x: checkpoint.checkpoint(pipeline, x, use_reentrant=False)):
            y = run(x)
            got = [y.detach(), *torch.autograd.grad(y, (x, *split.parameters()), dy)]
            assert same(got, want)
            if name == "delayed":
                break  # another call would be another entry of the history


def test_unconverted_layers_run_in_fp8_on_both() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(256, 512, dtype=BF16)
    results = []
    for where in (FIRST, SECOND):
        layer, (x, _) = copy.deepcopy(plain).to(where), inputs_on(where)
        with fp8lt.fp8_autocast():
            y = layer(x)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), (x, layer.weight))])
    assert same(*results)
    layer, (x, _) = plain.to(FIRST), inputs_on(FIRST)
    assert not torch.equal(results[0][0], layer(x))


@NAMES
def test_compiled_code_runs_on_the_gpu_of_its_tensors(name: str) -> None:
    results = []
    for where in (FIRST, SECOND):
        torch.compiler.reset()
        layers = torch.compile(layers_on(where, name), fullgraph=True)
        for seed in range(2):
            results.append(step(layers, *inputs_on(where, seed)))
    assert same(results[0], results[2])
    assert same(results[1], results[3])


# ------------------------------------------------------------------------------- streams and graphs


def test_it_runs_on_the_current_stream_of_its_gpu() -> None:
    """BUG-83: slow producers on streams of both GPUs, forward and backward."""
    gpus = (FIRST, SECOND)
    models = {where: layers_on(where) for where in gpus}
    batches = {where: [inputs_on(where, seed, 2048) for seed in range(6)] for where in gpus}
    want = [step(models[FIRST], x, dy) for x, dy in batches[FIRST]]
    step(models[SECOND], *batches[SECOND][0])
    streams = {where: [torch.cuda.Stream(where) for _ in range(2)] for where in gpus}
    for where in gpus:
        torch.cuda.synchronize(where)
    results: dict[torch.device, list[list[Tensor]]] = {where: [] for where in gpus}
    kept = []  # another tensor in their memory would be written on another stream
    for i in range(6):
        for where in gpus:
            x, dy = batches[where][i]
            late = torch.zeros_like(x)
            kept.append(late)
            torch.cuda.synchronize(where)
            with torch.cuda.stream(streams[where][i % 2]):  # makes its GPU current, too
                torch.cuda._sleep(2_000_000)
                late = late.copy_(x).detach().requires_grad_()
                results[where].append(step(models[where], late, dy))
    for where in gpus:
        torch.cuda.synchronize(where)
        assert all(map(same, results[where], want))


def test_the_stream_is_that_of_the_tensors_gpu_not_of_the_current_one() -> None:
    """BUG-83: the second GPU has a stream of its own as its current one, the first is current."""
    layers, (x, dy) = layers_on(SECOND), inputs_on(SECOND, rows=2048)
    want = step(layers, x, dy)
    late, stream = torch.zeros_like(x), torch.cuda.Stream(SECOND)
    torch.cuda.synchronize(SECOND)
    with torch.cuda.stream(stream), torch.cuda.device(FIRST):
        assert torch.cuda.current_device() == 0
        with torch.cuda.device(SECOND):
            torch.cuda._sleep(5_000_000)
        late = late.copy_(x).detach().requires_grad_()
        got = step(layers, late, dy)
    torch.cuda.synchronize(SECOND)
    assert same(got, want)


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_a_step_on_the_second_gpu_can_be_captured(name: str) -> None:
    """BUG-75."""
    layers, twin = layers_on(SECOND, name), layers_on(SECOND, name)
    x, dy = inputs_on(SECOND)
    stream = torch.cuda.Stream(SECOND)
    torch.cuda.synchronize(SECOND)
    with torch.cuda.stream(stream):
        for model in (layers, twin):
            step(model, x, dy)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step(layers, x, dy)
    for seed in range(1, 4):
        with torch.no_grad():
            x.copy_(inputs_on(SECOND, seed)[0] * seed)
        torch.cuda.synchronize(SECOND)
        with torch.cuda.device(SECOND):
            graph.replay()
        torch.cuda.synchronize(SECOND)
        assert same(captured, step(twin, x, dy))


# ----------------------------------------------------------------------------------------- threads

FIRST_CALLS = """
import threading, torch, fp8lt
start, failures = threading.Barrier(8), []

def work(i):
    try:
        where = torch.device("cuda", i % 2)
        draw = torch.Generator().manual_seed(i // 2)
        x, w = (torch.randn(*s, generator=draw).bfloat16().to(where).requires_grad_()
                for s in ((64, 128), (96, 128)))
        start.wait()
        y = fp8lt.linear(x, w)
        got = [y, *torch.autograd.grad(y.square().sum(), (x, w))]
        assert all(t.device == where for t in got)
        results[i] = [t.detach().cpu() for t in got]
    except BaseException as error:
        failures.append(repr(error))

results = {}
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads]
[t.join(60) for t in threads]
assert not failures, failures
assert all(torch.equal(a, b) for i in range(0, 8, 2) for a, b in zip(results[i], results[i + 1]))
print(len(results))
"""


def test_the_first_calls_of_a_process_may_come_from_threads_of_both() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["8"], done.stderr


@NAMES
def test_threads_may_run_on_both_at_once(name: str) -> None:
    """Eight threads, four on each GPU, each with layers and data of its own."""

    def train(thread: int, layers: nn.Module, where: torch.device) -> list[list[Tensor]]:
        batches = [inputs_on(where, 10 * thread + i, 40 + thread) for i in range(10)]
        return [on_cpu(step(layers, x, dy * 2.0**thread)) for x, dy in batches]

    want = [train(thread, layers_on(FIRST, name), FIRST) for thread in range(4)]
    models = [layers_on((FIRST, SECOND)[i % 2], name) for i in range(8)]
    start, results = threading.Barrier(8), {}

    def work(i: int) -> None:
        torch.cuda.set_device((SECOND, FIRST)[i % 2])  # of this thread: the other one
        start.wait()
        got = train(i // 2, models[i], (FIRST, SECOND)[i % 2])
        results[i] = all(map(same, got, want[i // 2]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results == dict.fromkeys(range(8), True)


@NAMES
def test_data_parallel_replicas_run_in_threads_of_their_gpus(name: str) -> None:
    """`nn.DataParallel`: replicas are made for each call, and their gradients are summed."""
    layers, (x, dy) = layers_on(FIRST, name), inputs_on(FIRST)
    halves = []
    for part, grad in zip(x.detach().chunk(2), dy.chunk(2), strict=True):
        halves.append(step(layers_on(FIRST, name), part.clone().requires_grad_(), grad))
    y = nn.DataParallel(layers, device_ids=[0, 1])(x)
    dx, *gradients = torch.autograd.grad(y, (x, *layers.parameters()), dy)
    for got, parts in zip((y, dx), zip(*halves, strict=True), strict=False):
        assert torch.equal(got, torch.cat(parts))
    for got, (one, other) in zip(gradients, list(zip(*halves, strict=True))[2:], strict=True):
        assert torch.equal(got, one + other)
