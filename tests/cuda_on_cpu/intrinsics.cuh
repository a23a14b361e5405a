// CUDA on a CPU, as far as fp8lt's kernels need it. It stands in for csrc/intrinsics.cuh when a C++
// compiler takes the kernels: the same sources, slow, and without a GPU.
//
// A block's threads are fibers of one thread. They change at barriers and shuffles alone, in an
// order that is drawn anew every time, so that a missing barrier shows as a wrong result; blocks run
// one after another. Copies to shared memory are done when they begin, and no launch is early: what
// a wait too few would break is not seen here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>

#undef __shared__
#define __shared__ static  // one block at a time has it
#undef __launch_bounds__
#define __launch_bounds__(...)

using std::isnan;
using std::max;
using std::min;

extern dim3 threadIdx, blockIdx, gridDim;

namespace on_cpu {

void* shared_memory();
void block_barrier();
uint32_t shuffle(uint32_t value, int lane);  // of this warp
void run_grid(unsigned blocks, size_t shared_bytes, const std::function<void()>& kernel);

template <typename To, typename From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace on_cpu

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  on_cpu::run_grid(config->gridDim.x, config->dynamicSmemBytes,
                   [&] { kernel(Parameters(arguments)...); });
  return cudaSuccess;
}

inline void __syncthreads() { on_cpu::block_barrier(); }
inline void __threadfence() {}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(int) {}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}
inline uint32_t atomicAdd(uint32_t* to, uint32_t value) { return std::exchange(*to, *to + value); }
inline uint32_t atomicMax(uint32_t* to, uint32_t value) {
  return std::exchange(*to, std::max(*to, value));
}

inline uint32_t __float_as_uint(float f) { return on_cpu::bits<uint32_t>(f); }
inline float __uint_as_float(uint32_t u) { return on_cpu::bits<float>(u); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __double2float_rn(double d) { return static_cast<float>(d); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t{a} * b >> 32; }
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffffu, b & 0xffffu) | std::max(a >> 16, b >> 16) << 16;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = selector >> 4 * i & 7;
    result |= static_cast<uint32_t>(bytes >> 8 * byte & 0xff) << 8 * i;
  }
  return result;
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return on_cpu::bits<T>(on_cpu::shuffle(on_cpu::bits<uint32_t>(value), lane ^ mask));
}
inline uint32_t __reduce_max_sync(unsigned all, uint32_t value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    value = std::max(value, __shfl_xor_sync(all, value, mask));
  }
  return value;
}

namespace fp8lt {

inline uint4* dynamic_shared_memory() { return static_cast<uint4*>(on_cpu::shared_memory()); }
inline float max_or_nan(float a, float b) {
  return isnan(a) || isnan(b) ? std::numeric_limits<float>::quiet_NaN() : std::max(a, b);
}
inline uint32_t load_acquire(const uint32_t* from) { return *from; }
inline uint4 load_once(const uint4* from) { return *from; }
template <bool kByL1>
void copy_async(uint4* to, const uint4* from) {
  *to = *from;
}

}  // namespace fp8lt
