// A block's share of a cast: tiles, where columns matter, or rows alone.
#pragma once

#include "column_sums.cuh"
#include "scales.cuh"
#include "tiles.cuh"

namespace fp8lt {

// What a block of a cast has in shared memory.
struct Shared {
  uint4* places;        // [kFetchBytes / 16]
  uint32_t* transpose;  // [2][kTransposeBytes / 4]: one is written while the other is read
  float* sums;          // [kSumsBytes / 4], where sums are asked for
};
constexpr int kSharedBytes = kFetchBytes + 2 * kTransposeBytes;
constexpr int kSharedBytesSums = kSharedBytes + kSumsBytes;

// What a block has that holds its tiles: of 16 bits three, so that two blocks fit on a Hopper's
// multiprocessor.
constexpr int kHeldBytes = 96 << 10;
constexpr int kSharedBytesHeld = kHeldBytes + kTransposeBytes;

__device__ inline Shared shared_memory() {
  uint4* shared = dynamic_shared_memory();
  uint32_t* transpose = reinterpret_cast<uint32_t*>(shared + kFetchBytes / 16);
  return {shared, transpose, reinterpret_cast<float*>(transpose + 2 * kTransposeBytes / 4)};
}

// This block's tiles, from the last to the first.
struct Walk {
  uint32_t first, step;
  int count;

  __device__ Walk(uint32_t tiles, Share share)
      : first(tiles - 1 - share.block),
        step(share.blocks),
        count(static_cast<int>((tiles - share.block + share.blocks - 1) / share.blocks)) {}
  __device__ uint32_t tile(int i) const { return first - i * step; }
};

template <typename T>
__device__ void fetch_next(const Quantize& q, const Grid& grid, const Walk& walk, int i,
                           const Shared& shared) {
  if (i < walk.count) {
    fetch<T>(q, grid, walk.tile(i), shared.places + i % kPlaces<T> * (kTileBytes<T> / 16));
  }
  __pipeline_commit();  // also of nothing: waiting counts them
}

// Needs no scale, so it is done while that is still computed.
template <typename T>
__device__ void fetch_first(const Quantize& q, const Grid& grid, const Walk& walk,
                            const Shared& shared) {
  for (int i = 0; i < kPlaces<T>; ++i) fetch_next<T>(q, grid, walk, i, shared);
}

template <typename T, Fp8Type kType, typename Scales>
__device__ void cast_tiles(const Quantize& q, const Grid& grid, const Walk& walk,
                           const Shared& shared, float* tile_sums, Scales& scales) {
  for (int i = 0; i < walk.count; ++i) {
    uint32_t* transpose = shared.transpose + i % 2 * (kTransposeBytes / 4);
    const uint32_t tile = walk.tile(i);
    const Patch<T> patch = receive<T>(shared.places + i % kPlaces<T> * (kTileBytes<T> / 16));
    fetch_next<T>(q, grid, walk, i + kPlaces<T>, shared);
    if (i == 0) let_next_kernel_start();
    const Place at = place_of(q, grid, tile);
    scales.enter(patch, at, i);
    if (seldom(q.sums != nullptr)) {
      if constexpr (!Scales::kSynchronizes) __syncthreads();  // the sums of the last tile were read
      sum_patch(patch, shared.sums);
    }
    if (usually(at.interior)) {
      cast_patch<T, kType, true>(q, patch, at, scales, transpose);
    } else {
      cast_patch<T, kType, false>(q, patch, at, scales, transpose);
    }
    if (i + 1 < walk.count) scales.prepare(walk.tile(i + 1), i + 1);
    __syncthreads();
    if (usually(at.interior)) {
      if (q.data_t != nullptr) store_columns<true>(q, at, transpose);
    } else if (q.data_t != nullptr) {
      store_columns<false>(q, at, transpose);
    }
    if (seldom(q.sums != nullptr)) sum_tile(tile, shared.sums, tile_sums);
  }
}

// The row-major copy alone, which needs no tiles: a thread takes eight columns, a few times a step.
template <typename T>
struct RowSteps {
  static constexpr int kUnroll = 4 / kLines<T>;  // loads on the way at the same time
  using Lines = uint4[kUnroll][kLines<T>];

  Quantize q;
  bool aligned, flat;
  int64_t across, count;  // eights of columns, in a row and altogether

  __device__ RowSteps(const Quantize& all, const Grid& grid)
      : q(all),
        aligned(grid.aligned),
        flat(q.cols % kPad == 0),
        across(padded(q.cols) / kPatchCols),
        count(padded(q.rows) * across) {
    if (flat) {  // then the rows are one, with all padding at its end
      q.cols *= q.rows;
      q.rows = 1;
    }
  }

  __device__ int64_t steps() const { return (count + kStep - 1) / kStep; }

  __device__ void load(int64_t step, Lines& lines) const {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = row(step, u), col = this->col(step, u);
      if (aligned && at < q.rows && col + kPatchCols <= q.cols) {
        const uint4* from = reinterpret_cast<const uint4*>(element<T>(q, at, col));
#pragma unroll
        for (int l = 0; l < kLines<T>; ++l) lines[u][l] = __ldg(from + l);
      } else {
        load_ragged<T>(q, at, col, lines[u]);
      }
    }
  }

  template <Fp8Type kType>
  __device__ void store(int64_t step, const Lines& lines, float scale) const {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (index(step, u) >= count) break;
      const int64_t at = row(step, u), col = this->col(step, u);
      constexpr bool kInterior = false;
      const uint2 fp8 = cast_line<T, kType, kInterior>(q, lines[u], at, col,
                                                       [&](float x, int) { return x * scale; });
      static_cast<uint2*>(q.data)[index(step, u)] = fp8;
    }
  }

 private:
  static constexpr int64_t kStep = kThreads * kUnroll;

  __device__ int64_t index(int64_t step, int u) const {
    return step * kStep + u * kThreads + threadIdx.x;
  }
  __device__ int64_t row(int64_t step, int u) const { return flat ? 0 : index(step, u) / across; }
  __device__ int64_t col(int64_t step, int u) const {
    return (index(step, u) - row(step, u) * across) * kPatchCols;
  }
};

template <typename T, Fp8Type kType>
__device__ void cast_rows(const Quantize& q, const Grid& grid, Share share,
                          float scale) {
  const RowSteps<T> rows(q, grid);
  for (int64_t step = rows.steps() - 1 - share.block; step >= 0; step -= share.blocks) {
    typename RowSteps<T>::Lines lines;
    rows.load(step, lines);
    rows.template store<kType>(step, lines, scale);
  }
}

__device__ inline void write_scale_inv(const Quantize& q, Share share, float scale) {
  const float scale_inv = __frcp_rn(scale);
  const int64_t threads = static_cast<int64_t>(share.blocks) * kThreads;
  for (int64_t i = static_cast<int64_t>(share.block) * kThreads + threadIdx.x; i < q.scale_count;
       i += threads) {
    q.scale_inv[i] = scale_inv;
  }
}

__host__ __device__ inline bool needs_tiles(const Quantize& q) {
  return q.data_t != nullptr || q.sums != nullptr;
}

}  // namespace fp8lt
