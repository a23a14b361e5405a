// The way from a scaling to its kernels.

#include "quantize.h"

namespace fp8lt {

size_t quantize_scratch_bytes(const Quantize& q) {
  if (q.history.state != nullptr) return delayed_scratch_bytes(q);
  switch (q.scaling) {
    case Scaling::kTensorwise: return tensorwise_scratch_bytes(q);
    case Scaling::kRowwise: return rowwise_scratch_bytes(q);
    default: return blockwise_scratch_bytes(q);
  }
}

cudaError_t quantize(const Quantize& q, cudaStream_t stream) {
  if (blocks_of(q.rows) * blocks_of(q.cols) > kMostTiles) return cudaErrorInvalidValue;
  if (q.history.state != nullptr) return quantize_delayed(q, stream);
  switch (q.scaling) {
    case Scaling::kTensorwise: return quantize_tensorwise(q, stream);
    case Scaling::kRowwise: return quantize_rowwise(q, stream);
    case Scaling::k1x128:
    case Scaling::k128x128: return quantize_blockwise(q, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fp8lt
