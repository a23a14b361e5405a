// The transposed copy of a matrix that has only its rows in FP8: where both have one scale, they
// have the same bytes.

#include "launch.cuh"

namespace fp8lt {
namespace {

// Of `q` only data, data_t, rows and cols are used; the last two are multiples of kPad.
__global__ void __launch_bounds__(kThreads) transpose_kernel(const Quantize q, const Grid grid) {
  __shared__ __align__(16) uint32_t transpose[kTransposeBytes / 4];
  wait_for_last_kernel();
  const Place at = place_of(q, grid, blockIdx.x);
  const uint8_t* from = static_cast<const uint8_t*>(q.data) + at.row * q.cols + at.col;
  uint2 fp8[kPatchRows] = {};
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r, from += q.cols) {
    if (usually(at.interior) || (at.row + r < q.rows && at.col < q.cols)) {
      fp8[r] = __ldg(reinterpret_cast<const uint2*>(from));
    }
  }
  put_columns(fp8, transpose);
  __syncthreads();
  if (usually(at.interior)) {
    store_columns<true>(q, at, transpose);
  } else {
    store_columns<false>(q, at, transpose);
  }
}

}  // namespace

cudaError_t transpose(const Quantize& q, cudaStream_t stream) {
  static Gpus gpus;
  const Gpu* gpu = nullptr;
  const cudaError_t status =
      gpus.current({reinterpret_cast<const void*>(transpose_kernel)}, &gpu);
  if (status != cudaSuccess) return status;
  const int64_t tiles = tiles_of(q);
  if (tiles > kMostTiles) return cudaErrorInvalidValue;
  if (tiles == 0) return cudaSuccess;
  const Grid grid{static_cast<uint32_t>(tiles),
                  Divider(static_cast<uint32_t>(blocks_of(q.cols))), true};
  return launch_early(*gpu, transpose_kernel, tiles, 0, stream, q, grid);
}

}  // namespace fp8lt
