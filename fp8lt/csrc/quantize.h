// Quantise kernels, free of torch: raw pointers in, a CUDA status out.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace fp8lt {

enum class RealType { kFloat32, kFloat16, kBFloat16 };
enum class Fp8Type { kE4M3, kE5M2 };

// Both dimensions of an FP8 copy are padded to this: 16 bytes is the alignment cuBLASLt asks of a
// leading dimension, and either dimension becomes the leading one in one of the two layouts.
constexpr int64_t kPad = 16;
constexpr int64_t padded(int64_t size) { return (size + kPad - 1) / kPad * kPad; }

// One tensorwise quantise of `x` [rows, cols], contiguous, any alignment.
struct QuantizeTensorwise {
  const void* x;
  RealType real;
  Fp8Type fp8;
  int64_t rows, cols;
  void* data;           // [padded(rows), padded(cols)] or null: not asked for
  void* data_t;         // [padded(cols), padded(rows)] or null: not asked for
  float* scale_inv;     // [scale_count] the one number, real = fp8 * scale_inv, written out
  int64_t scale_count;
  void* sums;           // [cols] of x's columns, or null: not asked for; rows > 0
  RealType sums_type;   // what they are rounded to
  void* scratch;        // quantize_scratch_bytes, 16-byte aligned, of no other use until the end
};

// Whether a GPU has the shared memory that `sums` takes.
bool quantize_has_sums(int device);

size_t quantize_scratch_bytes(const QuantizeTensorwise& q);

cudaError_t quantize_tensorwise(const QuantizeTensorwise& q, cudaStream_t stream);

}  // namespace fp8lt
