"""fp8lt: an FP8 linear layer for PyTorch that calls cuBLASLt directly.

>>> import fp8lt, torch
>>> x, w = torch.randn(3, 64), torch.randn(32, 64)
>>> fp8lt.linear(x, w).shape
torch.Size([3, 32])

`linear` is the operation, `Linear` the module, `convert_to_float8_training` the way to convert a
model. Recipes, by name or as objects: "tensorwise" (`DynamicScaling`), "delayed"
(`DelayedScaling`), "rowwise", "rowwise_with_gw_hp", "rowwise_folded" (`RowwiseScaling`),
"blockwise" (`BlockScaling`).

CUDA tensors run natively where the GPU has FP8; CPU tensors run emulated, with the same numbers.
`is_available` says which.
"""

from . import build
from .autocast import fp8_autocast, stats
from .autotune import autotune
from .config import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
)
from .contexts import disable_fp8, reuse_weights, tensor_stats
from .convert import (
    convert_to_float8_training,
    enable_fsdp_float8_all_gather,
    revert,
)
from .convert_formats import convert_quantized
from .convert_report import ConversionReport, LinearReport
from .filters import gains_from_fp8
from .fsdp_precompute import precompute_float8_dynamic_scale_for_fsdp
from .linear import linear, quantize_weight
from .module import Linear, delayed_state_dict, load_delayed_state_dict, reduce_amaxes
from .ops import is_available
from .recipe import BlockScaling, DelayedScaling, DynamicScaling, RowwiseScaling
from .state import DelayedState
from .tensor_stats import TensorStats

__version__ = "0.1.0"

__all__ = [
    "BlockScaling",
    "CastConfig",
    "ConversionReport",
    "DelayedScaling",
    "DelayedState",
    "DynamicScaling",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "Linear",
    "LinearReport",
    "RowwiseScaling",
    "ScalingGranularity",
    "ScalingType",
    "TensorStats",
    "autotune",
    "convert_quantized",
    "convert_to_float8_training",
    "delayed_state_dict",
    "disable_fp8",
    "enable_fsdp_float8_all_gather",
    "fp8_autocast",
    "gains_from_fp8",
    "is_available",
    "linear",
    "load_delayed_state_dict",
    "precompute_float8_dynamic_scale_for_fsdp",
    "quantize_weight",
    "reduce_amaxes",
    "reuse_weights",
    "revert",
    "stats",
    "tensor_stats",
]

build.on_import()
