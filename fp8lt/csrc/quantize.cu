// Tensorwise quantise: amax, then scale, saturate and cast into both layouts, in one launch.
//
//   scale = FP8_MAX / max(amax, 1e-12)    data[r, c] = data_t[c, r] = sat(x[r, c] * scale)
//
// Every element is needed twice, with all of x in between, and memory is the bottleneck: so the
// second time should not come from there. A block walks its tiles once for amax and keeps the
// first few in shared memory. After a grid-wide barrier it casts the kept ones, fetching another
// tile into every place that becomes free: in reverse order, which finds most of them in L2.
// Outputs are stored past the cache, so that they do not push x out of it.

#include "quantize.h"

#include <cooperative_groups.h>
#include <cuda_pipeline.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "elements.cuh"

namespace fp8lt {
namespace {

// ---------------------------------------------------------------------------------------- tiles
// A tile is 128 x 128. A thread owns a patch of 4 rows x 8 columns of it: the 8 columns are one
// 8-byte store of the row-major copy, the 4 rows one 4-byte word of the transposed copy, which goes
// through shared memory so that its rows leave as whole 128-byte lines too.

constexpr int kTile = 128;
constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 2;  // while one waits for a barrier or for memory, the other works
constexpr int kPatchRows = 4;
constexpr int kPatchCols = 8;
constexpr int kPatchesAcross = kTile / kPatchCols;
static_assert(kTile / kPatchRows * kPatchesAcross == kThreads, "one patch per thread");
constexpr int kWords = kTile / 4;                 // of a transposed row
constexpr int kTransposeBytes = kTile * kTile;    // the FP8 tile on its way to data_t

constexpr int kMaxPlaces = 3;
static_assert(kMaxPlaces == 3, "wait_for_fetches lists the cases");

template <typename T>
constexpr int kTileBytes = kTile * kTile * sizeof(T);
template <typename T>
constexpr int kLines = kPatchCols * sizeof(T) / 16;  // 16-byte pieces of a patch's row

// A patch as it lies in memory.
template <typename T>
struct Patch {
  uint4 lines[kPatchRows][kLines<T>];
};

struct Place {
  int64_t row0, col0;  // of the tile's first element
  int64_t row, col;    // of this thread's patch
  bool interior;       // the tile has no padding
};

// Tiles are counted in 32 bits: a division in 64 is a subroutine, and every thread divides.
struct Grid {
  uint32_t tiles_across, tiles;
  int places;    // for tiles in a block's shared memory; 1 ... kMaxPlaces
  bool aligned;  // every row of x begins on a 16-byte boundary
};

__device__ Place place_of(const QuantizeTensorwise& q, const Grid& grid, uint32_t tile) {
  const uint32_t down = tile / grid.tiles_across, across = tile - down * grid.tiles_across;
  const int64_t row0 = static_cast<int64_t>(down) * kTile;
  const int64_t col0 = static_cast<int64_t>(across) * kTile;
  return {row0, col0, row0 + threadIdx.x / kPatchesAcross * kPatchRows,
          col0 + threadIdx.x % kPatchesAcross * kPatchCols,
          row0 + kTile <= q.rows && col0 + kTile <= q.cols};
}

template <typename T>
__device__ bool is_whole_line(const QuantizeTensorwise& q, const Grid& grid, int64_t row,
                              int64_t col) {
  return grid.aligned && col + kPatchCols <= q.cols && row < q.rows;
}

// One row of a patch where it is not all there or not aligned; zero outside.
template <typename T>
__device__ void load_ragged(const QuantizeTensorwise& q, int64_t row, int64_t col,
                            uint4 (&lines)[kLines<T>]) {
  const T* x = static_cast<const T*>(q.x);
  alignas(16) T values[kPatchCols] = {};
#pragma unroll
  for (int j = 0; j < kPatchCols; ++j) {
    if (row < q.rows && col + j < q.cols) values[j] = x[row * q.cols + col + j];
  }
#pragma unroll
  for (int i = 0; i < kLines<T>; ++i) lines[i] = reinterpret_cast<const uint4*>(values)[i];
}

template <typename T>
__device__ Patch<T> load(const QuantizeTensorwise& q, const Grid& grid, uint32_t tile) {
  const Place at = place_of(q, grid, tile);
  Patch<T> patch;
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    if (is_whole_line<T>(q, grid, at.row + r, at.col)) {
      const T* from = static_cast<const T*>(q.x) + (at.row + r) * q.cols + at.col;
#pragma unroll
      for (int i = 0; i < kLines<T>; ++i) {
        patch.lines[r][i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
      }
    } else {
      load_ragged<T>(q, at.row + r, at.col, patch.lines[r]);
    }
  }
  return patch;
}

// A place in shared memory holds a tile, each thread's patch apart: only that thread ever touches
// it, so nobody waits for anybody.
template <typename T>
__device__ uint4* line_in(uint4* place, int r, int i) {
  return place + (r * kLines<T> + i) * kThreads + threadIdx.x;
}

// Begin to copy this thread's patch of `tile` into `place`; the caller commits.
template <typename T>
__device__ void fetch(const QuantizeTensorwise& q, const Grid& grid, uint32_t tile, uint4* place) {
  const Place at = place_of(q, grid, tile);
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    if (is_whole_line<T>(q, grid, at.row + r, at.col)) {
      const T* from = static_cast<const T*>(q.x) + (at.row + r) * q.cols + at.col;
#pragma unroll
      for (int i = 0; i < kLines<T>; ++i) {
        __pipeline_memcpy_async(line_in<T>(place, r, i), reinterpret_cast<const uint4*>(from) + i,
                                16);
      }
    } else {
      uint4 lines[kLines<T>];
      load_ragged<T>(q, at.row + r, at.col, lines);
#pragma unroll
      for (int i = 0; i < kLines<T>; ++i) *line_in<T>(place, r, i) = lines[i];
    }
  }
}

template <typename T>
__device__ Patch<T> read(uint4* place) {
  Patch<T> patch;
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
#pragma unroll
    for (int i = 0; i < kLines<T>; ++i) patch.lines[r][i] = *line_in<T>(place, r, i);
  }
  return patch;
}

// Wait until all but the latest `pending` commits of this thread have arrived.
__device__ void wait_for_fetches(int pending) {
  if (pending == 0) {
    __pipeline_wait_prior(0);
  } else if (pending == 1) {
    __pipeline_wait_prior(1);
  } else {
    __pipeline_wait_prior(kMaxPlaces - 1);
  }
  asm volatile("" ::: "memory");  // the wait alone does not keep later reads of a place behind it
}

template <typename T>
__device__ uint32_t largest_magnitude(const Patch<T>& patch, uint32_t largest) {
  constexpr uint32_t mask = Bits<T>::kMagnitude;
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
#pragma unroll
    for (int i = 0; i < kLines<T>; ++i) {
      const uint4 v = patch.lines[r][i];
      largest = Bits<T>::max(largest, Bits<T>::max(v.x & mask, v.y & mask));
      largest = Bits<T>::max(largest, Bits<T>::max(v.z & mask, v.w & mask));
    }
  }
  return largest;
}

// The bytes of four columns that are not padding, which is zero whatever the scale: 0 * NaN is not.
__device__ uint32_t inside(int64_t row, int64_t col, int64_t rows, int64_t cols) {
  const int64_t count = row < rows ? cols - col : 0;
  return count >= 4 ? 0xffffffffu : count <= 0 ? 0u : (1u << 8 * count) - 1;
}

// The word of column `col` that holds rows 4 * word ... 4 * word + 3, moved by an XOR so that a
// warp's writes (columns 8 apart, two neighbouring words) hit 32 different banks.
__device__ int shared_word(int col, int word) { return col * kWords + (word ^ (col / 8 * 2)); }

// Cast a patch; store its rows, and put its columns into `transpose`.
template <typename T, Fp8Type kType>
__device__ void cast_patch(const QuantizeTensorwise& q, const Patch<T>& patch, const Place& at,
                           float scale, uint32_t* transpose) {
  const int64_t padded_rows = padded(q.rows), padded_cols = padded(q.cols);
  uint32_t fp8[kPatchRows][kPatchCols / 4];  // four columns to a word
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    const T* values = reinterpret_cast<const T*>(patch.lines[r]);
#pragma unroll
    for (int j = 0; j < kPatchCols; j += 4) {
      const uint32_t low = __nv_cvt_float2_to_fp8x2(
          make_float2(real(values[j]) * scale, real(values[j + 1]) * scale), __NV_SATFINITE,
          Fp8<kType>::kKind);
      const uint32_t high = __nv_cvt_float2_to_fp8x2(
          make_float2(real(values[j + 2]) * scale, real(values[j + 3]) * scale), __NV_SATFINITE,
          Fp8<kType>::kKind);
      fp8[r][j / 4] = low | high << 16;
      if (!at.interior) fp8[r][j / 4] &= inside(at.row + r, at.col + j, q.rows, q.cols);
    }
    if (q.data != nullptr && at.row + r < padded_rows && at.col < padded_cols) {
      uint8_t* to = static_cast<uint8_t*>(q.data) + (at.row + r) * padded_cols + at.col;
      __stcs(reinterpret_cast<uint2*>(to), make_uint2(fp8[r][0], fp8[r][1]));
    }
  }
  if (q.data_t == nullptr) return;
  const int across = threadIdx.x % kPatchesAcross, word = threadIdx.x / kPatchesAcross;
#pragma unroll
  for (int j = 0; j < kPatchCols; ++j) {
    const uint32_t take = 0x40u | j % 4 | (j % 4) << 4;  // byte j of two words, side by side
    const uint32_t low = __byte_perm(fp8[0][j / 4], fp8[1][j / 4], take);
    const uint32_t high = __byte_perm(fp8[2][j / 4], fp8[3][j / 4], take);
    transpose[shared_word(across * kPatchCols + j, word)] = __byte_perm(low, high, 0x5410);
  }
}

// Store the columns of a whole tile, which `transpose` holds, as rows of data_t.
__device__ void store_columns(const QuantizeTensorwise& q, int64_t row0, int64_t col0,
                              const uint32_t* transpose) {
  const int64_t padded_rows = padded(q.rows), padded_cols = padded(q.cols);
  constexpr int kPieces = kTile / 16;  // 16-byte pieces of a transposed row
#pragma unroll
  for (int i = threadIdx.x; i < kTile * kPieces; i += kThreads) {
    const int c = i / kPieces, piece = i % kPieces;
    const int64_t col = col0 + c, row = row0 + piece * 16;
    if (col >= padded_cols || row >= padded_rows) continue;
    // The XOR is even: pairs of words stay together, their order within the piece may not.
    const uint2 low = *reinterpret_cast<const uint2*>(transpose + shared_word(c, piece * 4));
    const uint2 high = *reinterpret_cast<const uint2*>(transpose + shared_word(c, piece * 4 + 2));
    uint8_t* to = static_cast<uint8_t*>(q.data_t) + col * padded_rows + row;
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(low.x, low.y, high.x, high.y));
  }
}

// ------------------------------------------------------------------------------------ the kernel

// The largest of one word per thread, in every thread.
__device__ uint32_t block_max(uint32_t value) {
  __shared__ uint32_t warp_largest[kThreads / 32];
  value = __reduce_max_sync(0xffffffffu, value);
  __syncthreads();  // the last call's readers are done
  if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = value;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, warp_largest[threadIdx.x % (kThreads / 32)]);
}

// The largest magnitude of all threads of the grid: the barrier between the passes.
__device__ float grid_max(float magnitude, float* scratch) {
  uint32_t* partial = reinterpret_cast<uint32_t*>(scratch);  // bits of magnitudes order like them
  const uint32_t mine = block_max(__float_as_uint(magnitude));
  if (threadIdx.x == 0) partial[blockIdx.x] = mine;
  cooperative_groups::this_grid().sync();
  uint32_t largest = 0;
  for (int i = threadIdx.x; i < gridDim.x; i += kThreads) {
    largest = max(largest, __ldcg(partial + i));
  }
  return __uint_as_float(block_max(largest));
}

template <typename T, Fp8Type kType>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    quantize_kernel(const QuantizeTensorwise q, const Grid grid) {
  extern __shared__ uint4 shared[];  // the places, then the FP8 tile on its way to data_t
  const auto place = [&](int i) { return shared + i * (kTileBytes<T> / 16); };
  uint32_t* transpose = reinterpret_cast<uint32_t*>(place(grid.places));
  // This block's tiles, counted 0 ... count - 1; the first few are kept.
  const int count = static_cast<int>((grid.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
  const int kept = min(count, grid.places);
  const auto tile = [&](int i) { return blockIdx.x + i * gridDim.x; };

  for (int i = 0; i < kept; ++i) fetch<T>(q, grid, tile(i), place(i));
  __pipeline_commit();
  uint32_t largest = 0;
  int i = kept;
  if constexpr (sizeof(T) == 2) {
    for (; i + 1 < count; i += 2) {  // two at a time, which registers allow: more loads on the way
      const Patch<T> patches[2] = {load<T>(q, grid, tile(i)), load<T>(q, grid, tile(i + 1))};
      largest = largest_magnitude(patches[1], largest_magnitude(patches[0], largest));
    }
  }
  for (; i < count; ++i) largest = largest_magnitude(load<T>(q, grid, tile(i)), largest);
  wait_for_fetches(0);
  for (i = 0; i < kept; ++i) largest = largest_magnitude(read<T>(place(i)), largest);

  const float scale = scale_of<kType>(grid_max(Bits<T>::widest(largest), q.scratch));
  const float scale_inv = __frcp_rn(scale);
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t s = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; s < q.scale_count;
       s += threads) {
    q.scale_inv[s] = scale_inv;
  }

  // The kept tiles in order, then the others from the last to the first.
  const auto turn = [&](int n) { return tile(n < kept ? n : count - 1 - (n - kept)); };
  for (int n = 0, slot = 0; n < count; ++n, slot = slot + 1 == kept ? 0 : slot + 1) {
    wait_for_fetches(kept - 1);
    const Patch<T> patch = read<T>(place(slot));
    if (n + kept < count) fetch<T>(q, grid, turn(n + kept), place(slot));
    __pipeline_commit();  // also of nothing: waiting counts them
    const Place at = place_of(q, grid, turn(n));
    if (q.data_t != nullptr) __syncthreads();  // the last tile's columns have left
    cast_patch<T, kType>(q, patch, at, scale, transpose);
    if (q.data_t == nullptr) continue;
    __syncthreads();
    store_columns(q, at.row0, at.col0, transpose);
  }
}

// --------------------------------------------------------------------------------------- launch

// What a kernel may use of a GPU. Asked once per GPU and kernel: the answers take microseconds.
struct Limits {
  std::atomic<int> blocks{0};  // that run at the same time; 0: not asked yet
  int places = 0;
  int shared_bytes = 0;
};

constexpr int kMaxDevices = 64;

template <typename T, Fp8Type kType>
cudaError_t find_limits(int device, Limits& limits) {
  int sms = 0, per_sm = 0, per_block = 0, reserved = 0, resident = 0;
  cudaError_t status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  cudaDeviceGetAttribute(&per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
  constexpr int kStatic = kThreads / 32 * 4;  // block_max
  // As many blocks per SM as have room for a tile; on GPUs with little shared memory that is one.
  for (int per = kBlocksPerSm; per > 0 && limits.places == 0; --per) {
    const int budget = std::min(per_block, per_sm / per - reserved) - kStatic - kTransposeBytes;
    limits.places = std::clamp(budget / kTileBytes<T>, 0, kMaxPlaces);
  }
  if (limits.places == 0) return cudaErrorInvalidConfiguration;
  limits.shared_bytes = limits.places * kTileBytes<T> + kTransposeBytes;
  const auto kernel = quantize_kernel<T, kType>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                limits.shared_bytes);
  if (status != cudaSuccess) return status;
  status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads,
                                                         limits.shared_bytes);
  if (status != cudaSuccess) return status;
  if (resident == 0) return cudaErrorCooperativeLaunchTooLarge;
  limits.blocks.store(std::min(sms * resident, kQuantizeScratch), std::memory_order_release);
  return cudaSuccess;
}

template <typename T, Fp8Type kType>
cudaError_t launch(const QuantizeTensorwise& q, cudaStream_t stream) {
  static Limits found[kMaxDevices];
  static std::mutex mutex;
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  Limits& limits = found[device];
  if (limits.blocks.load(std::memory_order_acquire) == 0) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (limits.blocks.load() == 0) status = find_limits<T, kType>(device, limits);
    if (status != cudaSuccess) return status;
  }

  Grid grid{};
  const int64_t across = (q.cols + kTile - 1) / kTile;
  const int64_t tiles = (q.rows + kTile - 1) / kTile * across;
  if (tiles > INT32_MAX) return cudaErrorInvalidValue;  // 3.5e13 elements
  grid.tiles_across = static_cast<uint32_t>(across);
  grid.tiles = static_cast<uint32_t>(tiles);
  grid.places = limits.places;
  grid.aligned = reinterpret_cast<uintptr_t>(q.x) % 16 == 0 && q.cols * sizeof(T) % 16 == 0;
  // One block even of an empty matrix: it writes scale_inv.
  const int64_t blocks = std::clamp<int64_t>(tiles, 1, limits.blocks.load());
  QuantizeTensorwise argument = q;
  void* arguments[] = {&argument, &grid};
  return cudaLaunchCooperativeKernel(quantize_kernel<T, kType>, dim3(static_cast<unsigned>(blocks)),
                                     dim3(kThreads), arguments, limits.shared_bytes, stream);
}

template <typename T>
cudaError_t launch(const QuantizeTensorwise& q, cudaStream_t stream) {
  return q.fp8 == Fp8Type::kE4M3 ? launch<T, Fp8Type::kE4M3>(q, stream)
                                 : launch<T, Fp8Type::kE5M2>(q, stream);
}

}  // namespace

cudaError_t quantize_tensorwise(const QuantizeTensorwise& q, cudaStream_t stream) {
  switch (q.real) {
    case RealType::kFloat32:
      return launch<float>(q, stream);
    case RealType::kFloat16:
      return launch<__half>(q, stream);
    default:
      return launch<__nv_bfloat16>(q, stream);
  }
}

}  // namespace fp8lt
