// Quantise kernels, free of torch: raw pointers in, a CUDA status out.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "scaling.h"

namespace fp8lt {

enum class RealType { kFloat32, kFloat16, kBFloat16 };
enum class Fp8Type { kE4M3, kE5M2 };

// Both dimensions of an FP8 copy are padded to this: 16 bytes is the alignment cuBLASLt asks of a
// leading dimension, and either dimension becomes the leading one in one of the two layouts.
constexpr int64_t kPad = 16;
constexpr int64_t padded(int64_t size) { return (size + kPad - 1) / kPad * kPad; }

// How many blocks of 128 cover a dimension, and the same to a multiple of 4: cuBLASLt's order.
constexpr int64_t blocks_of(int64_t size) { return (size + 127) / 128; }
constexpr int64_t blocks_to_4(int64_t size) { return (blocks_of(size) + 3) / 4 * 4; }

// The history of the amaxes of a tensor that comes again every step; see ops.quantize_delayed.
struct History {
  float* state;      // [length + 2] amaxes, the place of the next, whether there is one; or null
  int64_t length;
  int margin;        // scales leave room for amaxes 2^margin times as large
  bool most_recent;  // the scale is by the latest amax, not by the largest
  bool record;       // the amax of x enters
};

// One quantise of `x` [rows, cols], contiguous, any alignment. See ops.py for what each scaling
// means. Where R and C are the padded dimensions and L(n) = ceil(n / 128), the scales are
//
//                    scale_inv            scale_inv_t
//   kTensorwise      [scale_count]        null              the one number, written out
//   kRowwise         [R]                  [C]               folded: of ones
//   k1x128           [L(C), R]            [L(R), C]
//   k128x128         [L(R), L(C) to 4]    [L(C), L(R) to 4] zero where there is no block
struct Quantize {
  const void* x;
  RealType real;
  Fp8Type fp8;
  Scaling scaling;
  History history;         // kTensorwise: delayed, if it has a state
  bool folded;             // kRowwise: data_t has the bytes of data
  bool power_of_two;       // scales are rounded down to one
  int64_t rows, cols;
  void* data;              // [R, C] or null: not asked for
  void* data_t;            // [C, R] or null, likewise
  float* scale_inv;        // real = fp8 * scale_inv; null where nobody wants them
  float* scale_inv_t;
  int64_t scale_count;
  const float* fold_cols;  // [C] or null, rowwise: data is of x * fold_cols,
  const float* fold_rows;  // [R] or null             data_t of x.T * fold_rows
  void* sums;              // [cols] of x's columns, or null: not asked for; rows > 0
  RealType sums_type;      // what they are rounded to
  void* scratch;           // quantize_scratch_bytes, 16-byte aligned, of no other use until the end
  uint32_t* counters;      // [kCounters] zero before and after, of no other use; kTensorwise
  uint32_t* zeros;         // [kZeros] where `takes_zeros`, or null: then a memset makes them
  uint32_t* next_zeros;    // [kZeros] that are left zero, for the call after this; `zeros` are not
};
constexpr int kCounters = 5;
constexpr int64_t kZeros = 1 << 16;

// Whether a quantise spares a memset by zeros that the call before it left.
inline bool takes_zeros(const Quantize& q) {
  return q.scaling == Scaling::kRowwise && q.rows > 0 && q.cols > 0 &&
         padded(q.rows) + padded(q.cols) <= kZeros;
}

// Whether a GPU has the shared memory that `sums` takes.
bool quantize_has_sums(int device);

constexpr int64_t kMostTiles = INT32_MAX / 2;  // of 128 x 128: 1.7e13 elements

size_t quantize_scratch_bytes(const Quantize& q);

cudaError_t quantize(const Quantize& q, cudaStream_t stream);

// Make data_t [cols, rows] of data [rows, cols], 8-byte aligned, both dimensions multiples of kPad.
// Nothing else of `q` is used.
cudaError_t transpose(const Quantize& q, cudaStream_t stream);

// A quantise by one scaling, each in a file of its own.
size_t tensorwise_scratch_bytes(const Quantize& q);
size_t delayed_scratch_bytes(const Quantize& q);
size_t rowwise_scratch_bytes(const Quantize& q);
size_t blockwise_scratch_bytes(const Quantize& q);
cudaError_t quantize_tensorwise(const Quantize& q, cudaStream_t stream);
cudaError_t quantize_delayed(const Quantize& q, cudaStream_t stream);
cudaError_t quantize_rowwise(const Quantize& q, cudaStream_t stream);
cudaError_t quantize_blockwise(const Quantize& q, cudaStream_t stream);

}  // namespace fp8lt
