"""Weights that FSDP2 gathers in FP8: the results of a gather in their own precision."""

import copy
import functools
import io
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import error, randn
from fsdp_models import CONFIG, layers_of, shard, whole
from ranks import ROUNDING, WORLD, Ranks, here, train_beside_a_twin
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import fp8lt
from fp8lt.fsdp import GatheredWeight, ShardedWeight, sharded


def train(rank: int, sizes: tuple[int, ...], reshard: bool, precompute: bool) -> None:
    layers, twin = layers_of(*sizes)
    shard(layers, reshard)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1)
    prepare = fp8lt.precompute_float8_dynamic_scale_for_fsdp if precompute else bool
    train_beside_a_twin(layers, twin, optimizer, whole(layers), lambda: prepare(layers))


@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_it_trains_as_one_process(ranks: Ranks, reshard: bool, precompute: bool) -> None:
    ranks.run(train, (48, 96, 32), reshard, precompute)


def test_shards_may_be_uneven_or_empty(ranks: Ranks) -> None:
    """BUG-76."""
    ranks.run(train, (32, 16, 32), True, False)  # 6, 6 and 4 rows
    ranks.run(train, (16, 16), True, True)
    ranks.run(train, (48, 64, 128), True, True)


class Gathers:
    """Counts the bytes that ranks send each other in gathers, and the reductions of amaxes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes, self.reductions = 0, 0
        for name in ("all_gather_into_tensor", "all_gather_single", "all_reduce"):
            call = getattr(distributed, name, None)  # FSDP2 of one PyTorch takes the one or other
            if call:
                patch.setattr(distributed, name, functools.partial(self.counting, name, call))

    def counting(self, name: str, call: Any, output: Tensor, *args: Any, **options: Any) -> Any:
        if name == "all_reduce":
            self.reductions += 1
        else:
            self.bytes += output.nbytes
        return call(output, *args, **options)


def count(rank: int, f32: int, bf16: int, fp8: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        layers, _ = layers_of(96, 96, 96, bias=False)
        plain = copy.deepcopy(layers)
        for layer in plain:
            layer.weight = nn.Parameter(layer.weight.shard)
        cast = copy.deepcopy(plain)
        size = sum(p.numel() for p in plain.parameters())
        shard(layers)
        shard(plain)
        shard(cast, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        x = randn(5, 96, on=here(), dtype=torch.float32)
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
        layers(x).sum().backward()  # FSDP makes its buffers
        fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers)
        gathers = Gathers(patch)

        def counted(model: nn.Module) -> tuple[int, int]:
            gathers.bytes = gathers.reductions = 0
            model(x).sum().backward()
            return gathers.bytes, gathers.reductions

        # What a rank has itself is counted, too: R / (R - 1) of what it receives.
        assert counted(layers) == (fp8 * size, 0)
        assert counted(plain) == (f32 * size, 0)
        assert counted(cast) == (bf16 * size, 0)
        # A scale belongs to the elements that it was computed from.
        before = layers(x)
        optimizer.step()
        with pytest.raises(RuntimeError, match="changed after its scale was computed"):
            layers(x)
        gathers.reductions = 0
        fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers)
        assert gathers.reductions == 1
        assert counted(layers)[1] == 0
        assert error(layers(x), before) > 0.1
        with torch.no_grad():
            layers[0].weight.mul_(64)
        fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers)
        y = layers(x)
        want = nn.functional.linear(
            nn.functional.linear(x, layers[0].weight.full_tensor()), layers[1].weight.full_tensor()
        )
        assert error(y, want) < 0.08  # measured 0.075


def test_a_byte_per_element_is_sent_and_scales_belong_to_their_weights(ranks: Ranks) -> None:
    """BUG-50, for shards: a scale from before an optimizer's step is not used after it."""
    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    (cells,) = re.findall(r"^\| bytes received in the two gathers \|(.*)\|$", readme, re.MULTILINE)
    told = [re.fullmatch(r"(\d) P \(R - 1\) / R", cell.strip()) for cell in cells.split("|")]
    ranks.run(count, *(int(found[1]) for found in told if found))


def hold_no_weight(rank: int) -> None:
    layers, twin = layers_of(128, 128, 128, bias=False)
    shard(layers)
    saved: list[Tensor] = []
    x = randn(16, 128, on=here(), dtype=torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layers(x)
    storages = {id(s): s.nbytes() for s in (t.untyped_storage() for t in saved)}
    scales = 4 * 128 * 4
    assert sum(storages.values()) <= 2 * 16 * 128 + scales  # x_t of both layers, no weight
    y.sum().backward()  # they come back
    want = x.detach().requires_grad_()
    twin(want).sum().backward()
    assert torch.equal(x.grad, want.grad)


def test_no_weight_is_held_from_forward_to_backward(ranks: Ranks) -> None:
    """BUG-80."""
    ranks.run(hold_no_weight)


def mixed(rank: int) -> None:
    layers, twin = layers_of(64, 96)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(layers, mp_policy=policy)
    x = randn(7, 64, on=here(), dtype=torch.float32, seed=rank)
    y = layers(x)
    assert y.dtype == torch.bfloat16
    # The weight is cast from f32, the bias to bf16 first.
    q = fp8lt.quantize_weight(twin[0].weight)
    weight, bias = (p.detach().bfloat16().requires_grad_() for p in twin.parameters())
    want = fp8lt.linear(x.bfloat16(), weight, bias, w_quantized=q)
    assert torch.equal(y, want)
    y.float().sum().backward()
    want.float().sum().backward()
    for p, q in zip(layers.parameters(), (weight, bias), strict=True):
        gradient = q.grad.float()
        distributed.all_reduce(gradient)
        assert p.grad.dtype == torch.float32
        assert error(p.grad.full_tensor(), gradient / WORLD) < ROUNDING


def test_mixed_precision_casts_a_weight_once(ranks: Ranks) -> None:
    ranks.run(mixed)


def not_finite(rank: int, bad: float) -> None:
    layers, _ = layers_of(32, 48)
    shard(layers)
    if rank == 1:
        with torch.no_grad():
            layers[0].weight.to_local()[0, 0] = bad
    x = randn(3, 32, on=here(), dtype=torch.float32)
    for prepare in (bool, fp8lt.precompute_float8_dynamic_scale_for_fsdp):
        prepare(layers)
        with torch.no_grad():
            assert not layers(x).isfinite().any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_in_one_shard_is_seen_by_all(ranks: Ranks, bad: float) -> None:
    ranks.run(not_finite, bad)


def save_and_load(rank: int) -> None:
    layers, twin = layers_of(32, 48, 16)
    other, _ = layers_of(32, 48, 16)
    shard(layers)
    saved = get_model_state_dict(layers)
    assert not any(sharded(value) for value in saved.values())
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    for name, value in torch.load(file, weights_only=False).items():
        assert torch.equal(value.full_tensor(), twin.state_dict()[name])
    # In place, as DCP loads: what a state dict has is the parameters' memory.
    with torch.no_grad():
        for value in saved.values():
            value.zero_()
    assert not any(p.full_tensor().any() for p in layers.parameters())
    layers.load_state_dict({name: value + 1 for name, value in saved.items()})
    assert all((p.full_tensor() == 1).all() for p in layers.parameters())
    assert sharded(layers[0].weight) is not None
    plain = copy.deepcopy(twin)
    plain.load_state_dict(other.state_dict())
    assert all(map(torch.equal, plain.parameters(), twin.parameters()))


def test_checkpoints_have_plain_tensors(ranks: Ranks) -> None:
    ranks.run(save_and_load)


def on_meta(rank: int) -> None:
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(32, 48))
    fp8lt.convert_to_float8_training(layers, config=CONFIG)
    shard(layers)
    layers.to_empty(device=here())
    torch.manual_seed(0)
    with torch.no_grad():
        for p in layers.parameters():
            p.fill_(0.5)
    x = torch.ones(3, 32, device=here())
    y = layers(x)
    assert error(y, torch.full((3, 48), 16.5, device=here())) < 1e-6
    assert isinstance(layers[0].weight, DTensor)
    assert sharded(layers[0].weight) is not None


def test_a_model_may_be_made_on_meta(ranks: Ranks) -> None:
    ranks.run(on_meta)


def in_high_precision(rank: int) -> None:
    layers, twin = layers_of(32, 48)
    shard(layers)
    x = randn(3, 32, on=here(), dtype=torch.float32).requires_grad_()
    with fp8lt.disable_fp8(layers):
        y = layers(x)
    weight = fp8lt.quantize_weight(twin[0].weight)
    dequantised = (weight.data.float() * weight.scale_inv[0]).requires_grad_()
    want = nn.functional.linear(x, dequantised, twin[0].bias)
    assert error(y, want) < ROUNDING
    (dx,) = torch.autograd.grad(want.sum(), x, retain_graph=True)
    y.sum().backward()
    assert error(x.grad, dx) < ROUNDING
    want.sum().backward()
    assert error(layers[0].weight.grad.full_tensor(), dequantised.grad) < ROUNDING


def test_outside_of_fp8_it_is_dequantised(ranks: Ranks) -> None:
    ranks.run(in_high_precision)


def test_what_is_not_sharded_computes_as_ever() -> None:
    layers, twin = layers_of(32, 48, 16)
    x = randn(5, 32, on=here(), dtype=torch.float32)
    got, want = layers(x), twin(x)
    assert torch.equal(got, want)
    got.sum().backward()
    want.sum().backward()
    for p, q in zip(layers.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert type(layers[0].weight.grad) is Tensor
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
    optimizer.step()
    assert type(layers[0].weight) is ShardedWeight
    assert not torch.equal(layers[0].weight.shard, twin[0].weight)
    assert type(layers[0].weight + 1) is Tensor
    again = copy.deepcopy(layers)
    assert torch.equal(again(x), layers(x))


def test_weights_that_do_not_fit_are_named_and_gathered_in_their_own_precision() -> None:
    model = nn.ModuleDict({
        "fits": nn.Linear(32, 16), "odd": nn.Linear(32, 20), "head": nn.Linear(16, 32, bias=False),
        "embedding": nn.Embedding(32, 16), "delayed": nn.Linear(16, 16),
    })  # fmt: skip
    model["head"].weight = model["embedding"].weight
    fp8lt.convert_to_float8_training(model)
    model["delayed"].recipe = "delayed"
    with pytest.warns(UserWarning, match="gathered in their own precision") as caught:
        fp8lt.enable_fsdp_float8_all_gather(model)
    (told,) = caught
    assert "'odd': its sizes [20, 32] are no multiples of 16" in str(told.message)
    assert "'head': it has other users" in str(told.message)
    assert "'delayed': recipe 'delayed' has no scale of" in str(told.message)
    assert [name for name, m in model.items() if sharded(m.weight) is not None] == ["fits"]
    with warnings.catch_warnings(), pytest.raises(ValueError, match="recipe: the weight is gath"):
        model["fits"].recipe = "rowwise"
    with pytest.warns(UserWarning, match="no layer is converted"):
        fp8lt.enable_fsdp_float8_all_gather(nn.Linear(16, 16))


def shard_first(rank: int) -> None:
    layers, _ = layers_of(32, 48)
    _, twin = layers_of(32, 48)
    shard(twin)
    with pytest.raises(RuntimeError, match="call it before fully_shard"):
        fp8lt.enable_fsdp_float8_all_gather(twin)
    shard(layers, reshard=False)
    layers(torch.ones(1, 32, device=here()))
    assert isinstance(layers[0].weight, GatheredWeight)
    with pytest.raises(RuntimeError, match="that of '0' is gathered: call it after optimizer"):
        fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers)


def test_it_says_what_it_wants_first(ranks: Ranks) -> None:
    ranks.run(shard_first)


# ------------------------------------------------------------------------- a scale and its weight


def change(rank: int) -> None:
    x = torch.ones(2, 32, device=here())
    for kind in ("foreach", "fused"):
        layers, _ = layers_of(32, 48)
        shard(layers)
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1, **{kind: True})
        fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers)
        layers(x).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="changed after its scale was computed"):
            layers(x)
    weight = layers[0].weight
    for write in (
        lambda: weight.to_local().mul_(2),
        lambda: weight.data.mul_(2),
        lambda: layers.load_state_dict(layers.state_dict()),
        lambda: layers.to_empty(device=here()),
    ):
        fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers)
        with torch.no_grad():
            layers(x)
            write()
            with pytest.raises(RuntimeError, match="changed after its scale was computed"):
                layers(x)
    # Sharding anew what is there already is no change: on all ranks, or they would part.
    layers, _ = layers_of(32, 16)
    shard(layers)
    fp8lt.precompute_float8_dynamic_scale_for_fsdp(layers)
    layers(x)


def test_a_scale_is_not_used_after_any_change_of_its_weight(ranks: Ranks) -> None:
    """BUG-50, with the operators that optimizers have."""
    ranks.run(change)


def in_two_dimensions(rank: int, precompute: bool) -> None:
    layers, twin = layers_of(48, 96, 32)
    mesh = init_device_mesh(here().type, (1, WORLD), mesh_dim_names=("replicate", "shard"))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    prepare = fp8lt.precompute_float8_dynamic_scale_for_fsdp if precompute else bool
    optimizer = torch.optim.SGD(layers.parameters(), lr=1)
    train_beside_a_twin(layers, twin, optimizer, whole(layers), lambda: prepare(layers))


def by_columns(rank: int) -> None:
    layers, twin = layers_of(96, 48, bias=False)
    shard(layers, shard_placement_fn=lambda _: Shard(1))
    assert layers[0].weight.to_local().shape == (48, 96 // WORLD)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1)
    train_beside_a_twin(layers, twin, optimizer, whole(layers))


def test_meshes_and_placements_may_be_others(ranks: Ranks) -> None:
    ranks.run(in_two_dimensions, False)
    ranks.run(in_two_dimensions, True)
    ranks.run(by_columns)
