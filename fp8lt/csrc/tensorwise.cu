// Tensorwise quantise: amax, then scale, saturate and cast into both layouts.
//
//   scale = FP8_MAX / max(amax, 1e-12)    data[r, c] = data_t[c, r] = sat(x[r, c] * scale)
//
// Every element is needed twice, with all of x in between. A large matrix takes two kernels. The
// second may start while the first ends (programmatic dependent launch), with its first tiles on
// their way; and it goes backwards, so that it begins with what the first has left in L2. One
// kernel with a grid-wide barrier is no faster (on an H200, within 2 % at 8192 x 4096 and
// 8192 x 14336), and would have to wait until every other kernel has left the GPU.
//
// For a small matrix the host is the bottleneck, so it takes one kernel: a single cluster of
// blocks, which the hardware starts together and can synchronise.

#include <utility>

#include "launch.cuh"

#if FP8LT_SM90
#include <cooperative_groups.h>
#endif

namespace fp8lt {
namespace {

constexpr int kAmaxBlocksPerSm = 3;
constexpr int kAmaxBlocks = 1024;  // at most; each writes one number
constexpr int kCluster = 8;        // blocks; the most that every GPU with clusters has

// ----------------------------------------------------------------------------------- kernels

template <typename T>
__global__ void __launch_bounds__(kThreads, kAmaxBlocksPerSm)
    amax_kernel(const Quantize q, uint32_t* partial) {
  wait_for_last_kernel();
  let_next_kernel_start();
  const uint32_t largest = amax_bits<T>(q, {blockIdx.x, gridDim.x});
  if (threadIdx.x == 0) partial[blockIdx.x] = largest;
}

template <typename T, Fp8Type kType>
__global__ void __launch_bounds__(kThreads, kCastBlocksPerSm)
    cast_kernel(const Quantize q, const Grid grid, float* tile_sums,
                const uint32_t* partial, int partials) {
  const Share share{blockIdx.x, gridDim.x};
  const Shared shared = shared_memory();
  const Walk walk(grid.tiles, share);
  // x is not what amax_kernel writes: it was there before that let this one start.
  if (needs_tiles(q)) fetch_first<T>(q, grid, walk, shared);
  wait_for_last_kernel();
  uint32_t largest = 0;
  for (int i = threadIdx.x; i < partials; i += kThreads) largest = max(largest, partial[i]);
  const float scale =
      scale_of<kType>(__uint_as_float(block_max(largest)), q.power_of_two);
  write_scale_inv(q, share, scale);
  if (needs_tiles(q)) {
    TensorScale scales{scale};
    cast_tiles<T, kType>(q, grid, walk, shared, tile_sums, scales);
  } else if (q.data != nullptr) {
    cast_rows<T, kType>(q, grid, share, scale);
  }
}

// A block's share of x is read once: it stays in shared memory, kPlaces tiles, or in registers, one
// step of rows.
template <typename T, Fp8Type kType>
__global__ void __launch_bounds__(kThreads, kCastBlocksPerSm)
    cluster_kernel(const Quantize q, const Grid grid, float* tile_sums) {
#if FP8LT_SM90
  __shared__ uint32_t warp_largest[kCluster * kWarps];  // of the whole cluster, in every block
  const auto cluster = cooperative_groups::this_cluster();
  auto started = cluster.barrier_arrive();
  const Share share{blockIdx.x, gridDim.x};  // the grid is the cluster
  const Shared shared = shared_memory();
  const Walk walk(grid.tiles, share);
  const RowSteps<T> rows(q, grid);
  typename RowSteps<T>::Lines lines;
  uint32_t largest = 0;
  if (needs_tiles(q)) {
    fetch_first<T>(q, grid, walk, shared);
    __pipeline_wait_prior(0);
    for (int i = 0; i < walk.count; ++i) {
      const Patch<T> patch = receive<T>(shared.places + i * (kTileBytes<T> / 16));
#pragma unroll
      for (int l = 0; l < kPatchRows * kLines<T>; ++l) {
        largest = add_magnitudes<T>(largest, patch.lines[l / kLines<T>][l % kLines<T>]);
      }
    }
  } else {
    rows.load(share.block, lines);
#pragma unroll
    for (int l = 0; l < RowSteps<T>::kUnroll * kLines<T>; ++l) {
      largest = add_magnitudes<T>(largest, lines[l / kLines<T>][l % kLines<T>]);
    }
  }
  largest = __reduce_max_sync(0xffffffffu, __float_as_uint(Bits<T>::widest(largest)));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  cluster.barrier_wait(std::move(started));  // nobody writes into a block that is not there yet
  if (lane < kCluster) {
    cluster.map_shared_rank(warp_largest, lane)[share.block * kWarps + warp] = largest;
  }
  cluster.sync();
  for (int i = lane; i < kCluster * kWarps; i += 32) largest = max(largest, warp_largest[i]);
  largest = __reduce_max_sync(0xffffffffu, largest);
  const float scale = scale_of<kType>(__uint_as_float(largest), q.power_of_two);
  write_scale_inv(q, share, scale);
  if (needs_tiles(q)) {
    TensorScale scales{scale};
    cast_tiles<T, kType>(q, grid, walk, shared, tile_sums, scales);
  } else if (q.data != nullptr) {
    rows.template store<kType>(share.block, lines, scale);
  }
#endif
}

// ------------------------------------------------------------------------------------ launch

template <typename T, Fp8Type kType>
cudaError_t launch_tensorwise(const Quantize& q, cudaStream_t stream) {
  static Gpus gpus;
  const Gpu* gpu = nullptr;
  cudaError_t status = gpus.current({reinterpret_cast<const void*>(cast_kernel<T, kType>),
                                     reinterpret_cast<const void*>(cluster_kernel<T, kType>)},
                                    &gpu);
  if (status != cudaSuccess) return status;
  const Grid grid = grid_of(q);
  uint32_t* partial = static_cast<uint32_t*>(q.scratch);
  float* tile_sums = reinterpret_cast<float*>(partial + kAmaxBlocks);
  const int shared_bytes = needs_tiles(q) ? cast_shared_bytes(q) : 0;

  // Units of work: tiles, or steps of rows.
  const int64_t lines = padded(q.rows) * padded(q.cols) / kPatchCols;
  constexpr int64_t kStep = kThreads * RowSteps<T>::kUnroll;
  const int64_t work = needs_tiles(q) ? grid.tiles : (lines + kStep - 1) / kStep;
  if (gpu->sm90 && work <= kCluster * (needs_tiles(q) ? kPlaces<T> : 1)) {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kCluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    status = launch(cluster_kernel<T, kType>, kCluster, shared_bytes, stream, &cluster, q, grid,
                    tile_sums);
  } else {
    const int64_t vectors = q.rows * q.cols / (kThreads * 16 / sizeof(T));
    const int64_t amax_blocks = std::min<int64_t>(gpu->blocks(vectors, kAmaxBlocksPerSm),
                                                  kAmaxBlocks);
    status = launch_early(*gpu, amax_kernel<T>, amax_blocks, 0, stream, q, partial);
    if (status != cudaSuccess) return status;
    status = launch_early(*gpu, cast_kernel<T, kType>, gpu->blocks(work, kCastBlocksPerSm),
                          shared_bytes, stream, q, grid, tile_sums, partial,
                          static_cast<int>(amax_blocks));
  }
  return status != cudaSuccess ? status : launch_sums(q, *gpu, grid, tile_sums, stream);
}

}  // namespace

bool quantize_has_sums(int device) {
  bool has = false;
  return has_sums(device, &has) == cudaSuccess && has;
}

size_t tensorwise_scratch_bytes(const Quantize& q) {
  return sizeof(uint32_t) * kAmaxBlocks + sums_bytes(q);
}

cudaError_t quantize_tensorwise(const Quantize& q, cudaStream_t stream) {
  return with_types(q, [&](auto real, auto fp8) {
    return launch_tensorwise<decltype(real), decltype(fp8)::value>(q, stream);
  });
}

}  // namespace fp8lt
