// How kernels of tiles are launched: what the GPU has, how many blocks, how early.
#pragma once

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <mutex>
#include <type_traits>

#include "cast.cuh"

namespace fp8lt {

constexpr int kCastBlocksPerSm = 2;  // while one waits for a barrier or for memory, the other works

// What a GPU has. Asked once: the answers take microseconds.
struct Gpu {
  std::atomic<int> sms{0};  // 0: not asked yet
  bool sm90 = false;        // or newer, and so is the code
  bool holds = false;       // a block may have kSharedBytesHeld

  // One block even of an empty matrix: it writes the scales.
  int64_t blocks(int64_t wanted, int64_t per_sm) const {
    return std::clamp<int64_t>(wanted, 1, sms.load(std::memory_order_relaxed) * per_sm);
  }
};

inline cudaError_t shared_bytes_limit(int device, int* bytes) {
  return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

// Whether a GPU has the shared memory that sums of columns take, beside what kernels declare.
constexpr int kStaticSharedBytes = 10 << 10;  // at most
inline cudaError_t has_shared_bytes(int device, int bytes, bool* has) {
  int limit = 0;
  const cudaError_t status = shared_bytes_limit(device, &limit);
  *has = bytes + kStaticSharedBytes <= limit;
  return status;
}
inline cudaError_t has_sums(int device, bool* has) {
  return has_shared_bytes(device, kSharedBytesSums, has);
}

// The GPUs that a set of kernels is launched on, each made ready once.
class Gpus {
 public:
  // The current one; its `kernels` may use the shared memory that a cast does.
  cudaError_t current(std::initializer_list<const void*> kernels, const Gpu** gpu) {
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    if (device >= kMaxDevices) return cudaErrorInvalidDevice;
    *gpu = &gpus_[device];
    if (gpus_[device].sms.load(std::memory_order_acquire) != 0) return cudaSuccess;
    const std::lock_guard<std::mutex> lock(mutex_);
    return gpus_[device].sms.load() != 0 ? cudaSuccess : prepare(device, kernels);
  }

 private:
  static constexpr int kMaxDevices = 64;

  cudaError_t prepare(int device, std::initializer_list<const void*> kernels) {
    int sms = 0, major = 0;
    bool sums = false, holds = false;
    cudaError_t status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) return status;
    status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status != cudaSuccess) return status;
    status = has_sums(device, &sums);
    if (status != cudaSuccess) return status;
    status = has_shared_bytes(device, kSharedBytesHeld, &holds);
    if (status != cudaSuccess) return status;
    int version = 0;
    for (const void* kernel : kernels) {
      status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    holds  ? kSharedBytesHeld
                                    : sums ? kSharedBytesSums
                                           : kSharedBytes);
      if (status != cudaSuccess) return status;
      cudaFuncAttributes code{};  // a GPU may run code that was compiled for an older one
      status = cudaFuncGetAttributes(&code, kernel);
      if (status != cudaSuccess) return status;
      version = code.ptxVersion;
    }
    gpus_[device].holds = holds;
    gpus_[device].sm90 = major >= 9 && version >= 90;
    gpus_[device].sms.store(sms, std::memory_order_release);
    return cudaSuccess;
  }

  Gpu gpus_[kMaxDevices];
  std::mutex mutex_;
};

// Tiles of a matrix; 64 bits, for a check.
inline int64_t tiles_of(const Quantize& q) {
  return (q.rows + kTile - 1) / kTile * ((q.cols + kTile - 1) / kTile);
}

inline Grid grid_of(const Quantize& q) {
  const int64_t row_bytes = q.cols * (q.real == RealType::kFloat32 ? 4 : 2);
  const bool aligned = reinterpret_cast<uintptr_t>(q.x) % 16 == 0 && row_bytes % 16 == 0;
  return {static_cast<uint32_t>(tiles_of(q)),
          Divider(static_cast<uint32_t>((q.cols + kTile - 1) / kTile)), aligned};
}

inline int cast_shared_bytes(const Quantize& q) {
  return q.sums != nullptr ? kSharedBytesSums : kSharedBytes;
}

// Launch `blocks` in clusters of `cluster`, while the kernel before them in the stream may still
// run: they must wait for that, by wait_for_last_kernel. Older GPUs have neither.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(const Gpu& gpu, void (*kernel)(Parameters...), int64_t blocks,
                            int cluster, int shared_bytes, cudaStream_t stream,
                            const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !gpu.sm90 ? 0 : cluster == 1 ? 1 : 2;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// The same, of blocks that are in no cluster.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_early(const Gpu& gpu, void (*kernel)(Parameters...), int64_t blocks,
                         int shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  return launch_clusters(gpu, kernel, blocks, 1, shared_bytes, stream, arguments...);
}

// Call `function` with a value of x's type and the FP8 type as its template arguments.
template <typename Function>
cudaError_t with_types(const Quantize& q, const Function& function) {
  const auto with_fp8 = [&](auto real) {
    if (q.fp8 == Fp8Type::kE4M3) {
      return function(real, std::integral_constant<Fp8Type, Fp8Type::kE4M3>{});
    }
    return function(real, std::integral_constant<Fp8Type, Fp8Type::kE5M2>{});
  };
  switch (q.real) {
    case RealType::kFloat32: return with_fp8(float{});
    case RealType::kFloat16: return with_fp8(__half{});
    default: return with_fp8(__nv_bfloat16{});
  }
}

// ------------------------------------------------------------------------------ sums of columns

namespace {  // for each of the files that launch it

__global__ void __launch_bounds__(kThreads)
    sums_kernel(const Quantize q, const Grid grid, const float* tile_sums) {
  wait_for_last_kernel();
  sum_column(q, grid, tile_sums);
}

// What a cast with sums ends with; see column_sums.cuh.
cudaError_t launch_sums(const Quantize& q, const Gpu& gpu, const Grid& grid, const float* tile_sums,
                        cudaStream_t stream) {
  if (q.sums == nullptr || grid.tiles == 0) return cudaSuccess;
  return launch_early(gpu, sums_kernel, grid.across.divisor, 0, stream, q, grid, tile_sums);
}

}  // namespace

// The scratch memory of a cast's sums, after what its scaling needs.
inline size_t sums_bytes(const Quantize& q) {
  return q.sums != nullptr ? tiles_of(q) * kTile * sizeof(float) : 0;
}

}  // namespace fp8lt
