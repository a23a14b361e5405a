// Rowwise quantise: a row of either copy has a scale of its own.
//
//   data[r, c]   = sat(x[r, c] * fold_cols[c] * s[r])    s from the largest magnitude of its row
//   data_t[c, r] = sat(x[r, c] * fold_rows[r] * t[c])    t                      of its column
//
// or, folded, data_t has the bytes of data, and x needs no magnitudes of columns.
//
// Two kernels, as in tensorwise.cu. Magnitudes of rows and columns meet in memory, by atomic
// maxima: whatever the order, the result is the same.

#include "launch.cuh"

namespace fp8lt {
namespace {

constexpr int kAmaxBlocksPerSm = 2;  // of so many threads with so many registers

// ----------------------------------------------------------------------------------- kernels

// The largest magnitudes of this thread's patch: of its rows, and of its columns over all patches
// that were added. They are bits of f32.
template <typename T, bool kFolds>
struct AxisAmax;

// Of x as it is.
template <typename T>
struct AxisAmax<T, false> {
  static constexpr int kWordsOfLine = kLines<T> * 4;  // one or two columns to a word
  uint32_t rows[kPatchRows], words[kWordsOfLine];

  __device__ void begin(const Quantize&, int64_t) {}
  __device__ void add(const Quantize&, const Patch<T>& patch, const Place&) {
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      const uint32_t* line = reinterpret_cast<const uint32_t*>(patch.lines[r]);
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < kWordsOfLine; ++i) {
        const uint32_t magnitudes = line[i] & Bits<T>::kMagnitude;
        largest = Bits<T>::max(largest, magnitudes);
        words[i] = Bits<T>::max(words[i], magnitudes);
      }
      rows[r] = __float_as_uint(Bits<T>::widest(largest));
    }
  }

  __device__ void cols(uint32_t (&cols)[kPatchCols]) const {
    constexpr int kEach = kPatchCols / kWordsOfLine;
#pragma unroll
    for (int j = 0; j < kPatchCols; ++j) {
      const uint32_t word = words[j / kEach];
      const uint32_t one = kEach == 1 ? word : j % 2 == 0 ? word & 0xffffu : word >> 16;
      cols[j] = __float_as_uint(Bits<T>::widest(one));
    }
  }
};

// Of x as it is folded into either copy.
template <typename T>
struct AxisAmax<T, true> {
  uint32_t rows[kPatchRows];
  float largest[kPatchCols], fold_cols[kPatchCols];

  // The patches to come begin at this column.
  __device__ void begin(const Quantize& q, int64_t col) {
#pragma unroll
    for (int j = 0; j < kPatchCols; ++j) {
      const bool folded = q.fold_cols != nullptr && col + j < q.cols;
      fold_cols[j] = folded ? __ldg(q.fold_cols + col + j) : 1.0f;
    }
  }

  __device__ void add(const Quantize& q, const Patch<T>& patch, const Place& at) {
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      const bool folded = q.fold_rows != nullptr && at.row + r < q.rows;
      const float fold_row = folded ? __ldg(q.fold_rows + at.row + r) : 1.0f;
      const T* values = reinterpret_cast<const T*>(patch.lines[r]);
      float of_row = 0;
#pragma unroll
      for (int j = 0; j < kPatchCols; ++j) {
        const float x = real(values[j]);
        of_row = max_or_nan(of_row, fabsf(x * fold_cols[j]));
        largest[j] = max_or_nan(largest[j], fabsf(x * fold_row));
      }
      rows[r] = __float_as_uint(of_row);
    }
  }

  __device__ void cols(uint32_t (&cols)[kPatchCols]) const {
#pragma unroll
    for (int j = 0; j < kPatchCols; ++j) cols[j] = __float_as_uint(largest[j]);
  }
};

// A block takes `strip` tiles, one below the other.
template <typename T, bool kFolds>
__global__ void __launch_bounds__(kThreads, kAmaxBlocksPerSm)
    axis_amax_kernel(const Quantize q, const Grid grid, uint32_t* row_amax, uint32_t* col_amax,
                     uint32_t strip) {
  __shared__ uint32_t warps[kWarps][kTile];
  wait_for_last_kernel();
  let_next_kernel_start();
  if (q.next_zeros != nullptr) {
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < kZeros;
         i += int64_t{gridDim.x} * kThreads) {
      q.next_zeros[i] = 0;
    }
  }
  const uint32_t strips_down = blockIdx.x / grid.across.divisor;
  uint32_t tile = strips_down * strip * grid.across.divisor + blockIdx.x % grid.across.divisor;
  AxisAmax<T, kFolds> amax{};
  const Place first = place_of(q, grid, tile);
  amax.begin(q, first.col);
  for (uint32_t i = 0; i < strip && tile < grid.tiles; ++i, tile += grid.across.divisor) {
    const Place at = place_of(q, grid, tile);
    amax.add(q, load_patch<T>(q, grid, at), at);
    half_warp_max(amax.rows);
    const int r = threadIdx.x % kPatchesAcross;
    if (row_amax != nullptr && r < kPatchRows && at.row + r < q.rows) {
      const uint32_t largest = r < 2 ? amax.rows[r == 0 ? 0 : 1] : amax.rows[r == 2 ? 2 : 3];
      atomicMax(row_amax + at.row + r, largest);
    }
  }
  if (col_amax == nullptr) return;
  uint32_t cols[kPatchCols];
  amax.cols(cols);
  store_warp_max(cols, warps[0]);
  __syncthreads();
  const int64_t col = first.col0 + threadIdx.x;
  if (threadIdx.x < kTile && col < q.cols) {
    atomicMax(col_amax + col, max_of_warps(warps[0], threadIdx.x));
  }
}

template <typename T, Fp8Type kType, bool kFolded>
__global__ void __launch_bounds__(kThreads, kCastBlocksPerSm)
    axis_cast_kernel(const Quantize q, const Grid grid, float* tile_sums, const uint32_t* row_amax,
                     const uint32_t* col_amax) {
  using Scales = AxisScales<kType, kFolded>;
  __shared__ typename Scales::Numbers both[2];
  const Share share{blockIdx.x, gridDim.x};
  const Shared shared = shared_memory();
  const Walk walk(grid.tiles, share);
  // x is not what the kernel before this one writes: it was there before that let this one start.
  fetch_first<T>(q, grid, walk, shared);
  wait_for_last_kernel();
  if (q.scale_inv != nullptr) {
    write_scales_inv<kType>(q.scale_inv, row_amax, q.rows, q.power_of_two, share);
  }
  if (q.scale_inv_t != nullptr && kFolded) {
    for (int64_t i = share.block * kThreads + threadIdx.x; i < padded(q.cols);
         i += share.blocks * kThreads) {
      q.scale_inv_t[i] = 1.0f;
    }
  } else if (q.scale_inv_t != nullptr) {
    write_scales_inv<kType>(q.scale_inv_t, col_amax, q.cols, q.power_of_two, share);
  }
  Scales scales{q, grid, row_amax, col_amax, both};
  if (walk.count > 0) scales.prepare(walk.tile(0), 0);
  __syncthreads();
  cast_tiles<T, kType>(q, grid, walk, shared, tile_sums, scales);
}

// ------------------------------------------------------------------------------------ launch

size_t amax_bytes(const Quantize& q) {
  return sizeof(uint32_t) * (padded(q.rows) + padded(q.cols));
}

template <typename T, Fp8Type kType>
cudaError_t launch_rowwise(const Quantize& q, cudaStream_t stream) {
  static Gpus gpus;
  const Gpu* gpu = nullptr;
  const auto plain_kernel = axis_cast_kernel<T, kType, false>;
  const auto folded_kernel = axis_cast_kernel<T, kType, true>;
  cudaError_t status = gpus.current({reinterpret_cast<const void*>(plain_kernel),
                                     reinterpret_cast<const void*>(folded_kernel)},
                                    &gpu);
  if (status != cudaSuccess) return status;
  const Grid grid = grid_of(q);
  uint32_t* const scratch = static_cast<uint32_t*>(q.scratch);
  uint32_t* const amax = q.zeros != nullptr ? q.zeros : scratch;
  // Not by the copies: of an empty matrix they are null, and the other dimension has scales.
  const bool needs_rows = q.scale_inv != nullptr;
  const bool needs_cols = q.scale_inv_t != nullptr && !q.folded;
  uint32_t* row_amax = needs_rows ? amax : nullptr;
  uint32_t* col_amax = needs_cols ? amax + padded(q.rows) : nullptr;
  float* tile_sums = reinterpret_cast<float*>(scratch + padded(q.rows) + padded(q.cols));
  if (q.zeros == nullptr) {
    status = cudaMemsetAsync(amax, 0, amax_bytes(q), stream);
    if (status != cudaSuccess) return status;
  }
  if (grid.tiles > 0) {
    const uint32_t across = grid.across.divisor, down = grid.tiles / across;
    // Long strips mean few atomics; some waves of blocks, an even end.
    constexpr int64_t kWaves = 3;
    const int64_t blocks = gpu->blocks(grid.tiles, kAmaxBlocksPerSm * kWaves);
    const uint32_t strip = static_cast<uint32_t>(std::max<int64_t>(1, grid.tiles / blocks));
    const bool folds = q.fold_cols != nullptr || q.fold_rows != nullptr;
    const auto kernel = folds ? axis_amax_kernel<T, true> : axis_amax_kernel<T, false>;
    status = launch_early(*gpu, kernel, int64_t{across} * ((down + strip - 1) / strip), 0, stream,
                          q, grid, row_amax, col_amax, strip);
    if (status != cudaSuccess) return status;
  }
  status = launch_early(*gpu, q.folded ? folded_kernel : plain_kernel,
                        gpu->blocks(grid.tiles, kCastBlocksPerSm), cast_shared_bytes(q), stream, q,
                        grid, tile_sums, row_amax, col_amax);
  return status != cudaSuccess ? status : launch_sums(q, *gpu, grid, tile_sums, stream);
}

}  // namespace

size_t rowwise_scratch_bytes(const Quantize& q) { return amax_bytes(q) + sums_bytes(q); }

cudaError_t quantize_rowwise(const Quantize& q, cudaStream_t stream) {
  return with_types(q, [&](auto real, auto fp8) {
    return launch_rowwise<decltype(real), decltype(fp8)::value>(q, stream);
  });
}

}  // namespace fp8lt
