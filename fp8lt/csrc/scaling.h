// What one scale of an FP8 matrix belongs to. Free of everything else.
#pragma once

#include <cstdint>

namespace fp8lt {

// Numbered as in torch.nn.functional.ScalingType. How the scales of a copy [rows, k] lie, where a
// row is what its GEMM contracts along, and L = ceil(k / 128):
enum class Scaling : int64_t {
  kTensorwise = 0,  // one number
  kRowwise = 1,     // [rows]
  k1x128 = 4,       // [L, rows]
  k128x128 = 5      // [ceil(rows / 128), L to a multiple of 4]
};

}  // namespace fp8lt
