"""Conversion: what changes (the arithmetic) and what must not (everything else)."""

import copy
import io
import pickle
from collections import OrderedDict

import pytest
import torch
from cases import T_FORWARD, T_SAME, CountOps, error, randn
from torch import nn

import fp8lt


def mlp(on: torch.device | str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(up=nn.Linear(40, 64), act=nn.GELU(), down=nn.Linear(64, 40, bias=False))
    ).to(on)


def test_a_layer_equals_the_function(on: torch.device) -> None:
    layer = fp8lt.Linear(40, 24, device=on, dtype=torch.bfloat16)
    x = randn(7, 40, on=on, dtype=torch.bfloat16)
    assert torch.equal(layer(x), fp8lt.linear(x, layer.weight, layer.bias))
    assert isinstance(layer, nn.Linear)
    assert "in_features=40, out_features=24, bias=True, recipe=tensorwise" in repr(layer)
    assert fp8lt.Linear(40, 24, False).bias is None


def test_conversion_changes_the_result_by_fp8_rounding_and_nothing_else(on: torch.device) -> None:
    model = mlp(on)
    x = randn(30, 40, on=on, dtype=torch.float32)
    plain = model(x)
    parameters = dict(model.named_parameters())
    assert fp8lt.convert_to_float8_training(model) is model
    assert [type(m).__name__ for m in model] == ["Linear", "GELU", "Linear"]
    assert all(type(m) is fp8lt.Linear for m in (model.up, model.down))
    assert all(a is b for a, b in zip(model.parameters(), parameters.values(), strict=True))
    assert 1e-3 < error(model(x), plain) <= 1.5 * T_FORWARD  # two layers


def test_a_root_linear_is_converted_in_place() -> None:
    root = nn.Linear(8, 8)
    assert fp8lt.convert_to_float8_training(root) is root
    assert type(root) is fp8lt.Linear


def test_the_filter_sees_every_candidate_with_its_name() -> None:
    model, seen = nn.ModuleDict({"a": mlp(), "head": nn.Linear(4, 4)}), []

    def keep(layer: nn.Module, name: str) -> bool:
        seen.append((type(layer), name))
        return name != "head"

    fp8lt.convert_to_float8_training(model, module_filter_fn=keep)
    assert seen == [(nn.Linear, "a.up"), (nn.Linear, "a.down"), (nn.Linear, "head")]
    assert type(model["head"]) is nn.Linear
    assert type(model["a"].up) is fp8lt.Linear


def test_converted_layers_are_left_alone() -> None:
    model = fp8lt.convert_to_float8_training(mlp())
    first = model.up.recipe
    config = fp8lt.Float8LinearConfig(emulate=True)
    fp8lt.convert_to_float8_training(model, config=config, module_filter_fn=lambda *_: 1 / 0)
    assert model.up.recipe is first


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def test_subclasses_keep_their_forward_unless_asked() -> None:
    model = nn.Sequential(Scaled(8, 8), nn.MultiheadAttention(8, 2))
    left = r"subclasses are left alone \(NonDynamicallyQuantizableLinear, Scaled\)"
    with pytest.warns(UserWarning, match=f"no layer was converted: .*{left}"):
        fp8lt.convert_to_float8_training(model)
    assert type(model[0]) is Scaled
    assert type(model[1].out_proj) is not fp8lt.Linear  # its weight is read, its forward is not run
    x = torch.randn(5, 1, 8)
    attended, _ = model[1](x, x, x)
    assert attended.shape == x.shape
    fp8lt.convert_to_float8_training(model[0], convert_subclasses=True)
    assert type(model[0]) is fp8lt.Linear
    with fp8lt.disable_fp8(model):
        assert torch.equal(model[0](x), 3 * nn.Linear.forward(model[0], x))
    assert type(model[0]) is fp8lt.Linear
    assert type(fp8lt.revert(model)[0]) is Scaled


def test_hooks_flags_ties_attributes_and_optimizers_survive() -> None:
    model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16, bias=False))
    head = model[1]
    head.weight = model[0].weight
    head.weight.requires_grad_(False)
    head.note, calls = "mine", []
    head.register_forward_hook(lambda *_: calls.append("forward"))
    head.register_forward_pre_hook(lambda *_: calls.append("pre"))
    head.weight.requires_grad_(True)
    head.weight.register_hook(lambda g: calls.append("gradient"))
    head.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fp8lt.convert_to_float8_training(model)
    before = head.weight.detach().clone()
    model(torch.arange(16)).sum().backward()
    optimizer.step()
    assert calls == ["pre", "forward", "gradient"]
    assert head.weight is model[0].weight
    assert not torch.equal(head.weight, before)
    assert (head.training, model.training, head.note) == (False, True, "mine")


def test_revert_gives_the_plain_model_back(on: torch.device) -> None:
    model = mlp(on)
    x = randn(9, 40, on=on, dtype=torch.float32)
    plain, attributes = model(x), set(vars(model.up))
    assert fp8lt.revert(fp8lt.convert_to_float8_training(model)) is model
    assert all(type(m) is nn.Linear for m in (model.up, model.down))
    assert torch.equal(model(x), plain)
    assert set(vars(model.up)) == attributes
    assert type(fp8lt.revert(fp8lt.Linear(4, 4))) is nn.Linear


def test_disable_fp8_nests_and_survives_exceptions(on: torch.device) -> None:
    model = mlp(on)
    x = randn(9, 40, on=on, dtype=torch.float32)
    plain = model(x)
    fp8lt.convert_to_float8_training(model)
    converted = model(x)
    with fp8lt.disable_fp8(model) as inside:
        assert inside is model
        with fp8lt.disable_fp8(model.up):
            assert torch.equal(model(x), plain)
        assert torch.equal(model(x), plain)
    assert torch.equal(model(x), converted)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), fp8lt.disable_fp8(model):
        model(x[:, :3])
    assert torch.equal(model(x), converted)
    assert not torch.equal(plain, converted)


class Twice(fp8lt.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_layers_derived_from_ours_can_be_disabled_and_say_why_they_cannot_be_reverted() -> None:
    x = torch.randn(5, 16)
    twice = Twice(16, 8)
    with fp8lt.disable_fp8(twice):
        assert torch.equal(twice(x), 2 * nn.Linear.forward(twice, x))
    model = nn.Sequential(fp8lt.convert_to_float8_training(nn.Linear(16, 8)), nn.Linear(8, 8))
    nn.utils.parametrizations.weight_norm(fp8lt.convert_to_float8_training(model)[0])
    want = nn.functional.linear(x, model[0].weight, model[0].bias)
    assert 1e-3 < error(model[0](x), want) < T_FORWARD
    with fp8lt.disable_fp8(model):
        assert torch.equal(model[0](x), want)
    with pytest.raises(RuntimeError, match="revert: layer '0' is a ParametrizedLinear"):
        fp8lt.revert(model)
    assert type(model[1]) is fp8lt.Linear


def test_a_copy_made_while_fp8_is_disabled_is_an_fp8_layer() -> None:
    layer, x = fp8lt.Linear(16, 8), torch.randn(5, 16)
    with fp8lt.disable_fp8(layer):
        other = copy.deepcopy(layer)
    assert torch.equal(other(x), layer(x))
    with fp8lt.disable_fp8(layer):
        assert type(fp8lt.revert(layer)) is nn.Linear
    assert type(layer) is nn.Linear
    assert set(vars(layer)) == set(vars(nn.Linear(16, 8)))


def count_quantises(layer: nn.Module, x: torch.Tensor) -> int:
    with CountOps() as count:
        layer(x)
    return count.counts["quantize_tensorwise"]


def test_reused_weights_give_the_same_bits_and_gradients(on: torch.device) -> None:
    model = fp8lt.convert_to_float8_training(mlp(on))
    x = randn(9, 40, on=on, dtype=torch.float32).requires_grad_()
    want = model(x)
    want_gradients = torch.autograd.grad(want.sum(), (x, *model.parameters()))
    with fp8lt.reuse_weights(model):
        for _ in range(2):
            got = model(x)
            gradients = torch.autograd.grad(got.sum(), (x, *model.parameters()))
            assert torch.equal(got, want)
            assert all(map(torch.equal, gradients, want_gradients))
        with torch.no_grad():
            assert torch.equal(model(x), want)
    assert count_quantises(model.up, x) == 2


def test_reused_weights_are_quantised_once(on: torch.device) -> None:
    layer = fp8lt.Linear(40, 24, device=on)
    x = randn(9, 40, on=on, dtype=torch.float32)
    with fp8lt.reuse_weights(layer):
        assert [count_quantises(layer, x) for _ in range(3)] == [2, 1, 1]
        assert count_quantises(layer, x.requires_grad_()) == 2  # now the transposed copy, too
        with fp8lt.reuse_weights(layer):
            assert count_quantises(layer, x) == 1
        assert count_quantises(layer, x) == 1
        other = copy.deepcopy(layer)
        assert other._weight_cache is None
    assert count_quantises(layer, x) == 2
    assert "_weight_cache" not in vars(layer)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: torch.optim.SGD(layer.parameters(), lr=1.0).step(),
        lambda layer: layer.load_state_dict({k: 2 * v for k, v in layer.state_dict().items()}),
        lambda layer: layer.load_state_dict(
            {k: 2 * v for k, v in layer.state_dict().items()}, assign=True
        ),
        lambda layer: layer.weight.detach().mul_(2),
        lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
        lambda layer: setattr(layer, "weight", nn.Parameter(2 * layer.weight.detach())),
        lambda layer: torch.nn.utils.vector_to_parameters(
            2 * torch.nn.utils.parameters_to_vector(layer.parameters()), layer.parameters()
        ),
        lambda layer: layer.bfloat16(),
    ],
    ids=["step", "load", "assign", "in place", "data", "replace", "vector", "cast"],
)
def test_a_changed_weight_is_quantised_anew(on: torch.device, change: object) -> None:
    layer = fp8lt.Linear(40, 24, device=on)
    x = randn(9, 40, on=on, dtype=torch.float32)
    with fp8lt.reuse_weights(layer):
        layer(x).sum().backward()
        with torch.no_grad():
            change(layer)  # type: ignore[operator]
        got = layer(x)
    assert torch.equal(got, layer(x))


def test_a_weight_computed_for_every_call_is_never_stale(on: torch.device) -> None:
    layer = fp8lt.Linear(40, 24, device=on)
    x = randn(9, 40, on=on, dtype=torch.float32)

    def scaled(factor: float) -> torch.Tensor:
        parameters = {"weight": layer.weight * factor, "bias": layer.bias}
        return torch.func.functional_call(layer, parameters, (x,))

    with torch.no_grad():
        want = [scaled(factor) for factor in (1, 2, 3)]
        with fp8lt.reuse_weights(layer):
            got = [scaled(factor) for factor in (1, 2, 3)]
    assert all(map(torch.equal, got, want))


@pytest.mark.gpu
def test_reused_weights_are_not_taken_into_a_cuda_graph_or_across_streams() -> None:
    layer = fp8lt.Linear(512, 256, device="cuda", dtype=torch.bfloat16)
    x = randn(64, 512, on=torch.device("cuda"), dtype=torch.bfloat16)
    with torch.no_grad(), fp8lt.reuse_weights(layer):
        want = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        layer.weight.mul_(2)
        graph.replay()
        assert torch.equal(y, layer(x))  # quantised in the replay, and anew
        assert not torch.equal(y, want)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            other = layer(x)
        torch.cuda.synchronize()
        assert torch.equal(other, y)


def test_contexts_of_two_threads_need_not_end_in_order() -> None:
    layer, x = fp8lt.Linear(16, 8), torch.randn(5, 16)
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    first, second = fp8lt.disable_fp8(layer), fp8lt.disable_fp8(layer)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(layer(x), plain)
    second.__exit__(None, None, None)
    assert not torch.equal(layer(x), plain)
    assert "_fp8_disabled" not in vars(layer)


def test_a_quantised_weight_that_does_not_fit_is_refused() -> None:
    x, w = torch.randn(3, 40, requires_grad=True), torch.randn(24, 40)
    wq = fp8lt.quantize_weight(w)
    assert torch.equal(fp8lt.linear(x, w, w_quantized=wq), fp8lt.linear(x, w))
    with pytest.raises(RuntimeError, match=r"want w_quantized of w \[8, 40\]"):
        fp8lt.linear(x, w[:8], w_quantized=wq)
    for name in ("rowwise", "rowwise_with_gw_hp", "rowwise_folded", "blockwise"):
        rows = fp8lt.quantize_weight(w, recipe=name, transposed=False)
        with pytest.raises(RuntimeError, match="with its transposed copy"):
            fp8lt.linear(x, w, w_quantized=rows, recipe=name)
    with pytest.raises(RuntimeError, match=r"in torch\.float8_e4m3fn on cpu.*float8_e5m2"):
        fp8lt.linear(x, w, w_quantized=fp8lt.ops.quantize_tensorwise(w, torch.float8_e5m2))
    with pytest.raises(TypeError, match=r"from fp8lt\.quantize_weight, got Tensor"):
        fp8lt.linear(x, w, w_quantized=w)  # type: ignore[arg-type]


def test_the_argument_of_forward_keeps_its_name() -> None:
    layer, x = fp8lt.convert_to_float8_training(nn.Linear(16, 8)), torch.randn(5, 16)
    assert torch.equal(layer(input=x), layer(x))


def test_checkpoints_are_those_of_the_plain_model() -> None:
    plain, converted = mlp(), fp8lt.convert_to_float8_training(mlp())
    assert plain.state_dict().keys() == converted.state_dict().keys()
    plain.load_state_dict(converted.state_dict(), strict=True)
    converted.load_state_dict(plain.state_dict(), strict=True, assign=True)


def test_copies_and_pickles_are_converted_and_independent() -> None:
    model = fp8lt.convert_to_float8_training(mlp())
    x = torch.randn(5, 40)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    )
    for other in copies:
        assert torch.equal(other(x), model(x))
        with torch.no_grad():
            other.up.weight.zero_()
    assert model.up.weight.any()


def test_conversion_works_on_meta_and_allocates_nothing() -> None:
    with torch.device("meta"):
        model = fp8lt.convert_to_float8_training(nn.Sequential(nn.Linear(100_000, 100_000)))
    assert model(torch.empty(3, 100_000, device="meta")).shape == (3, 100_000)


def test_casting_a_converted_model_works(on: torch.device) -> None:
    model = fp8lt.convert_to_float8_training(mlp(on)).bfloat16()
    assert model(randn(5, 40, on=on, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_training_follows_the_plain_model(on: torch.device) -> None:
    x = randn(512, 40, on=on, dtype=torch.float32)
    target = torch.sin(x @ randn(40, 40, on=on, dtype=torch.float32, seed=1) / 6)
    losses = []
    for model in (mlp(on), fp8lt.convert_to_float8_training(mlp(on))):
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(80):
            loss = (model(x) - target).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    start = (mlp(on)(x) - target).pow(2).mean().item()
    assert losses[0] < 0.25 * start  # it learns
    assert abs(losses[1] - losses[0]) < 0.02 * start  # measured 0.0024 of it on a CPU


def test_the_config_reaches_the_layers(on: torch.device) -> None:
    config = fp8lt.Float8LinearConfig(
        gemm_config_output=fp8lt.Float8GemmConfig(use_fast_accum=False),
        force_recompute_fp8_weight_in_bwd=True,
        emulate=True,
    )
    recipe = fp8lt.convert_to_float8_training(mlp(on), config=config).up.recipe
    assert recipe == fp8lt.DynamicScaling(
        fast_accum_output=False, recompute_weight=True, emulate=True
    )
    named = fp8lt.Float8LinearConfig.from_recipe_name("tensorwise")
    layer = fp8lt.convert_to_float8_training(nn.Linear(40, 8).to(on), config=named)
    x = randn(5, 40, on=on, dtype=torch.float32)
    assert layer.recipe == fp8lt.DynamicScaling()
    assert error(layer(x), fp8lt.linear(x, layer.weight, layer.bias)) <= T_SAME


def test_the_e4m3_format_quantises_gradients_to_e4m3(on: torch.device) -> None:
    x, w = (randn(64, 64, on=on, dtype=torch.bfloat16, seed=s).requires_grad_() for s in (0, 1))
    dy = randn(64, 64, on=on, dtype=torch.bfloat16, seed=2)
    errors = {}
    for fp8_format in ("hybrid", "e4m3"):
        y = fp8lt.linear(x, w, recipe=fp8lt.DynamicScaling(fp8_format=fp8_format))
        (dx,) = torch.autograd.grad(y, x, dy)
        errors[fp8_format] = error(dx, dy.double() @ w.double())
    assert errors["e4m3"] < 0.045 < errors["hybrid"]  # measured 0.036 and 0.058


def test_bad_arguments_name_themselves() -> None:
    """BUG-34."""
    with pytest.raises(TypeError, match=r"module: want an nn\.Module, got list"):
        fp8lt.convert_to_float8_training([nn.Linear(2, 2)])  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"config: want a fp8lt\.Float8LinearConfig, .* got builtins\.dict"
    ):
        fp8lt.convert_to_float8_training(mlp(), config={})  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"recipe: want one of tensorwise, delayed, rowwise, .*; got 'mx'"
    ):
        fp8lt.Linear(4, 4, recipe="mx")
    with pytest.raises(ValueError, match="e5m2 @ e5m2"):
        fp8lt.DynamicScaling(fp8_format="e5m2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fp8_format: want 'hybrid' or 'e4m3', got 'e3m4'"):
        fp8lt.DynamicScaling(fp8_format="e3m4")  # type: ignore[arg-type]
