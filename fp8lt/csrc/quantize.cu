// Tensorwise quantise: amax, then scale, saturate and cast into both layouts.
//
//   scale = FP8_MAX / max(amax, 1e-12)    data[r, c] = data_t[c, r] = sat(x[r, c] * scale)
//
// Two passes over x. The second walks the tiles in reverse, so that it begins with what the first
// left in L2, and stores past the cache, so that its output does not push x out of there.

#include "quantize.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>

namespace fp8lt {
namespace {

constexpr float kEps = 1e-12f;  // an all-zero tensor gets a large finite scale, not inf

// ---------------------------------------------------------------------------------------- amax
// Magnitudes are compared as integers: with the sign bit cleared, the bits of a float order as its
// value does, and a NaN is larger than everything. So NaN survives, and there is no rounding.

template <typename T>
struct Bits;
template <>
struct Bits<float> {
  static constexpr uint32_t kMagnitude = 0x7fffffffu;
  static __device__ uint32_t max(uint32_t a, uint32_t b) { return ::max(a, b); }
  static __device__ float widest(uint32_t a) { return __uint_as_float(a); }
};
template <>
struct Bits<__nv_bfloat16> {  // two to a word
  static constexpr uint32_t kMagnitude = 0x7fff7fffu;
  static __device__ uint32_t max(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
  static __device__ float widest(uint32_t a) {
    return __uint_as_float(::max(a & 0xffffu, a >> 16) << 16);
  }
};
template <>
struct Bits<__half> {
  static constexpr uint32_t kMagnitude = 0x7fff7fffu;
  static __device__ uint32_t max(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
  static __device__ float widest(uint32_t a) {
    const uint16_t bits = static_cast<uint16_t>(::max(a & 0xffffu, a >> 16));
    return __half2float(__ushort_as_half(bits));
  }
};

template <typename T>
__device__ uint32_t magnitude(const T& value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits & Bits<T>::kMagnitude;
}

constexpr int kAmaxThreads = 512;
constexpr int kAmaxUnroll = 4;

template <typename T>
__global__ void __launch_bounds__(kAmaxThreads)
    amax_kernel(const T* __restrict__ x, int64_t numel, float* __restrict__ amax) {
  constexpr int kVec = 16 / sizeof(T);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kAmaxThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kAmaxThreads;
  uint32_t largest = 0;

  // A view may begin between two 16-byte lines: read up to the first line one by one.
  const int64_t lead = std::min<int64_t>(
      numel, (16 - reinterpret_cast<uintptr_t>(x) % 16) % 16 / sizeof(T));
  const int64_t vectors = (numel - lead) / kVec;
  const uint4* lines = reinterpret_cast<const uint4*>(x + lead);
  for (int64_t i = thread; i < vectors; i += threads * kAmaxUnroll) {
    uint4 v[kAmaxUnroll];
#pragma unroll
    for (int u = 0; u < kAmaxUnroll; ++u) {
      const int64_t at = i + u * threads;
      v[u] = at < vectors ? lines[at] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kAmaxUnroll; ++u) {
      constexpr uint32_t mask = Bits<T>::kMagnitude;
      largest = Bits<T>::max(largest, Bits<T>::max(v[u].x & mask, v[u].y & mask));
      largest = Bits<T>::max(largest, Bits<T>::max(v[u].z & mask, v[u].w & mask));
    }
  }
  for (int64_t i = thread; i < lead; i += threads) {
    largest = Bits<T>::max(largest, magnitude(x[i]));
  }
  for (int64_t i = lead + vectors * kVec + thread; i < numel; i += threads) {
    largest = Bits<T>::max(largest, magnitude(x[i]));
  }

  const uint32_t bits = __float_as_uint(Bits<T>::widest(largest));  // magnitudes: still ordered
  const uint32_t warp_largest = __reduce_max_sync(0xffffffffu, bits);
  __shared__ uint32_t block_largest;
  if (threadIdx.x == 0) block_largest = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicMax(&block_largest, warp_largest);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<uint32_t*>(amax), block_largest);
}

// ---------------------------------------------------------------------------------------- cast

template <Fp8Type kType>
struct Fp8;
template <>
struct Fp8<Fp8Type::kE4M3> {
  static constexpr float kMax = 448.0f;
  static constexpr __nv_fp8_interpretation_t kKind = __NV_E4M3;
};
template <>
struct Fp8<Fp8Type::kE5M2> {
  static constexpr float kMax = 57344.0f;
  static constexpr __nv_fp8_interpretation_t kKind = __NV_E5M2;
};

__device__ float real(float value) { return value; }
__device__ float real(__half value) { return __half2float(value); }
__device__ float real(__nv_bfloat16 value) { return __bfloat162float(value); }

// A tile is 128 x 128. A thread owns patches of 4 rows x 8 columns: the 8 columns are one 8-byte
// store of the row-major copy, the 4 rows one 4-byte word of the transposed copy, which goes
// through shared memory so that its rows leave as whole 128-byte lines too.
constexpr int kTile = 128;
constexpr int kCastThreads = 256;
constexpr int kPatchRows = 4;
constexpr int kPatchCols = 8;
constexpr int kPatchesAcross = kTile / kPatchCols;                         // 16
constexpr int kPatchesDownPerPass = kCastThreads / kPatchesAcross;         // 16
constexpr int kPasses = kTile / kPatchRows / kPatchesDownPerPass;          // 2
constexpr int kWords = kTile / 4;                                          // of a transposed row

// The word of column `col` that holds rows 4 * word ... 4 * word + 3, moved by an XOR so that a
// warp's writes (columns 8 apart, two neighbouring words) hit 32 different banks.
__device__ int shared_word(int col, int word) { return col * kWords + (word ^ (col / 8 * 2)); }

template <typename T, bool kFast>
__device__ void load_patch_row(const T* __restrict__ x, int64_t row, int64_t col, int64_t rows,
                               int64_t cols, float (&out)[kPatchCols]) {
  if constexpr (kFast) {  // whole tile inside, every row 16-byte aligned
    alignas(16) T values[kPatchCols];
    const uint4* from = reinterpret_cast<const uint4*>(x + row * cols + col);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(values) / 16); ++i) {
      reinterpret_cast<uint4*>(values)[i] = __ldg(from + i);
    }
#pragma unroll
    for (int j = 0; j < kPatchCols; ++j) out[j] = real(values[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kPatchCols; ++j) {
      out[j] = row < rows && col + j < cols ? real(x[row * cols + col + j]) : 0.0f;
    }
  }
}

// The bytes of four columns that are not padding, which is zero whatever the scale: 0 * NaN is not.
__device__ uint32_t inside(int64_t row, int64_t col, int64_t rows, int64_t cols) {
  const int64_t count = row < rows ? cols - col : 0;
  return count >= 4 ? 0xffffffffu : count <= 0 ? 0u : (1u << 8 * count) - 1;
}

template <typename T, Fp8Type kType, bool kFast>
__device__ void cast_tile(const QuantizeTensorwise& q, int64_t row0, int64_t col0, float scale,
                          uint32_t* shared) {
  const T* x = static_cast<const T*>(q.x);
  const int64_t padded_rows = padded(q.rows), padded_cols = padded(q.cols);
  const int across = threadIdx.x % kPatchesAcross, down = threadIdx.x / kPatchesAcross;

#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int word = pass * kPatchesDownPerPass + down;
    const int64_t row = row0 + word * kPatchRows, col = col0 + across * kPatchCols;
    float patch[kPatchRows][kPatchCols];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      load_patch_row<T, kFast>(x, row + r, col, q.rows, q.cols, patch[r]);
    }
    uint32_t fp8[kPatchRows][kPatchCols / 4];  // four columns to a word
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
#pragma unroll
      for (int j = 0; j < kPatchCols; j += 4) {
        const uint32_t low = __nv_cvt_float2_to_fp8x2(
            make_float2(patch[r][j] * scale, patch[r][j + 1] * scale), __NV_SATFINITE,
            Fp8<kType>::kKind);
        const uint32_t high = __nv_cvt_float2_to_fp8x2(
            make_float2(patch[r][j + 2] * scale, patch[r][j + 3] * scale), __NV_SATFINITE,
            Fp8<kType>::kKind);
        fp8[r][j / 4] = low | high << 16;
        if constexpr (!kFast) fp8[r][j / 4] &= inside(row + r, col + j, q.rows, q.cols);
      }
      if (q.data != nullptr && row + r < padded_rows && col < padded_cols) {
        uint8_t* to = static_cast<uint8_t*>(q.data) + (row + r) * padded_cols + col;
        __stcs(reinterpret_cast<uint2*>(to), make_uint2(fp8[r][0], fp8[r][1]));
      }
    }
    if (q.data_t != nullptr) {
#pragma unroll
      for (int j = 0; j < kPatchCols; ++j) {
        const uint32_t take = 0x40u | j % 4 | (j % 4) << 4;  // byte j of two words, side by side
        const uint32_t low = __byte_perm(fp8[0][j / 4], fp8[1][j / 4], take);
        const uint32_t high = __byte_perm(fp8[2][j / 4], fp8[3][j / 4], take);
        shared[shared_word(across * kPatchCols + j, word)] = __byte_perm(low, high, 0x5410);
      }
    }
  }
  if (q.data_t == nullptr) return;

  __syncthreads();
  constexpr int kRowLines = kTile / 16;  // 16-byte pieces of a transposed row
#pragma unroll
  for (int i = threadIdx.x; i < kTile * kRowLines; i += kCastThreads) {
    const int c = i / kRowLines, piece = i % kRowLines;
    const int64_t col = col0 + c, row = row0 + piece * 16;
    if (col >= padded_cols || row >= padded_rows) continue;
    // The XOR is even: pairs of words stay together, their order within the piece may not.
    const uint2 low = *reinterpret_cast<const uint2*>(shared + shared_word(c, piece * 4));
    const uint2 high = *reinterpret_cast<const uint2*>(shared + shared_word(c, piece * 4 + 2));
    uint8_t* to = static_cast<uint8_t*>(q.data_t) + col * padded_rows + row;
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(low.x, low.y, high.x, high.y));
  }
}

template <typename T, Fp8Type kType>
__global__ void __launch_bounds__(kCastThreads)
    cast_kernel(const QuantizeTensorwise q, int64_t tiles_across, bool aligned) {
  __shared__ alignas(16) uint32_t shared[kTile * kWords];
  const float amax = *q.amax;
  // `fmaxf` would drop a NaN, fast division the last bit that makes scales equal everywhere.
  const float scale = __fdiv_rn(Fp8<kType>::kMax, amax < kEps ? kEps : amax);
  if (blockIdx.x == 0 && threadIdx.x == 0) *q.scale_inv = __frcp_rn(scale);

  const int64_t tile = static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x;
  const int64_t row0 = tile / tiles_across * kTile, col0 = tile % tiles_across * kTile;
  if (aligned && row0 + kTile <= q.rows && col0 + kTile <= q.cols) {
    cast_tile<T, kType, true>(q, row0, col0, scale, shared);
  } else {
    cast_tile<T, kType, false>(q, row0, col0, scale, shared);
  }
}

template <typename T>
cudaError_t launch(const QuantizeTensorwise& q, cudaStream_t stream) {
  const int64_t numel = q.rows * q.cols;
  cudaError_t status = cudaMemsetAsync(q.amax, 0, sizeof(float), stream);
  if (status != cudaSuccess) return status;
  if (numel > 0) {
    constexpr int64_t kMaxBlocks = 132 * 4;  // a full wave of a Hopper
    constexpr int64_t kPerBlock = kAmaxThreads * kAmaxUnroll * (16 / sizeof(T));
    const int64_t blocks = std::min(kMaxBlocks, (numel + kPerBlock - 1) / kPerBlock);
    amax_kernel<T><<<static_cast<unsigned>(blocks), kAmaxThreads, 0, stream>>>(
        static_cast<const T*>(q.x), numel, q.amax);
    status = cudaGetLastError();
    if (status != cudaSuccess) return status;
  }
  // One tile even of an empty matrix: its block writes scale_inv.
  const int64_t tiles_down = std::max<int64_t>(1, (q.rows + kTile - 1) / kTile);
  const int64_t tiles_across = std::max<int64_t>(1, (q.cols + kTile - 1) / kTile);
  const bool aligned =
      reinterpret_cast<uintptr_t>(q.x) % 16 == 0 && q.cols * sizeof(T) % 16 == 0;
  const dim3 grid(static_cast<unsigned>(tiles_down * tiles_across));
  if (q.fp8 == Fp8Type::kE4M3) {
    cast_kernel<T, Fp8Type::kE4M3><<<grid, kCastThreads, 0, stream>>>(q, tiles_across, aligned);
  } else {
    cast_kernel<T, Fp8Type::kE5M2><<<grid, kCastThreads, 0, stream>>>(q, tiles_across, aligned);
  }
  return cudaGetLastError();
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
