// Where a tile's elements have their scales from. A block's cast asks, for one tile after another:
//
//   enter(patch, at, i)     before tile i is cast; all threads
//   row_major, transposed   x as it is cast for data and for data_t, of the patch's row and column
//   prepare(tile, i)        after that, for the next tile; a barrier follows before its `enter`
//
// kSameBytes: data_t has the bytes of data, so `transposed` is not asked.
// kSynchronizes: `enter` has a barrier for all threads of the block.
#pragma once

#include "amax.cuh"
#include "tiles.cuh"

namespace fp8lt {

// One scale for everything.
struct TensorScale {
  static constexpr bool kSameBytes = true, kSynchronizes = false;
  float scale;

  template <typename T>
  __device__ void enter(const Patch<T>&, const Place&, int) {}
  __device__ float row_major(float x, int, int) const { return x * scale; }
  __device__ void prepare(uint32_t, int) {}
};

// The same, and the largest magnitude of what is cast: `largest`, as add_magnitudes has it.
template <typename T>
struct RecordingScale : TensorScale {
  uint32_t largest;

  __device__ explicit RecordingScale(float scale) : TensorScale{scale}, largest(0) {}
  __device__ void enter(const Patch<T>& patch, const Place&, int) {
    largest = add_patch(largest, patch);
  }
};

// ------------------------------------------------------------------------- of rows and columns

// One for every row of x and, unless folded, one for every column, from the largest magnitudes that
// a kernel before this one has left in memory. While a tile is cast, every thread makes one number
// of the next tile's.
template <Fp8Type kType, bool kFolded>
struct AxisScales {
  static constexpr bool kSameBytes = kFolded, kSynchronizes = false;
  enum Kind { kRowScale, kColScale, kFoldRow, kFoldCol };
  static constexpr int kKinds = kThreads / kTile;
  using Numbers = float[kKinds][kTile];

  const Quantize& q;
  const Grid& grid;
  const uint32_t* row_amax;  // [rows], [cols]: the bits of the magnitudes
  const uint32_t* col_amax;
  Numbers* both;             // [2] in shared memory: of this tile and of the next
  const float *row_scale, *col_scale, *fold_row, *fold_col;  // of this thread's patch

  __device__ void prepare(uint32_t tile, int i) {
    const Place at = place_of(q, grid, tile);
    const int kind = threadIdx.x / kTile, place = threadIdx.x % kTile;
    const bool is_row = kind == kRowScale || kind == kFoldRow;
    const int64_t index = (is_row ? at.row0 : at.col0) + place;
    const bool inside = index < (is_row ? q.rows : q.cols);
    float number = 1.0f;  // where nothing is folded
    if (kind == kRowScale || kind == kColScale) {
      const uint32_t* amax = is_row ? row_amax : col_amax;
      const uint32_t bits = inside && amax != nullptr ? amax[index] : 0;
      number = scale_of<kType>(__uint_as_float(bits), q.power_of_two);
    } else {
      const float* fold = is_row ? q.fold_rows : q.fold_cols;
      if (inside && fold != nullptr) number = fold[index];
    }
    both[i % 2][kind][place] = number;
  }

  template <typename T>
  __device__ void enter(const Patch<T>&, const Place&, int i) {
    const int row = threadIdx.x / kPatchesAcross * kPatchRows;
    const int col = threadIdx.x % kPatchesAcross * kPatchCols;
    row_scale = both[i % 2][kRowScale] + row;
    col_scale = both[i % 2][kColScale] + col;
    fold_row = both[i % 2][kFoldRow] + row;
    fold_col = both[i % 2][kFoldCol] + col;
  }

  __device__ float row_major(float x, int r, int j) const {
    return kFolded ? x * row_scale[r] : x * fold_col[j] * row_scale[r];
  }
  __device__ float transposed(float x, int r, int j) const {
    return x * fold_row[r] * col_scale[j];
  }
};

// What is written of the scales: to `scale_inv` [padded(count)], this block's share.
template <Fp8Type kType>
__device__ void write_scales_inv(float* scale_inv, const uint32_t* amax, int64_t count,
                                 bool power_of_two, Share share) {
  const int64_t threads = static_cast<int64_t>(share.blocks) * kThreads;
  for (int64_t i = static_cast<int64_t>(share.block) * kThreads + threadIdx.x; i < padded(count);
       i += threads) {
    const float largest = __uint_as_float(i < count ? amax[i] : 0);
    scale_inv[i] = __frcp_rn(scale_of<kType>(largest, power_of_two));
  }
}

// ----------------------------------------------------------------------- of blocks inside a tile

// The largest magnitudes of a thread's patch, in its rows and in its columns: bits of f32.
template <typename T>
__device__ void patch_amax(const Patch<T>& patch, uint32_t (&rows)[kPatchRows],
                           uint32_t (&cols)[kPatchCols]) {
#pragma unroll
  for (int j = 0; j < kPatchCols; ++j) cols[j] = 0;
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    const T* values = reinterpret_cast<const T*>(patch.lines[r]);
    rows[r] = 0;
#pragma unroll
    for (int j = 0; j < kPatchCols; ++j) {
      const uint32_t bits = __float_as_uint(real(values[j])) & 0x7fffffffu;
      rows[r] = max(rows[r], bits);
      cols[j] = max(cols[j], bits);
    }
  }
}

// ... in every thread of the half warp that has the same four rows.
__device__ inline void half_warp_max(uint32_t (&rows)[kPatchRows]) {
  static_assert(kPatchesAcross == 16, "half a warp has the rows of its patches to itself");
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
#pragma unroll
    for (int step = kPatchesAcross / 2; step > 0; step /= 2) {
      rows[r] = max(rows[r], __shfl_xor_sync(0xffffffffu, rows[r], step));
    }
  }
}

// Leave the columns' largest magnitudes of each warp in `warps` [kWarps][kTile].
__device__ inline void store_warp_max(uint32_t (&cols)[kPatchCols], uint32_t* warps) {
#pragma unroll
  for (int j = 0; j < kPatchCols; ++j) {
    cols[j] = max(cols[j], __shfl_xor_sync(0xffffffffu, cols[j], kPatchesAcross));
  }
  if (threadIdx.x % 32 >= kPatchesAcross) return;
  uint4* to = reinterpret_cast<uint4*>(warps + threadIdx.x / 32 * kTile +
                                       threadIdx.x % 32 * kPatchCols);
  to[0] = make_uint4(cols[0], cols[1], cols[2], cols[3]);
  to[1] = make_uint4(cols[4], cols[5], cols[6], cols[7]);
}

__device__ inline uint32_t max_of_warps(const uint32_t* warps, int col) {
  uint32_t largest = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) largest = max(largest, warps[w * kTile + col]);
  return largest;
}

// 1x128: a row of a tile is a block of data, a column of it a block of data_t.
template <Fp8Type kType>
struct LineScales {
  static constexpr bool kSameBytes = false, kSynchronizes = true;

  // Largest magnitudes, and in the place of those of a row and of a column its scale: two blocks of
  // a cast with sums fill the shared memory of an H200 to within a kilobyte.
  struct Shared {
    uint32_t warps[kWarps][kTile], rows[kTile];
  };

  const Quantize& q;
  Shared& shared;
  const uint32_t *row_scale, *col_scale;  // of this thread's patch, the bits of f32

  template <typename T>
  __device__ void enter(const Patch<T>& patch, const Place& at, int) {
    uint32_t rows[kPatchRows], cols[kPatchCols];
    patch_amax(patch, rows, cols);
    half_warp_max(rows);
    store_warp_max(cols, shared.warps[0]);
    const int row = threadIdx.x / kPatchesAcross * kPatchRows;
    const int col = threadIdx.x % kPatchesAcross * kPatchCols;
    if (col == 0) {
      *reinterpret_cast<uint4*>(shared.rows + row) = make_uint4(rows[0], rows[1], rows[2], rows[3]);
    }
    __syncthreads();
    const int place = threadIdx.x % kTile;
    if (threadIdx.x < kTile) {
      shared.rows[place] = one(shared.rows[place], q.scale_inv, at.across, at.row0 + place,
                               padded(q.rows));
    } else if (threadIdx.x < 2 * kTile) {
      shared.warps[0][place] = one(max_of_warps(shared.warps[0], place), q.scale_inv_t, at.down,
                                   at.col0 + place, padded(q.cols));
    }
    __syncthreads();
    row_scale = shared.rows + row;
    col_scale = shared.warps[0] + col;
  }

  // The scale of one block; its inverse goes to [block, row] of `scale_inv` [, rows].
  __device__ uint32_t one(uint32_t largest, float* scale_inv, int64_t block, int64_t row,
                          int64_t rows) const {
    const float scale = scale_of<kType>(__uint_as_float(largest), q.power_of_two);
    if (scale_inv != nullptr && row < rows) scale_inv[block * rows + row] = __frcp_rn(scale);
    return __float_as_uint(scale);
  }

  __device__ float row_major(float x, int r, int) const {
    return x * __uint_as_float(row_scale[r]);
  }
  __device__ float transposed(float x, int, int j) const {
    return x * __uint_as_float(col_scale[j]);
  }
  __device__ void prepare(uint32_t, int) {}
};

// 128x128: a tile is a block.
template <Fp8Type kType>
struct SquareScales {
  static constexpr bool kSameBytes = true, kSynchronizes = true;
  static_assert(kTile == 128);

  const Quantize& q;
  float scale;

  template <typename T>
  __device__ void enter(const Patch<T>& patch, const Place& at, int) {
    uint32_t largest = 0;
    largest = add_patch(largest, patch);
    largest = block_max(__float_as_uint(Bits<T>::widest(largest)));
    scale = scale_of<kType>(__uint_as_float(largest), q.power_of_two);
    store(q.scale_inv, at.down, at.across, q.cols);
    store(q.scale_inv_t, at.across, at.down, q.rows);
  }

  // The last block of a line also writes the zeros that are no block's.
  __device__ void store(float* scale_inv, int64_t line, int64_t place, int64_t size) const {
    const int64_t width = blocks_to_4(size), after = place + threadIdx.x;
    const bool last = place + 1 == blocks_of(size);
    if (scale_inv == nullptr || after >= width || (threadIdx.x > 0 && !last)) return;
    scale_inv[line * width + after] = threadIdx.x == 0 ? __frcp_rn(scale) : 0.0f;
  }

  __device__ float row_major(float x, int, int) const { return x * scale; }
  __device__ void prepare(uint32_t, int) {}
};

}  // namespace fp8lt
