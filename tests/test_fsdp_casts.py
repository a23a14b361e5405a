"""The casts before a gather in FP8: of a whole block at once, each under its own amax."""

import copy
import gc

import pytest
import torch
from cases import randn, raw
from fsdp_models import CONFIG, layers_of, shard, whole
from ranks import WORLD, Ranks, here, train_beside_a_twin
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import fp8lt
from fp8lt import device, fsdp, fsdp_precompute, ops

E4M3 = device.OCP.e4m3

# ------------------------------------------------------------------------------------ the operator


def under(*amaxes: float, on: torch.device) -> Tensor:
    return torch.tensor([[amax, 0.0, 1.0] for amax in amaxes], device=on)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_shard_is_quantised_under_the_amax_given_for_it(
    on: torch.device, dtype: torch.dtype, power_of_two: bool
) -> None:
    sizes = [(32, 48), (17, 35), (0, 16), (1, 1024), (300, 16)]
    shards = [randn(*s, on=on, dtype=dtype, seed=i) for i, s in enumerate(sizes)]
    amaxes = under(*(float(2 + i) for i in range(len(sizes))), on=on)
    before = amaxes.clone()
    got = ops.quantize_shards(shards, E4M3, amaxes, power_of_two=power_of_two)
    assert torch.equal(amaxes, before)
    for x, amax, data in zip(shards, amaxes, got, strict=True):
        want = ops.quantize_delayed(
            x, E4M3, amax.clone(), record=False, power_of_two=power_of_two, emulated=True
        )
        assert torch.equal(raw(data), raw(want.data))
        assert data.dtype == E4M3
        assert data.is_contiguous()
    assert ops.quantize_shards([], E4M3, amaxes[:0]) == []


def test_it_passes_opcheck(on: torch.device, opcheck_fp8: None) -> None:
    shards = [randn(*s, on=on, dtype=torch.float32) for s in ((17, 35), (32, 16))]
    for some in (shards, [shards[0].t(), shards[1][:0]]):
        args = (some, E4M3, under(3.0, 4.0, on=on), False)
        torch.library.opcheck(torch.ops.fp8lt.quantize_shards.default, args)


def test_it_has_no_derivative(on: torch.device) -> None:
    x = torch.ones(16, 16, device=on, requires_grad=True)
    (data,) = torch.ops.fp8lt.quantize_shards.default([x], E4M3, under(1.0, on=on), False)
    with pytest.raises(RuntimeError, match="derivative for fp8lt::quantize_shards is not"):
        data.float().sum().backward()


def test_it_says_what_does_not_fit(on: torch.device) -> None:
    x = torch.ones(16, 16, device=on)
    for emulated in (False, True):
        for wrong in (under(1.0, on=on), torch.ones(2, 4, device=on), torch.ones(6, device=on)):
            with pytest.raises(RuntimeError, match=r"want amaxes \[2, 3\], one row for each shard"):
                ops.quantize_shards([x, x], E4M3, wrong, emulated=emulated)
        with pytest.raises(RuntimeError, match=r"want x \[R, C\], got \[16\]"):
            ops.quantize_shards([x[0]], E4M3, under(1.0, on=on), emulated=emulated)


# ----------------------------------------------------------------------------------- in one gather


def count_casts(rank: int) -> None:
    """A block has three layers; the fourth is gathered by the root."""
    calls: list[int] = []
    cast = fsdp_precompute.cast

    def counting(shards: list[fsdp.ShardedWeight], amaxes: Tensor) -> list[Tensor]:
        calls.append(len(shards))
        return cast(shards, amaxes)

    torch.manual_seed(0)
    block = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))
    twin = nn.Sequential(block, nn.Linear(48, 32)).to(here())
    layers = copy.deepcopy(twin)
    fp8lt.convert_to_float8_training(twin)
    fp8lt.convert_to_float8_training(layers, config=CONFIG)
    mesh = init_device_mesh(here().type, (WORLD,))
    fully_shard(layers[0], mesh=mesh)
    fully_shard(layers, mesh=mesh)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1)
    fsdp.cast = fsdp_precompute.cast = counting
    try:
        x = randn(4, 48, on=here(), dtype=torch.float32)
        layers(x).sum().backward()
        assert calls == [1] * 7  # by themselves; the root's weight stays until backward
        calls.clear()
        optimizer.zero_grad()
        fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers)
        layers(x).sum().backward()
        assert calls == [1, 3, 3]
        layers.zero_grad()
        train_beside_a_twin(
            layers, twin[0].append(twin[1]), optimizer, whole(layers),
            lambda: fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers),
        )  # fmt: skip
        waiting = [vars(m)[fsdp.PRECOMPUTED].together.waiting for m in layers.modules()
                   if isinstance(m, fp8lt.Linear)]  # fmt: skip
        assert waiting == [{}] * 4
    finally:
        fsdp.cast = fsdp_precompute.cast = cast


def test_a_block_is_cast_in_one_call(ranks: Ranks) -> None:
    ranks.run(count_casts)


def tied(rank: int) -> None:
    """FSDP2 asks for the shard of the first layer alone."""
    torch.manual_seed(0)
    twin = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))).to(here())
    twin[2].weight = twin[0].weight
    layers = copy.deepcopy(twin)
    fp8lt.convert_to_float8_training(twin)
    fp8lt.convert_to_float8_training(layers, config=CONFIG)
    layers[2].weight = layers[0].weight
    if fsdp.sharded(layers[0].weight) is None:  # as it has another user
        fsdp_weight = fsdp.gathered_in_fp8(layers[0].weight.detach(), layers[0].recipe)
        layers[0].weight = layers[2].weight = nn.Parameter(fsdp_weight)
    fully_shard(layers, mesh=init_device_mesh(here().type, (WORLD,)))
    fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers)
    x = randn(4, 32, on=here(), dtype=torch.float32)
    assert torch.equal(layers(x), twin(x))
    known = [vars(layer)[fsdp.PRECOMPUTED] for layer in layers]
    assert known[0] is known[2]
    assert known[0].together is known[1].together
    assert known[0].together.waiting == {}


def test_a_tied_weight_is_cast_once(ranks: Ranks) -> None:
    ranks.run(tied)


def part_again(rank: int) -> None:
    """What one layer's new scale supersedes is not cast under the old one, and nothing waits."""
    layers, twin = layers_of(48, 48, 48, 32)
    fully_shard(layers, mesh=init_device_mesh(here().type, (WORLD,)))
    fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers)
    before = vars(layers[0])[fsdp.PRECOMPUTED].together
    fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers[1])
    x = randn(4, 48, on=here(), dtype=torch.float32)
    assert torch.equal(layers(x), twin(x))
    assert before.waiting == {}


def test_scales_of_a_part_may_be_computed_again(ranks: Ranks) -> None:
    ranks.run(part_again)


def lengths(rank: int) -> None:
    """A scale is as long as its weight wants, with and without precompute, in its own memory."""
    layers, _ = layers_of(48, 96, 32)
    shard(layers, reshard=False)
    found = []
    for prepare in (bool, fp8lt.precompute_float8_dynamic_scale_for_fsdp):
        prepare(layers)
        layers(torch.ones(2, 48, device=here()))
        scales = [layer.weight.scale_inv for layer in layers]
        found.append([(len(t), t.untyped_storage().nbytes()) for t in scales])
        for layer in layers:
            layer.reshard()
    assert found == [[(96, 384), (96, 384)]] * 2


def test_scales_are_as_long_as_their_weights_want(ranks: Ranks) -> None:
    ranks.run(lengths)


def in_inference_mode(rank: int) -> None:
    """An evaluation may compute scales; training goes on with them."""
    layers, twin = layers_of(48, 96, 32)
    shard(layers)
    x = randn(4, 48, on=here(), dtype=torch.float32)
    layers(x).sum().backward()
    with torch.inference_mode():
        fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers)
        assert torch.equal(layers(x), twin(x))
    y = layers(x)
    assert torch.equal(y, twin(x))
    y.sum().backward()


def test_scales_may_be_computed_in_inference_mode(ranks: Ranks) -> None:
    ranks.run(in_inference_mode)


def offloaded(rank: int) -> None:
    layers, twin = layers_of(48, 96, 32, bias=False)
    shard(layers, offload_policy=CPUOffloadPolicy(pin_memory=False))
    x = randn(4, 48, on=here(), dtype=torch.float32)
    for prepare in (bool, fp8lt.precompute_float8_dynamic_scale_for_fsdp):
        prepare(layers)
        assert torch.equal(layers(x), twin(x))


@pytest.mark.gpu
@pytest.mark.parametrize("on", [torch.device("cuda")], ids=str)
def test_shards_may_be_offloaded(ranks: Ranks) -> None:
    ranks.run(offloaded)


def test_a_shard_that_is_a_copy_is_cast_by_itself() -> None:
    """As the shard that is brought back from a CPU, or where another is gathered just now."""
    layers = [nn.Linear(32, 48) for _ in range(2)]
    for layer in layers:
        fp8lt.convert_to_float8_training(layer, config=CONFIG)
    shards = [fsdp.sharded(layer.weight) for layer in layers]
    amaxes = under(*(float(shard.shard.abs().max()) for shard in shards), on=torch.device("cpu"))
    want = fsdp.cast(shards, amaxes)
    together = fsdp_precompute.Together(layers, amaxes)
    for place, layer in enumerate(layers):
        of_layer = fsdp_precompute.Precomputed(shards[place].writes, 0, amaxes, together, place)
        vars(layer)[fsdp.PRECOMPUTED] = of_layer
    copied = fsdp.ShardedWeight(shards[1].shard.clone(), shards[1].recipe)
    assert torch.equal(raw(together.rows(1, copied)), raw(want[1]))
    assert together.waiting == {}
    assert torch.equal(raw(together.rows(1, shards[1])), raw(want[1]))
    assert list(together.waiting) == [0]
    assert torch.equal(raw(together.rows(0, shards[0])), raw(want[0]))
    del layer, layers[0], shards, of_layer
    gc.collect()
    assert together.layers[0]() is None  # what is known of a layer does not keep it
    (rest,) = layers
    assert torch.equal(raw(together.rows(1, fsdp.sharded(rest.weight))), raw(want[1]))
