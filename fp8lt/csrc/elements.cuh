// What every kernel shares: a block and its share of the work; and what is done with one element:
// magnitudes, conversion to FP8, the scale of a tensor.
#pragma once

#include <cstdint>

#include "intrinsics.cuh"
#include "quantize.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FP8LT_SM90 1  // where clusters and dependent launches began
#else
#define FP8LT_SM90 0
#endif

namespace fp8lt {

constexpr int kThreads = 512;  // of a block, in all kernels
constexpr int kWarps = kThreads / 32;

// The blocks among which the work is divided, and this one.
struct Share {
  uint32_t block, blocks;
};

// Kernels may start while the one before them in the stream ends (programmatic dependent launch).
// Until they have waited for that, they touch nothing that it may write, and write nothing at all.
// All that start so wait, so what is complete stays so further down the stream.
__device__ inline void wait_for_last_kernel() {
#if FP8LT_SM90
  cudaGridDependencySynchronize();
#endif
}

// When every block has said so, or has ended, the next kernel may start. After wait_for_last_kernel.
__device__ inline void let_next_kernel_start() {
#if FP8LT_SM90
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Whether this block is the last to come here: then what the others wrote is there, and they read
// nothing more. `ended`: zero at first.
__device__ inline bool is_last_block(uint32_t* ended, Share share) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(ended, 1) == share.blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// Magnitudes are compared as integers: with the sign bit cleared, the bits of a float order as its
// value does, and a NaN is larger than everything. So NaN survives, and there is no rounding.

template <typename T>
struct Bits;
template <>
struct Bits<float> {
  static constexpr uint32_t kMagnitude = 0x7fffffffu;
  static __device__ uint32_t of(float value) { return __float_as_uint(value); }
  static __device__ uint32_t max(uint32_t a, uint32_t b) { return ::max(a, b); }
  static __device__ float widest(uint32_t a) { return __uint_as_float(a); }
};
template <>
struct Bits<__nv_bfloat16> {  // two to a word
  static constexpr uint32_t kMagnitude = 0x7fff7fffu;
  static __device__ uint32_t of(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }
  static __device__ uint32_t max(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
  static __device__ float widest(uint32_t a) {
    return __uint_as_float(::max(a & 0xffffu, a >> 16) << 16);
  }
};
template <>
struct Bits<__half> {
  static constexpr uint32_t kMagnitude = 0x7fff7fffu;
  static __device__ uint32_t of(__half value) { return __half_as_ushort(value); }
  static __device__ uint32_t max(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
  static __device__ float widest(uint32_t a) {
    const uint16_t bits = static_cast<uint16_t>(::max(a & 0xffffu, a >> 16));
    return __half2float(__ushort_as_half(bits));
  }
};

// The larger of `largest` and of every magnitude in 16 bytes.
template <typename T>
__device__ uint32_t add_magnitudes(uint32_t largest, uint4 v) {
  constexpr uint32_t mask = Bits<T>::kMagnitude;
  largest = Bits<T>::max(largest, Bits<T>::max(v.x & mask, v.y & mask));
  return Bits<T>::max(largest, Bits<T>::max(v.z & mask, v.w & mask));
}

template <Fp8Type kType>
struct Fp8;
template <>
struct Fp8<Fp8Type::kE4M3> {
  static constexpr float kMax = 448.0f;
  static constexpr __nv_fp8_interpretation_t kKind = __NV_E4M3;
};
template <>
struct Fp8<Fp8Type::kE5M2> {
  static constexpr float kMax = 57344.0f;
  static constexpr __nv_fp8_interpretation_t kKind = __NV_E5M2;
};

inline __device__ float real(float value) { return value; }
inline __device__ float real(__half value) { return __half2float(value); }
inline __device__ float real(__nv_bfloat16 value) { return __bfloat162float(value); }

constexpr float kEps = 1e-12f;  // an all-zero tensor gets a large finite scale, not inf

__device__ inline float floor_to_power_of_two(float scale) {
  if (isnan(scale)) return scale;
  return __uint_as_float(__float_as_uint(scale) & 0xff800000u);  // no mantissa
}

template <Fp8Type kType>
__device__ float scale_of(float amax, bool power_of_two) {
  // `fmaxf` would drop a NaN, fast division the last bit that makes scales equal everywhere.
  const float scale = __fdiv_rn(Fp8<kType>::kMax, amax < kEps ? kEps : amax);
  return power_of_two ? floor_to_power_of_two(scale) : scale;
}

}  // namespace fp8lt
