// Delayed quantise: the scale comes from the amaxes of earlier steps, so x is read once, and its
// own amax is taken on the way, for later ones.
//
//   scale = FP8_MAX / (max(amax, 1e-12) * 2^margin)    amax: the largest or latest of the history
//
// The first kernel has work only while there is no history: it then takes the amax of x itself. All
// that decides is in memory, so a CUDA graph that is replayed goes on from where it is. The block
// that ends last knows the amax of x, and that every block has read the state: it changes it.

#include "launch.cuh"

namespace fp8lt {
namespace {

constexpr int kSeedBlocksPerSm = 3;
constexpr int kSeedBlocks = 1024;  // at most; each writes one number
constexpr uint32_t kInfinityBits = 0x7f800000u;

// What the blocks of a cast leave for the last of them.
struct Ends {
  uint32_t largest;  // magnitude in x, its bits
  uint32_t blocks;   // that have ended
};

// The place in the ring where the next amax goes. Whoever wrote the state: none outside of it.
__device__ inline int64_t next_place(const History& h) {
  const float place = h.state[h.length];
  return place >= 0 && place < static_cast<float>(h.length) ? static_cast<int64_t>(place) : 0;
}

__device__ inline bool has_history(const History& h) { return h.state[h.length + 1] != 0.0f; }

template <typename T>
__global__ void __launch_bounds__(kThreads, kSeedBlocksPerSm)
    seed_kernel(const Quantize q, uint32_t* partial, Ends* ends) {
#if FP8LT_SM90
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  if (blockIdx.x == 0 && threadIdx.x == 0) *ends = {0, 0};
  if (has_history(q.history)) return;
  const uint32_t largest = amax_bits<T>(q, {blockIdx.x, gridDim.x});
  if (threadIdx.x == 0) partial[blockIdx.x] = largest;
}

// The bits of the amax that decides the scale, in every thread.
__device__ inline uint32_t deciding_amax(const History& h, const uint32_t* partial, int partials) {
  uint32_t largest = 0;
  if (!has_history(h)) {
    for (int i = threadIdx.x; i < partials; i += kThreads) largest = max(largest, partial[i]);
  } else if (h.most_recent) {
    const int64_t next = next_place(h);
    largest = __float_as_uint(h.state[(next + h.length - 1) % h.length]);
  } else {
    for (int64_t i = threadIdx.x; i < h.length; i += kThreads) {
      largest = max(largest, __float_as_uint(h.state[i]));
    }
  }
  return block_max(largest);
}

// In f64, where neither the margin nor the quotient can overflow.
template <Fp8Type kType>
__device__ float delayed_scale(float amax, int margin, bool power_of_two) {
  const double floored = amax < kEps ? 1e-12 : amax;
  const float scale = __double2float_rn(Fp8<kType>::kMax / ldexp(floored, margin));
  return power_of_two ? floor_to_power_of_two(scale) : scale;
}

// Enter the amax of this step; and where it is not finite, nor are the products: so says scale_inv.
__device__ inline void end(const Quantize& q, uint32_t largest) {
  const History& h = q.history;
  if (largest >= kInfinityBits) {
    for (int64_t i = threadIdx.x; i < q.scale_count; i += kThreads) {
      q.scale_inv[i] = __uint_as_float(0x7fc00000u);
    }
  } else if (h.record && largest > 0 && threadIdx.x == 0) {
    const int64_t next = next_place(h);
    h.state[next] = __uint_as_float(largest);
    h.state[h.length] = static_cast<float>((next + 1) % h.length);
    h.state[h.length + 1] = 1.0f;
  }
}

template <typename T, Fp8Type kType>
__global__ void __launch_bounds__(kThreads, kCastBlocksPerSm)
    delayed_kernel(const Quantize q, const Grid grid, float* tile_sums, const uint32_t* partial,
                   int partials, Ends* ends) {
  __shared__ bool is_last;
  const Share share{blockIdx.x, gridDim.x};
  const Shared shared = shared_memory();
  const Walk walk(grid.tiles, share);
  fetch_first<T>(q, grid, walk, shared);
#if FP8LT_SM90
  cudaGridDependencySynchronize();
#endif
  const float amax = __uint_as_float(deciding_amax(q.history, partial, partials));
  const float scale = delayed_scale<kType>(amax, q.history.margin, q.power_of_two);
  write_scale_inv(q, share, scale);
  RecordingScale<T> scales(scale);
  cast_tiles<T, kType>(q, grid, walk, shared, tile_sums, scales);
  const uint32_t largest = block_max(__float_as_uint(Bits<T>::widest(scales.largest)));
  if (threadIdx.x == 0) {
    atomicMax(&ends->largest, largest);
    __threadfence();
    is_last = atomicAdd(&ends->blocks, 1) == share.blocks - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  end(q, *static_cast<volatile uint32_t*>(&ends->largest));
}

template <typename T, Fp8Type kType>
cudaError_t launch_delayed(const Quantize& q, cudaStream_t stream) {
  static Gpus gpus;
  const Gpu* gpu = nullptr;
  cudaError_t status =
      gpus.current({reinterpret_cast<const void*>(delayed_kernel<T, kType>)}, &gpu);
  if (status != cudaSuccess) return status;
  const Grid grid = grid_of(q);
  uint32_t* partial = static_cast<uint32_t*>(q.scratch);
  Ends* ends = reinterpret_cast<Ends*>(partial + kSeedBlocks);
  float* tile_sums = reinterpret_cast<float*>(ends + 1);
  const int64_t vectors = q.rows * q.cols / (kThreads * 16 / sizeof(T));
  const int64_t seeds = std::min<int64_t>(gpu->blocks(vectors, kSeedBlocksPerSm), kSeedBlocks);
  status = launch(seed_kernel<T>, seeds, 0, stream, nullptr, q, partial, ends);
  if (status != cudaSuccess) return status;
  status = launch_early(*gpu, delayed_kernel<T, kType>, gpu->blocks(grid.tiles, kCastBlocksPerSm),
                        cast_shared_bytes(q), stream, q, grid, tile_sums, partial,
                        static_cast<int>(seeds), ends);
  return status != cudaSuccess ? status : launch_sums(q, *gpu, grid, tile_sums, stream);
}

}  // namespace

size_t delayed_scratch_bytes(const Quantize& q) {
  return sizeof(uint32_t) * kSeedBlocks + sizeof(Ends) + sums_bytes(q);
}

cudaError_t quantize_delayed(const Quantize& q, cudaStream_t stream) {
  return with_types(q, [&](auto real, auto fp8) {
    return launch_delayed<decltype(real), decltype(fp8)::value>(q, stream);
  });
}

}  // namespace fp8lt
