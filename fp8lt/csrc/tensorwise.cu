// Tensorwise quantise: amax, then scale, saturate and cast into both layouts.
//
//   scale = FP8_MAX / max(amax, 1e-12)    data[r, c] = data_t[c, r] = sat(x[r, c] * scale)
//
// Every element is needed twice, with all of x in between. A block holds as many of its tiles in
// shared memory as there is room for, until all magnitudes are known: of all blocks together that
// is a matrix of 13 M elements on an H200. It reads the rest again, the latest first, so that L2
// still has it. It waits for blocks that run, never for one that has yet to start: whoever waits
// takes the work that nobody has taken. So it needs no GPU for itself, as a cooperative one does.
//
// There is no room beside sums of columns, nor on most other GPUs, and f32 would take twice as much.
// Then one kernel takes the amax, and another casts, backwards. It may start while the first ends
// (programmatic dependent launch), with its first tiles on their way.
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

// What the blocks of a launch that holds tiles tell each other. Zero at first; who ends last
// makes it so again.
struct Counters {
  uint32_t largest;      // magnitude in x, its bits
  uint32_t ended;        // blocks
  uint32_t taken, done;  // groups of tiles: being read; read, and in `largest`
};
static_assert(sizeof(Counters) <= kCounters * sizeof(uint32_t));

constexpr uint32_t kMostGroups = 1024;
template <typename T>
constexpr bool kHolds = sizeof(T) == 2;
template <typename T>
constexpr int kHeld = kHeldBytes / kTileBytes<T>;  // tiles of a block

// A group that nobody has taken; `groups` when all have been read. One thread asks.
__device__ inline uint32_t take_group(Counters* counters, uint32_t groups) {
  while (load_acquire(&counters->done) < groups) {
    if (load_acquire(&counters->taken) >= groups) continue;
    const uint32_t group = atomicAdd(&counters->taken, 1);
    if (group < groups) return group;
  }
  return groups;
}

// The largest magnitude of a group, from all threads' `largest` as add_magnitudes has it.
template <typename T>
__device__ void add_group(Counters* counters, uint32_t largest) {
  largest = block_max(__float_as_uint(Bits<T>::widest(largest)));
  if (threadIdx.x != 0) return;
  atomicMax(&counters->largest, largest);
  __threadfence();
  atomicAdd(&counters->done, 1);
}

// Cast a tile into both layouts. Nobody reads `transpose` any more.
template <typename T, Fp8Type kType>
__device__ void cast_tile(const Quantize& q, const Patch<T>& patch, const Place& at,
                          const TensorScale& scales, uint32_t* transpose) {
  if (usually(at.interior)) {
    cast_patch<T, kType, true>(q, patch, at, scales, transpose);
    __syncthreads();
    if (q.data_t != nullptr) store_columns<true>(q, at, transpose);
  } else {
    cast_patch<T, kType, false>(q, patch, at, scales, transpose);
    __syncthreads();
    if (q.data_t != nullptr) store_columns<false>(q, at, transpose);
  }
}

// As many groups of tiles as blocks. Of the first group that it takes a block holds what it can; it
// seldom gets another.
template <typename T, Fp8Type kType>
__global__ void __launch_bounds__(kThreads, kCastBlocksPerSm)
    holding_kernel(const Quantize q, const Grid grid) {
  __shared__ uint32_t taken, others[kMostGroups / 32];  // a bit for each other group taken
  Counters* const counters = reinterpret_cast<Counters*>(q.counters);
  const Share share{blockIdx.x, gridDim.x};
  const uint32_t groups = share.blocks;
  uint4* const places = dynamic_shared_memory();
  const auto place = [&](int i) { return places + i % kHeld<T> * (kTileBytes<T> / 16); };
  uint32_t* const transpose =
      reinterpret_cast<uint32_t*>(places + kHeld<T> * (kTileBytes<T> / 16));

  wait_for_last_kernel();
  if (threadIdx.x == 0) taken = atomicAdd(&counters->taken, 1);
  for (int i = threadIdx.x; i < kMostGroups / 32; i += kThreads) others[i] = 0;
  __syncthreads();
  const bool has_own = taken < groups;
  const Walk walk(grid.tiles, {min(taken, groups - 1), groups});
  const int count = has_own ? walk.count : 0;
  const int held = min(count, kHeld<T>);
  for (int i = 0; i < held; ++i) fetch<T>(q, grid, walk.tile(i), place(i));
  __pipeline_commit();
  if (has_own) {
    uint32_t largest = 0;
    for (int i = held; i < count; ++i) {
      largest = add_patch(largest, load_patch<T>(q, grid, place_of(q, grid, walk.tile(i))));
    }
    receive_all();
    for (int i = 0; i < held; ++i) largest = add_patch(largest, patch_in<T>(place(i)));
    add_group<T>(counters, largest);
  }
  bool took_more = false;
  for (;;) {
    __syncthreads();  // `taken` was read
    if (threadIdx.x == 0) taken = take_group(counters, groups);
    __syncthreads();
    const uint32_t group = taken;
    if (usually(group >= groups)) break;
    took_more = true;
    if (threadIdx.x == 0) others[group / 32] |= 1u << group % 32;
    const Walk rest(grid.tiles, {group, groups});
    uint32_t largest = 0;
    for (int i = 0; i < rest.count; ++i) {
      largest = add_patch(largest, load_patch<T>(q, grid, place_of(q, grid, rest.tile(i))));
    }
    add_group<T>(counters, largest);
  }

  const float scale =
      scale_of<kType>(__uint_as_float(load_acquire(&counters->largest)), q.power_of_two);
  const TensorScale scales{scale};
  write_scale_inv(q, share, scale);
  let_next_kernel_start();
  const auto tile = [&](int i) { return walk.tile(i < held ? i : count - 1 - (i - held)); };
  for (int i = 0; i < count; ++i) {
    wait_for_copies<kHeld<T> - 1>();
    const Patch<T> patch = patch_in<T>(place(i));
    if (i + kHeld<T> < count) fetch<T>(q, grid, tile(i + kHeld<T>), place(i));
    __pipeline_commit();
    __syncthreads();  // the columns of the tile before were stored
    cast_tile<T, kType>(q, patch, place_of(q, grid, tile(i)), scales, transpose);
  }
  for (uint32_t group = 0; took_more && group < groups; ++group) {
    if ((others[group / 32] >> group % 32 & 1) == 0) continue;
    const Walk rest(grid.tiles, {group, groups});
    for (int i = 0; i < rest.count; ++i) {
      const Place at = place_of(q, grid, rest.tile(i));
      const Patch<T> patch = load_patch<T>(q, grid, at);
      __syncthreads();
      cast_tile<T, kType>(q, patch, at, scales, transpose);
    }
  }
  if (is_last_block(&counters->ended, share) && threadIdx.x == 0) *counters = {};
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
  wait_for_last_kernel();
  const Share share{blockIdx.x, gridDim.x};  // the grid is the cluster
  const Shared shared = shared_memory();
  const Walk walk(grid.tiles, share);
  const RowSteps<T> rows(q, grid);
  typename RowSteps<T>::Lines lines;
  uint32_t largest = 0;
  if (needs_tiles(q)) {
    fetch_first<T>(q, grid, walk, shared);
    receive_all();
    for (int i = 0; i < walk.count; ++i) {
      largest = add_patch(largest, patch_in<T>(shared.places + i * (kTileBytes<T> / 16)));
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

// The kernel that holds tiles; for f32, which never does, any.
template <typename T, Fp8Type kType>
constexpr auto holding() {
  if constexpr (kHolds<T>) {
    return holding_kernel<T, kType>;
  } else {
    return holding_kernel<__nv_bfloat16, kType>;
  }
}

// ------------------------------------------------------------------------------------ launch

template <typename T, Fp8Type kType>
cudaError_t launch_tensorwise(const Quantize& q, cudaStream_t stream) {
  static Gpus gpus;
  const Gpu* gpu = nullptr;
  cudaError_t status = gpus.current({reinterpret_cast<const void*>(cast_kernel<T, kType>),
                                     reinterpret_cast<const void*>(holding<T, kType>()),
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
  const int64_t blocks = gpu->blocks(work, kCastBlocksPerSm);
  if (gpu->sm90 && work <= kCluster * (needs_tiles(q) ? kPlaces<T> : 1)) {
    status = launch_clusters(*gpu, cluster_kernel<T, kType>, kCluster, kCluster, shared_bytes,
                             stream, q, grid, tile_sums);
  } else if (kHolds<T> && gpu->holds && q.sums == nullptr && grid.tiles > 0) {
    const int64_t groups = gpu->blocks(grid.tiles, kCastBlocksPerSm);
    status = launch_early(*gpu, holding<T, kType>(), std::min<int64_t>(groups, kMostGroups),
                          kSharedBytesHeld, stream, q, grid);
  } else {
    const int64_t vectors = q.rows * q.cols / (kThreads * 16 / sizeof(T));
    const int64_t amax_blocks = std::min<int64_t>(gpu->blocks(vectors, kAmaxBlocksPerSm),
                                                  kAmaxBlocks);
    status = launch_early(*gpu, amax_kernel<T>, amax_blocks, 0, stream, q, partial);
    if (status != cudaSuccess) return status;
    status = launch_early(*gpu, cast_kernel<T, kType>, blocks, shared_bytes, stream, q, grid,
                          tile_sums, partial, static_cast<int>(amax_blocks));
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
