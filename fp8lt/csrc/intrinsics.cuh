// What the kernels take of the hardware in PTX or by the names of memory that only nvcc knows. The
// tests replace this file, and run the kernels on a CPU (tests/cuda_on_cpu).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_pipeline.h>

#include <cstdint>

namespace fp8lt {

// The shared memory that a launch asked for. It follows what the kernel declares; where it begins
// amid a line, copies into it take longer (a cast on an H200: 10 %).
__device__ inline uint4* dynamic_shared_memory() {
  extern __shared__ __align__(128) uint4 shared[];
  return shared;
}

// The larger of two, NaN if one of them is; with its sign bit clear. `fmaxf` drops a NaN.
__device__ inline float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// Read what another block wrote, and with it all that block had written before.
__device__ inline uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Read past L1, which has no use for what is read once.
__device__ inline uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// Begin a copy of 16 bytes from global to shared memory, by way of L1 or past it.
template <bool kByL1>
__device__ void copy_async(uint4* to, const uint4* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kByL1) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  }
}

}  // namespace fp8lt
