// Delayed quantise: the scale comes from the amaxes of earlier steps, so x is read once, and its
// own amax is taken on the way, for later ones.
//
//   scale = FP8_MAX / (max(amax, 1e-12) * 2^margin)    amax: the largest or latest of the history
//
// As long as there is no history, the blocks first take the amax of x itself. All that decides is
// in memory, so a CUDA graph that is replayed goes on from where it is. The block that ends last
// knows the amax of x, and that every block has read the state: it changes it.

#include "launch.cuh"

namespace fp8lt {
namespace {

constexpr int64_t kSeedShares = 1024;  // at most
constexpr uint32_t kInfinityBits = 0x7f800000u;

// What the blocks of a launch tell each other. Zero at first; who ends last makes it so again.
struct Counters {
  uint32_t largest;                          // magnitude in x, its bits
  uint32_t ended;                            // blocks
  uint32_t seed, shares_taken, shares_done;  // where there is no history: `largest`, beforehand
};
static_assert(sizeof(Counters) == kCounters * sizeof(uint32_t));

// The place in the ring where the next amax goes. Whoever wrote the state: none outside of it.
__device__ inline int64_t next_place(const History& h) {
  const float place = h.state[h.length];
  return place >= 0 && place < static_cast<float>(h.length) ? static_cast<int64_t>(place) : 0;
}

__device__ inline bool has_history(const History& h) { return h.state[h.length + 1] != 0.0f; }

// The bits of the amax of x, in every thread, before anything is cast. Its shares are taken one by
// one, so nobody waits but for blocks that run: for those that have taken one.
template <typename T>
__device__ uint32_t seed_amax(const Quantize& q, Counters* counters) {
  __shared__ uint32_t taken;
  const int64_t vectors = q.rows * q.cols / (kThreads * 16 / sizeof(T));
  const uint32_t shares = static_cast<uint32_t>(min(max(vectors, int64_t{1}), kSeedShares));
  for (;;) {
    if (threadIdx.x == 0) taken = atomicAdd(&counters->shares_taken, 1);
    __syncthreads();
    if (taken >= shares) break;
    const uint32_t largest = amax_bits<T>(q, {taken, shares});  // with barriers, after `taken`
    if (threadIdx.x == 0) {
      atomicMax(&counters->seed, largest);
      __threadfence();
      atomicAdd(&counters->shares_done, 1);
    }
  }
  while (load_acquire(&counters->shares_done) < shares) {
  }
  return load_acquire(&counters->seed);
}

// The bits of the amax in the history that decides the scale, in every thread.
__device__ inline uint32_t deciding_amax(const History& h) {
  uint32_t largest = 0;
  if (h.most_recent) {
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
    delayed_kernel(const Quantize q, const Grid grid, float* tile_sums) {
  __shared__ bool seeded;
  Counters* const counters = reinterpret_cast<Counters*>(q.counters);
  const Share share{blockIdx.x, gridDim.x};
  const Shared shared = shared_memory();
  const Walk walk(grid.tiles, share);
  wait_for_last_kernel();
  fetch_first<T>(q, grid, walk, shared);
  // Read once, so that all threads go the same way even if a launch on another stream changes it.
  if (threadIdx.x == 0) seeded = has_history(q.history);
  __syncthreads();
  const uint32_t amax = seeded ? deciding_amax(q.history) : seed_amax<T>(q, counters);
  const float scale =
      delayed_scale<kType>(__uint_as_float(amax), q.history.margin, q.power_of_two);
  write_scale_inv(q, share, scale);
  RecordingScale<T> scales(scale);
  cast_tiles<T, kType>(q, grid, walk, shared, tile_sums, scales);
  const uint32_t largest = block_max(__float_as_uint(Bits<T>::widest(scales.largest)));
  if (threadIdx.x == 0) atomicMax(&counters->largest, largest);
  if (!is_last_block(&counters->ended, share)) return;
  end(q, load_acquire(&counters->largest));
  __syncthreads();
  if (threadIdx.x == 0) *counters = {};
}

template <typename T, Fp8Type kType>
cudaError_t launch_delayed(const Quantize& q, cudaStream_t stream) {
  static Gpus gpus;
  const Gpu* gpu = nullptr;
  cudaError_t status =
      gpus.current({reinterpret_cast<const void*>(delayed_kernel<T, kType>)}, &gpu);
  if (status != cudaSuccess) return status;
  const Grid grid = grid_of(q);
  float* tile_sums = static_cast<float*>(q.scratch);
  status = launch_early(*gpu, delayed_kernel<T, kType>, gpu->blocks(grid.tiles, kCastBlocksPerSm),
                        cast_shared_bytes(q), stream, q, grid, tile_sums);
  return status != cudaSuccess ? status : launch_sums(q, *gpu, grid, tile_sums, stream);
}

}  // namespace

size_t delayed_scratch_bytes(const Quantize& q) { return sums_bytes(q); }

cudaError_t quantize_delayed(const Quantize& q, cudaStream_t stream) {
  return with_types(q, [&](auto real, auto fp8) {
    return launch_delayed<decltype(real), decltype(fp8)::value>(q, stream);
  });
}

}  // namespace fp8lt
