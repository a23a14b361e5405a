// Blockwise quantise: a block of 128 along the contraction has a scale of its own, and a tile has
// all that its blocks need. So x is read once, and nothing waits for anything outside of a tile.
//
//   1x128 (x, dy)   data of 128 columns in each row, data_t of 128 rows in each column
//   128x128 (w)     both copies of the same squares
//
// DeepSeek-V3 Technical Report, 2024, section 3.3.2.

#include "launch.cuh"

namespace fp8lt {
namespace {

template <typename T, Fp8Type kType>
__global__ void __launch_bounds__(kThreads, kCastBlocksPerSm)
    line_kernel(const Quantize q, const Grid grid, float* tile_sums) {
  __shared__ typename LineScales<kType>::Shared numbers;
  const Shared shared = shared_memory();
  const Walk walk(grid.tiles, {blockIdx.x, gridDim.x});
  wait_for_last_kernel();
  fetch_first<T>(q, grid, walk, shared);
  LineScales<kType> scales{q, numbers};
  cast_tiles<T, kType>(q, grid, walk, shared, tile_sums, scales);
}

template <typename T, Fp8Type kType>
__global__ void __launch_bounds__(kThreads, kCastBlocksPerSm)
    square_kernel(const Quantize q, const Grid grid, float* tile_sums) {
  const Shared shared = shared_memory();
  const Walk walk(grid.tiles, {blockIdx.x, gridDim.x});
  wait_for_last_kernel();
  fetch_first<T>(q, grid, walk, shared);
  SquareScales<kType> scales{q};
  cast_tiles<T, kType>(q, grid, walk, shared, tile_sums, scales);
}

}  // namespace

size_t blockwise_scratch_bytes(const Quantize& q) { return sums_bytes(q); }

cudaError_t quantize_blockwise(const Quantize& q, cudaStream_t stream) {
  return with_types(q, [&](auto real, auto fp8) {
    using T = decltype(real);
    constexpr Fp8Type kType = decltype(fp8)::value;
    static Gpus gpus;
    const Gpu* gpu = nullptr;
    cudaError_t status = gpus.current({reinterpret_cast<const void*>(line_kernel<T, kType>),
                                       reinterpret_cast<const void*>(square_kernel<T, kType>)},
                                      &gpu);
    if (status != cudaSuccess) return status;
    const Grid grid = grid_of(q);
    float* tile_sums = static_cast<float*>(q.scratch);
    if (grid.tiles == 0) return cudaSuccess;  // then there are no blocks, and no scales
    const auto kernel =
        q.scaling == Scaling::k1x128 ? line_kernel<T, kType> : square_kernel<T, kType>;
    status = launch_early(*gpu, kernel, gpu->blocks(grid.tiles, kCastBlocksPerSm),
                          cast_shared_bytes(q), stream, q, grid, tile_sums);
    return status != cudaSuccess ? status : launch_sums(q, *gpu, grid, tile_sums, stream);
  });
}

}  // namespace fp8lt
