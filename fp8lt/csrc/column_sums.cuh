// Sums of the columns of a matrix in f32, the gradient of a bias: every time in the same order.
//
//   thread: the 4 rows of its patch -> warp: 8 rows -> tile: 128 rows -> matrix
//
// While a tile is cast, its sums are made on the side and left in memory; a small kernel adds them
// up.
#pragma once

#include "tiles.cuh"

namespace fp8lt {

constexpr int kSumsBytes = kWarps * kTile * sizeof(float);

// Add a patch's rows up, and its neighbour's in the warp; one thread of the two writes.
template <typename T>
__device__ void sum_patch(const Patch<T>& patch, float* warps) {
  float sums[kPatchCols];
#pragma unroll
  for (int j = 0; j < kPatchCols; ++j) {
    const auto at = [&](int r) { return real(reinterpret_cast<const T*>(patch.lines[r])[j]); };
    sums[j] = (at(0) + at(1)) + (at(2) + at(3));
    sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], kPatchesAcross);
  }
  static_assert(kPatchesAcross == 16, "lane and lane ^ 16 have the same columns");
  if (threadIdx.x % 32 >= kPatchesAcross) return;
  float4* to = reinterpret_cast<float4*>(warps + threadIdx.x / 32 * kTile +
                                         threadIdx.x % 32 * kPatchCols);
  to[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  to[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
}

__device__ inline void store_real(void* to, RealType type, int64_t i, float value) {
  switch (type) {
    case RealType::kFloat32: static_cast<float*>(to)[i] = value; break;
    case RealType::kFloat16: static_cast<__half*>(to)[i] = __float2half_rn(value); break;
    case RealType::kBFloat16:
      static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(value);
      break;
  }
}

// Add the warps' sums of a tile up, into `tiles` [tiles, kTile].
__device__ inline void sum_tile(uint32_t tile, const float* warps, float* tiles) {
  if (threadIdx.x >= kTile) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += warps[w * kTile + threadIdx.x];
  tiles[static_cast<int64_t>(tile) * kTile + threadIdx.x] = sum;
}

// Add the sums of a column of tiles up; one block for each.
__device__ inline void sum_column(const Quantize& q, const Grid& grid,
                                  const float* tiles) {
  constexpr int kGroups = kThreads / kTile;
  __shared__ float groups[kGroups][kTile];
  const int c = threadIdx.x % kTile, group = threadIdx.x / kTile;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kTile + c;
  float sum = 0;
#pragma unroll 8
  for (uint32_t tile = blockIdx.x + group * grid.across.divisor; tile < grid.tiles;
       tile += kGroups * grid.across.divisor) {
    sum += tiles[static_cast<int64_t>(tile) * kTile + c];
  }
  groups[group][c] = sum;
  __syncthreads();
  if (group != 0 || col >= q.cols) return;
  for (int g = 1; g < kGroups; ++g) sum += groups[g][c];
  store_real(q.sums, q.sums_type, col, sum);
}

}  // namespace fp8lt
