// Tiles of a matrix on their way to FP8: fetched ahead of time, cast, stored in both layouts.
//
// A tile is 128 x 128. A thread owns a patch of 4 rows x 8 columns of it: the 8 columns are one
// 8-byte store of the row-major copy, the 4 rows one 4-byte word of the transposed copy, which goes
// through shared memory so that its rows leave as whole 128-byte lines too.
#pragma once

#include "elements.cuh"

namespace fp8lt {

// Of two ways, the compiler lays the likely one out without gaps. All warps of an SM share its
// instruction cache, and what is seldom run must not lie amid what is.
__device__ inline bool usually(bool condition) { return __builtin_expect(condition, true); }
__device__ inline bool seldom(bool condition) { return __builtin_expect(condition, false); }

constexpr int kTile = 128;
constexpr int kPatchRows = 4;
constexpr int kPatchCols = 8;
constexpr int kPatchesAcross = kTile / kPatchCols;
static_assert(kTile / kPatchRows * kPatchesAcross == kThreads, "one patch per thread");
constexpr int kWords = kTile / 4;               // of a transposed row
constexpr int kTransposeBytes = kTile * kTile;  // the FP8 tile on its way to data_t

template <typename T>
constexpr int kTileBytes = kTile * kTile * sizeof(T);
template <typename T>
constexpr int kLines = kPatchCols * sizeof(T) / 16;  // 16-byte pieces of a patch's row

// Tiles of an f32 matrix are twice as large, so one is on its way where two of 16 bits are.
constexpr int kFetchBytes = 64 << 10;
template <typename T>
constexpr int kPlaces = kFetchBytes / kTileBytes<T>;

// A patch as it lies in memory.
template <typename T>
struct Patch {
  uint4 lines[kPatchRows][kLines<T>];
};

// Division by a number known on the host: the hardware has none for integers, and every thread
// divides. Exact below 2^31 (Granlund and Montgomery, "Division by invariant integers", 1994).
struct Divider {
  uint32_t divisor, multiplier, shift;

  explicit Divider(uint32_t d) : divisor(d), multiplier(0), shift(0) {
    while (shift < 31 && (uint32_t{1} << shift) < d) ++shift;
    if (d != 0) multiplier = static_cast<uint32_t>(((uint64_t{1} << 32 << shift) + d - 1) / d);
  }
  __device__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

// Tiles are counted row by row.
struct Grid {
  uint32_t tiles;
  Divider across;
  bool aligned;  // every row of x begins on a 16-byte boundary
};

struct Place {
  uint32_t down, across;  // of the tile, counted in tiles
  int64_t row0, col0;     // of its first element
  int64_t row, col;       // of this thread's patch
  bool interior;          // the tile has no padding, and its rows are aligned
};

__device__ inline Place place_of(const Quantize& q, const Grid& grid, uint32_t tile) {
  const uint32_t down = grid.across.divide(tile), across = tile - down * grid.across.divisor;
  const int64_t row0 = static_cast<int64_t>(down) * kTile;
  const int64_t col0 = static_cast<int64_t>(across) * kTile;
  return {down,
          across,
          row0,
          col0,
          row0 + threadIdx.x / kPatchesAcross * kPatchRows,
          col0 + threadIdx.x % kPatchesAcross * kPatchCols,
          grid.aligned && row0 + kTile <= q.rows && col0 + kTile <= q.cols};
}

__device__ inline bool is_whole_line(const Quantize& q, const Grid& grid, int64_t row,
                                     int64_t col) {
  return grid.aligned && col + kPatchCols <= q.cols && row < q.rows;
}

template <typename T>
__device__ const T* element(const Quantize& q, int64_t row, int64_t col) {
  return static_cast<const T*>(q.x) + row * q.cols + col;
}

// Eight columns of a row where they are not all there or not aligned; zero outside.
template <typename T>
__device__ void load_ragged(const Quantize& q, int64_t row, int64_t col,
                            uint4 (&lines)[kLines<T>]) {
  alignas(16) T values[kPatchCols] = {};
#pragma unroll
  for (int j = 0; j < kPatchCols; ++j) {
    if (row < q.rows && col + j < q.cols) values[j] = *element<T>(q, row, col + j);
  }
#pragma unroll
  for (int i = 0; i < kLines<T>; ++i) lines[i] = reinterpret_cast<const uint4*>(values)[i];
}

// A thread's patch, straight into registers.
template <typename T>
__device__ Patch<T> load_patch(const Quantize& q, const Grid& grid, const Place& at) {
  Patch<T> patch;
  if (usually(at.interior)) {
    const T* row = element<T>(q, at.row, at.col);
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r, row += q.cols) {
#pragma unroll
      for (int i = 0; i < kLines<T>; ++i) {
        patch.lines[r][i] = __ldg(reinterpret_cast<const uint4*>(row) + i);
      }
    }
    return patch;
  }
  // At the edge, where all tiles of a matrix of few rows are.
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    if (is_whole_line(q, grid, at.row + r, at.col)) {
      const uint4* line = reinterpret_cast<const uint4*>(element<T>(q, at.row + r, at.col));
#pragma unroll
      for (int i = 0; i < kLines<T>; ++i) patch.lines[r][i] = __ldg(line + i);
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

// Begin to copy this thread's patch of `tile` into `place`; the caller commits. An f32 thread reads
// halves of sectors, and its next line the others: by way of L1 a sector comes once.
template <typename T>
__device__ void fetch(const Quantize& q, const Grid& grid, uint32_t tile, uint4* place) {
  constexpr bool kByL1 = kLines<T> > 1;
  const Place at = place_of(q, grid, tile);
  if (usually(at.interior)) {
    const T* row = element<T>(q, at.row, at.col);
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r, row += q.cols) {
#pragma unroll
      for (int i = 0; i < kLines<T>; ++i) {
        copy_async<kByL1>(line_in<T>(place, r, i), reinterpret_cast<const uint4*>(row) + i);
      }
    }
    return;
  }
#pragma unroll 1
  for (int r = 0; r < kPatchRows; ++r) {
    const bool whole = is_whole_line(q, grid, at.row + r, at.col);
    uint4 lines[kLines<T>];
    if (!whole) load_ragged<T>(q, at.row + r, at.col, lines);
#pragma unroll
    for (int i = 0; i < kLines<T>; ++i) {
      const T* from = element<T>(q, at.row + r, at.col);
      if (whole) {
        copy_async<kByL1>(line_in<T>(place, r, i), reinterpret_cast<const uint4*>(from) + i);
      } else {
        *line_in<T>(place, r, i) = lines[i];
      }
    }
  }
}

// This thread's patch of the tile in `place`.
template <typename T>
__device__ Patch<T> patch_in(uint4* place) {
  Patch<T> patch;
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
#pragma unroll
    for (int i = 0; i < kLines<T>; ++i) patch.lines[r][i] = *line_in<T>(place, r, i);
  }
  return patch;
}

// The larger of `largest` and of every magnitude in a patch.
template <typename T>
__device__ uint32_t add_patch(uint32_t largest, const Patch<T>& patch) {
#pragma unroll
  for (int l = 0; l < kPatchRows * kLines<T>; ++l) {
    largest = add_magnitudes<T>(largest, patch.lines[l / kLines<T>][l % kLines<T>]);
  }
  return largest;
}

// Wait until all but the latest `kOnTheirWay` commits of this thread have arrived.
template <int kOnTheirWay>
__device__ void wait_for_copies() {
  __pipeline_wait_prior(kOnTheirWay);
  asm volatile("" ::: "memory");  // the wait alone does not keep the reads behind it
}
__device__ inline void receive_all() { wait_for_copies<0>(); }

// What arrived in `place`, when all but the latest kPlaces - 1 commits of this thread have.
template <typename T>
__device__ Patch<T> receive(uint4* place) {
  wait_for_copies<kPlaces<T> - 1>();
  return patch_in<T>(place);
}

// The bytes of four columns that are not padding, which is zero whatever the scale: 0 * NaN is not.
__device__ inline uint32_t inside(int64_t row, int64_t col, int64_t rows, int64_t cols) {
  const int64_t count = row < rows ? cols - col : 0;
  return count >= 4 ? 0xffffffffu : count <= 0 ? 0u : (1u << 8 * count) - 1;
}

// Eight columns of a row in FP8; `scaled` gives what is cast, of a value and its place among them.
// kInterior: none of them is padding.
template <typename T, Fp8Type kType, bool kInterior, typename Scaled>
__device__ uint2 cast_line(const Quantize& q, const uint4 (&lines)[kLines<T>], int64_t row,
                           int64_t col, const Scaled& scaled) {
  const T* values = reinterpret_cast<const T*>(lines);
  const auto two = [&](int j) -> uint32_t {
    const float2 v = make_float2(scaled(real(values[j]), j), scaled(real(values[j + 1]), j + 1));
    return __nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, Fp8<kType>::kKind);
  };
  uint32_t fp8[kPatchCols / 4];
#pragma unroll
  for (int j = 0; j < kPatchCols; j += 4) {
    const uint32_t low = two(j), high = two(j + 2);
    fp8[j / 4] = low | high << 16;
    if constexpr (!kInterior) fp8[j / 4] &= inside(row, col + j, q.rows, q.cols);
  }
  return make_uint2(fp8[0], fp8[1]);
}

// The word of column `col` that holds rows 4 * word ... 4 * word + 3, moved by an XOR so that a
// warp's writes (columns 8 apart, two neighbouring words) hit 32 different banks.
__device__ inline int shared_word(int col, int word) {
  return col * kWords + (word ^ (col / 8 * 2));
}

// Put the columns of a patch in FP8 into `transpose`.
__device__ inline void put_columns(const uint2 (&fp8)[kPatchRows], uint32_t* transpose) {
  const int across = threadIdx.x % kPatchesAcross, word = threadIdx.x / kPatchesAcross;
#pragma unroll
  for (int j = 0; j < kPatchCols; ++j) {
    const uint32_t take = 0x40u | j % 4 | (j % 4) << 4;  // byte j of two words, side by side
    const auto four = [&](int r) { return j < 4 ? fp8[r].x : fp8[r].y; };
    const uint32_t low = __byte_perm(four(0), four(1), take);
    const uint32_t high = __byte_perm(four(2), four(3), take);
    transpose[shared_word(across * kPatchCols + j, word)] = __byte_perm(low, high, 0x5410);
  }
}

// Cast a patch; store its rows, and put its columns into `transpose`. `scales`: see scales.cuh.
template <typename T, Fp8Type kType, bool kInterior, typename Scales>
__device__ void cast_patch(const Quantize& q, const Patch<T>& patch, const Place& at,
                           const Scales& scales, uint32_t* transpose) {
  const int64_t padded_rows = padded(q.rows), padded_cols = padded(q.cols);
  uint2 fp8[kPatchRows];
  uint8_t* to = static_cast<uint8_t*>(q.data) + at.row * padded_cols + at.col;
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r, to += padded_cols) {
    if (!Scales::kSameBytes && q.data == nullptr) break;
    fp8[r] = cast_line<T, kType, kInterior>(
        q, patch.lines[r], at.row + r, at.col,
        [&](float x, int j) { return scales.row_major(x, r, j); });
    const bool there = kInterior || (at.row + r < padded_rows && at.col < padded_cols);
    if (q.data != nullptr && there) *reinterpret_cast<uint2*>(to) = fp8[r];
  }
  if (q.data_t == nullptr) return;
  if constexpr (!Scales::kSameBytes) {
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      fp8[r] = cast_line<T, kType, kInterior>(
          q, patch.lines[r], at.row + r, at.col,
          [&](float x, int j) { return scales.transposed(x, r, j); });
    }
  }
  put_columns(fp8, transpose);
}

// Store the columns of a whole tile, which `transpose` holds, as rows of data_t.
template <bool kInterior>
__device__ void store_columns(const Quantize& q, const Place& at, const uint32_t* transpose) {
  const int64_t padded_rows = padded(q.rows), padded_cols = padded(q.cols);
  constexpr int kPieces = kTile / 16;  // 16-byte pieces of a transposed row
  constexpr int kStep = kThreads / kPieces;
  const int piece = threadIdx.x % kPieces;
  const int64_t row = at.row0 + piece * 16;
  uint8_t* to = static_cast<uint8_t*>(q.data_t) +
                (at.col0 + threadIdx.x / kPieces) * padded_rows + row;
#pragma unroll
  for (int c = 0; c < kTile; c += kStep, to += kStep * padded_rows) {
    const int col = c + threadIdx.x / kPieces;
    if (!kInterior && (at.col0 + col >= padded_cols || row >= padded_rows)) continue;
    // The XOR is even: pairs of words stay together, their order within the piece may not.
    const uint2 low = *reinterpret_cast<const uint2*>(transpose + shared_word(col, piece * 4));
    const uint2 high = *reinterpret_cast<const uint2*>(transpose + shared_word(col, piece * 4 + 2));
    // Past the cache: of x and w, a cast's other copy is needed now, and this one in backward.
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(low.x, low.y, high.x, high.y));
  }
}

}  // namespace fp8lt
