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

#include "quantize.h"

#include <cooperative_groups.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "amax.cuh"
#include "cast.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FP8LT_SM90 1  // where clusters and dependent launches began
#else
#define FP8LT_SM90 0
#endif

namespace fp8lt {
namespace {

constexpr int kCastBlocksPerSm = 2;  // while one waits for a barrier or for memory, the other works
constexpr int kAmaxBlocksPerSm = 3;
constexpr int kAmaxBlocks = 1024;  // at most; each writes one number
constexpr int kCluster = 8;        // blocks; the most that every GPU with clusters has

// ----------------------------------------------------------------------------------- kernels

template <typename T>
__global__ void __launch_bounds__(kThreads, kAmaxBlocksPerSm)
    amax_kernel(const QuantizeTensorwise q, uint32_t* partial) {
#if FP8LT_SM90
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  const uint32_t largest = amax_bits<T>(q, {blockIdx.x, gridDim.x});
  if (threadIdx.x == 0) partial[blockIdx.x] = largest;
}

__global__ void __launch_bounds__(kThreads)
    sums_kernel(const QuantizeTensorwise q, const Grid grid, const float* tile_sums) {
#if FP8LT_SM90
  cudaGridDependencySynchronize();
#endif
  sum_column(q, grid, tile_sums);
}

template <typename T, Fp8Type kType>
__global__ void __launch_bounds__(kThreads, kCastBlocksPerSm)
    cast_kernel(const QuantizeTensorwise q, const Grid grid, float* tile_sums,
                const uint32_t* partial, int partials) {
  const Share share{blockIdx.x, gridDim.x};
  const Shared shared = shared_memory();
  const Walk walk(grid.tiles, share);
  // x is not what amax_kernel writes: it was there before that began.
  if (needs_tiles(q)) fetch_first<T>(q, grid, walk, shared);
#if FP8LT_SM90
  cudaGridDependencySynchronize();
#endif
  uint32_t largest = 0;
  for (int i = threadIdx.x; i < partials; i += kThreads) largest = max(largest, partial[i]);
  const float scale = scale_of<kType>(__uint_as_float(block_max(largest)));
  write_scale_inv(q, share, scale);
  if (needs_tiles(q)) {
    cast_tiles<T, kType>(q, grid, walk, shared, tile_sums, scale);
  } else if (q.data != nullptr) {
    cast_rows<T, kType>(q, grid, share, scale);
  }
}

// A block's share of x is read once: it stays in shared memory, kPlaces tiles, or in registers, one
// step of rows.
template <typename T, Fp8Type kType>
__global__ void __launch_bounds__(kThreads, kCastBlocksPerSm)
    cluster_kernel(const QuantizeTensorwise q, const Grid grid, float* tile_sums) {
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
  const float scale = scale_of<kType>(__uint_as_float(largest));
  write_scale_inv(q, share, scale);
  if (needs_tiles(q)) {
    cast_tiles<T, kType>(q, grid, walk, shared, tile_sums, scale);
  } else if (q.data != nullptr) {
    rows.template store<kType>(share.block, lines, scale);
  }
#endif
}

// ------------------------------------------------------------------------------------ launch

// What a GPU has. Asked once: the answers take microseconds.
struct Gpu {
  std::atomic<int> sms{0};  // 0: not asked yet
  bool sm90 = false;        // or newer
};

constexpr int kMaxDevices = 64;

cudaError_t shared_bytes_limit(int device, int* bytes) {
  return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

template <typename T, Fp8Type kType>
cudaError_t prepare(int device, Gpu& gpu) {
  int sms = 0, major = 0, limit = 0;
  cudaError_t status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status != cudaSuccess) return status;
  status = shared_bytes_limit(device, &limit);
  if (status != cudaSuccess) return status;
  const bool sums = kSharedBytesSums + kStaticSharedBytes <= limit;
  const int bytes = sums ? kSharedBytesSums : kSharedBytes;
  for (const void* kernel : {reinterpret_cast<const void*>(cast_kernel<T, kType>),
                             reinterpret_cast<const void*>(cluster_kernel<T, kType>)}) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) return status;
  }
  cudaFuncAttributes code{};  // a GPU may run code that was compiled for an older one
  status = cudaFuncGetAttributes(&code, cluster_kernel<T, kType>);
  if (status != cudaSuccess) return status;
  gpu.sm90 = major >= 9 && code.ptxVersion >= 90;
  gpu.sms.store(sms, std::memory_order_release);
  return cudaSuccess;
}

// Tiles of a matrix; 64 bits, for a check.
int64_t tiles_of(const QuantizeTensorwise& q) {
  return (q.rows + kTile - 1) / kTile * ((q.cols + kTile - 1) / kTile);
}

Grid grid_of(const QuantizeTensorwise& q) {
  const int64_t row_bytes = q.cols * (q.real == RealType::kFloat32 ? 4 : 2);
  const bool aligned = reinterpret_cast<uintptr_t>(q.x) % 16 == 0 && row_bytes % 16 == 0;
  return {static_cast<uint32_t>(tiles_of(q)),
          Divider(static_cast<uint32_t>((q.cols + kTile - 1) / kTile)), aligned};
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int shared_bytes,
                   cudaStream_t stream, const cudaLaunchAttribute* attribute,
                   const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = const_cast<cudaLaunchAttribute*>(attribute);
  config.numAttrs = attribute != nullptr ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename T, Fp8Type kType>
cudaError_t quantize(const QuantizeTensorwise& q, cudaStream_t stream) {
  static Gpu gpus[kMaxDevices];
  static std::mutex mutex;
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  Gpu& gpu = gpus[device];
  if (gpu.sms.load(std::memory_order_acquire) == 0) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (gpu.sms.load() == 0) status = prepare<T, kType>(device, gpu);
    if (status != cudaSuccess) return status;
  }
  const int sms = gpu.sms.load();

  const int64_t elements = q.rows * q.cols;
  if (tiles_of(q) > INT32_MAX / 2) return cudaErrorInvalidValue;  // more than 1.7e13 elements
  const Grid grid = grid_of(q);
  uint32_t* partial = static_cast<uint32_t*>(q.scratch);
  float* tile_sums = reinterpret_cast<float*>(partial + kAmaxBlocks);
  const int shared_bytes = q.sums != nullptr ? kSharedBytesSums : needs_tiles(q) ? kSharedBytes : 0;
  // One block even of an empty matrix: it writes scale_inv.
  const auto blocks = [&](int64_t wanted, int64_t per_sm) {
    return std::clamp<int64_t>(wanted, 1, sms * per_sm);
  };
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;

  // Units of work: tiles, or steps of rows.
  const int64_t lines = padded(q.rows) * padded(q.cols) / kPatchCols;
  constexpr int64_t kStep = kThreads * RowSteps<T>::kUnroll;
  const int64_t work = needs_tiles(q) ? grid.tiles : (lines + kStep - 1) / kStep;
  if (gpu.sm90 && work <= kCluster * (needs_tiles(q) ? kPlaces<T> : 1)) {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kCluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    status = launch(cluster_kernel<T, kType>, kCluster, shared_bytes, stream, &cluster, q, grid,
                    tile_sums);
  } else {
    const int64_t amax_blocks = std::min<int64_t>(
        blocks(elements / (kThreads * 16 / sizeof(T)), kAmaxBlocksPerSm), kAmaxBlocks);
    status = launch(amax_kernel<T>, amax_blocks, 0, stream, nullptr, q, partial);
    if (status != cudaSuccess) return status;
    status = launch(cast_kernel<T, kType>, blocks(work, kCastBlocksPerSm), shared_bytes, stream,
                    gpu.sm90 ? &early : nullptr, q, grid, tile_sums, partial,
                    static_cast<int>(amax_blocks));
  }
  if (status != cudaSuccess || q.sums == nullptr || grid.tiles == 0) return status;
  return launch(sums_kernel, grid.across.divisor, 0, stream, gpu.sm90 ? &early : nullptr, q, grid,
                tile_sums);
}

template <typename T>
cudaError_t quantize(const QuantizeTensorwise& q, cudaStream_t stream) {
  return q.fp8 == Fp8Type::kE4M3 ? quantize<T, Fp8Type::kE4M3>(q, stream)
                                 : quantize<T, Fp8Type::kE5M2>(q, stream);
}

}  // namespace

bool quantize_has_sums(int device) {
  int limit = 0;
  return shared_bytes_limit(device, &limit) == cudaSuccess &&
         kSharedBytesSums + kStaticSharedBytes <= limit;
}

size_t quantize_scratch_bytes(const QuantizeTensorwise& q) {
  const int64_t sums = q.sums != nullptr ? tiles_of(q) * kTile : 0;
  return sizeof(uint32_t) * kAmaxBlocks + sizeof(float) * sums;
}

cudaError_t quantize_tensorwise(const QuantizeTensorwise& q, cudaStream_t stream) {
  switch (q.real) {
    case RealType::kFloat32:
      return quantize<float>(q, stream);
    case RealType::kFloat16:
      return quantize<__half>(q, stream);
    default:
      return quantize<__nv_bfloat16>(q, stream);
  }
}

}  // namespace fp8lt
