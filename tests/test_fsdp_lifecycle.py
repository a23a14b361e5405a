"""Weights that FSDP2 gathers in FP8: compiled, loaded, in inference, reverted, refused."""

import pytest
import torch
from cases import error, randn
from fsdp_models import CONFIG, layers_of, shard, whole
from ranks import WORLD, Ranks, here, train_beside_a_twin
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fp8lt
from fp8lt.fsdp import sharded


def compiled(rank: int, first: bool) -> None:
    layers, twin = layers_of(32, 48, 16)
    torch._dynamo.reset()
    if first:
        for layer in layers:
            layer.compile(backend="aot_eager")
    shard(layers)
    if not first:
        for layer in layers:
            layer.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(layers.parameters(), lr=1)
    train_beside_a_twin(layers, twin, optimizer, whole(layers))


@pytest.mark.parametrize("first", [True, False])
def test_layers_may_be_compiled_before_or_after(ranks: Ranks, first: bool) -> None:
    ranks.run(compiled, first)


def test_what_is_not_sharded_is_compiled_to_one_graph() -> None:
    layers, twin = layers_of(32, 48, 16)
    x = randn(5, 32, on=here(), dtype=torch.float32)
    torch._dynamo.reset()
    got = torch.compile(layers, backend="aot_eager", fullgraph=True)(x)
    want = twin(x)
    assert torch.equal(got, want)
    got.sum().backward()
    want.sum().backward()
    for p, q in zip(layers.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def assigned(rank: int) -> None:
    layers, twin = layers_of(32, 48, 16)
    x = randn(5, 32, on=here(), dtype=torch.float32)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16))
    fp8lt.convert_to_float8_training(empty, config=CONFIG)
    shard(empty)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(empty, twin.state_dict(), options=options)
    assert all(sharded(layer.weight) is not None for layer in empty)
    assert torch.equal(empty(x), twin(x))
    layers.load_state_dict(twin.state_dict(), assign=True)
    assert all(sharded(layer.weight) is not None for layer in layers)


def test_what_is_loaded_by_assigning_is_gathered_in_fp8_too(ranks: Ranks) -> None:
    ranks.run(assigned)


def inference(rank: int) -> None:
    for sizes in ((32, 48, 16), (32, 16, 32)):
        layers, twin = layers_of(*sizes)
        shard(layers)
        x = randn(5, 32, on=here(), dtype=torch.float32)
        # First: `fully_shard` then trains no model, since its own buffers are inference tensors.
        with torch.inference_mode():
            assert torch.equal(layers(x), twin(x))
        assert sharded(layers[0].weight) is not None
        with torch.no_grad():
            assert torch.equal(layers(x), twin(x))
        with torch.inference_mode():
            layers, twin = layers_of(*sizes)
            shard(layers)
            assert sharded(layers[0].weight) is not None
            assert torch.equal(layers(x), twin(x))


def test_inference_mode_may_come_first_or_around_all(ranks: Ranks) -> None:
    ranks.run(inference)


def early_state(rank: int) -> None:
    layers, _ = layers_of(32, 16)
    shard(layers)
    saved = layers.state_dict()
    x = torch.ones(1, 32, device=here())
    layers(x)  # here `fully_shard` pads uneven shards
    with torch.no_grad():
        for value in saved.values():
            value.to_local().fill_(0.5)
        assert error(layers(x), torch.full((1, 16), 16.5, device=here())) < 1e-6


def test_a_state_dict_from_before_the_first_forward_is_the_weights(ranks: Ranks) -> None:
    ranks.run(early_state)


def reverted(rank: int) -> None:
    layers, twin = layers_of(32, 48, 16)
    fp8lt.revert(layers)
    assert all(type(p) is nn.Parameter for p in layers.parameters())
    assert all(map(torch.equal, layers.parameters(), twin.parameters()))
    layers, _ = layers_of(32, 48)
    fully_shard(nn.Sequential(layers), mesh=init_device_mesh(here().type, (WORLD,)))
    with pytest.raises(RuntimeError, match="'0' is sharded, and gathered in FP8"):
        fp8lt.revert(layers)


def test_reverted_nothing_is_left_of_it(ranks: Ranks) -> None:
    ranks.run(reverted)


def refuse_shards_of_shards(rank: int) -> None:
    mesh = init_device_mesh(here().type, (WORLD, 1), mesh_dim_names=("data", "tensor"))
    layers, _ = layers_of(32, 48)
    parallelize_module(layers, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(layers, mesh=mesh["data"])
    with pytest.raises(RuntimeError, match="tensor-parallel layers are not gathered in FP8: leave"):
        layers(torch.ones(2, 32, device=here()))


def test_tensor_parallel_layers_are_refused(ranks: Ranks) -> None:
    ranks.run(refuse_shards_of_shards)


def refuse_in_between(rank: int) -> None:
    layers, _ = layers_of(32, 48)
    shard(layers, reshard=False)
    layers(torch.ones(1, 32, device=here()))
    with pytest.raises(RuntimeError, match="gathered in FP8 just now"):
        layers[0].recipe = "rowwise"
    with torch.no_grad(), pytest.raises(RuntimeError, match="would be lost on a weight that was"):
        layers[0].weight.mul_(2)
    assert layers[0].weight.as_strided((4, 32), (32, 1), 32).shape == (4, 32)


def test_a_gathered_weight_is_not_changed(ranks: Ranks) -> None:
    ranks.run(refuse_in_between)


def test_a_weight_that_is_not_sharded_may_be_used_as_any_other() -> None:
    layers, twin = layers_of(32, 48)
    vector = nn.utils.parameters_to_vector(twin.parameters())
    nn.utils.vector_to_parameters(2 * vector, layers.parameters())
    assert torch.equal(layers[0].weight.shard, 2 * twin[0].weight)
    with pytest.raises(RuntimeError, match=r"want data \[48, 32\] torch.float32 for a weight"):
        layers[0].weight.data = torch.ones(3, device=here())
    layers[0].weight.main_grad = torch.zeros(48, 32, device=here())
    layers[0].fuse_wgrad_accumulation = True
    layers(torch.ones(2, 32, device=here())).sum().backward()
    assert layers[0].weight.grad is None
    assert layers[0].weight.main_grad.any()
    with_norm = nn.utils.parametrizations.weight_norm(fp8lt.Linear(32, 48))
    with pytest.warns(UserWarning, match=r"it is computed \(a parametrization\)"):
        fp8lt.enable_fsdp_float8_all_gather(with_norm)
