// The largest magnitude of a matrix: as one flat array, each block a share of it.
#pragma once

#include "elements.cuh"

namespace fp8lt {

// The largest of one word per thread, in every thread.
__device__ inline uint32_t block_max(uint32_t value) {
  __shared__ uint32_t warp_largest[kWarps];
  value = __reduce_max_sync(0xffffffffu, value);
  __syncthreads();  // the last call's readers are done
  if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = value;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, warp_largest[threadIdx.x % kWarps]);
}

// The bits of the largest magnitude in this block's share of x, in every thread.
template <typename T>
__device__ uint32_t amax_bits(const Quantize& q, Share share) {
  constexpr int kUnroll = 4;  // loads on the way at the same time
  const T* x = static_cast<const T*>(q.x);
  const int64_t count = q.rows * q.cols;
  // 16-byte vectors, and single elements before and after them.
  const int64_t misaligned = reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T);
  const int64_t before = misaligned == 0 ? 0 : min(count, int64_t{16 / sizeof(T)} - misaligned);
  const int64_t vectors = (count - before) / (16 / sizeof(T));
  const int64_t after = before + vectors * (16 / sizeof(T));
  const uint4* from = reinterpret_cast<const uint4*>(x + before);
  uint32_t largest = 0;
  if (share.block == 0) {
    const int64_t i = threadIdx.x < before ? threadIdx.x : after + (threadIdx.x - before);
    if (i < count) largest = Bits<T>::of(x[i]) & Bits<T>::kMagnitude;
  }
  constexpr int64_t kStep = kThreads * kUnroll;
  for (int64_t begin = share.block * kStep; begin < vectors; begin += share.blocks * kStep) {
    const int64_t mine = begin + threadIdx.x;
    if (begin + kStep <= vectors) {
      uint4 v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) v[u] = load_once(from + mine + u * kThreads);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) largest = add_magnitudes<T>(largest, v[u]);
    } else {
      for (int64_t i = mine; i < vectors; i += kThreads) {
        largest = add_magnitudes<T>(largest, load_once(from + i));
      }
    }
  }
  return block_max(__float_as_uint(Bits<T>::widest(largest)));
}

}  // namespace fp8lt
