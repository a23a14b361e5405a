// One FP8 GEMM on cuBLASLt, free of torch's tensors.
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>

#include "scaling.h"

namespace fp8lt {

constexpr size_t kWorkspaceBytes = 32 << 20;  // NVIDIA's recommendation for sm_90 and newer

// d[m, n] = scale_a * scale_b * (a[m, k] @ b[n, k].T) + bias[n], or + d[m, n]; all row-major and
// packed, the FP8 operands K-major: the only form that Hopper's FP8 units take.
struct GemmProblem {
  int device;
  int64_t m, n, k;  // k % 16 == 0, and a row of d is a multiple of 16 bytes
  cudaDataType_t a_type, b_type, d_type;
  bool fast_accum;  // allowed, where it saves time
  const void* a;              // 16-byte aligned, as every pointer here
  const void* b;
  Scaling a_scaling, b_scaling;  // both kTensorwise, both kRowwise, or k1x128 with either block
  const float* a_scale_inv;   // f32 on the device
  const float* b_scale_inv;
  bool written_out;           // kTensorwise: m and n times, so that a kernel may read it by row
  const void* bias;           // or null; of d's type, bf16 where d is f32
  void* d;
  bool adds;                  // to what d holds; without bias
};

// Launches on `stream`. `workspace` holds kWorkspaceBytes, is 256-byte aligned and not in use on
// another stream. Throws c10::Error with cuBLASLt's reason.
void gemm_nt(const GemmProblem& problem, void* workspace, cudaStream_t stream);

}  // namespace fp8lt
