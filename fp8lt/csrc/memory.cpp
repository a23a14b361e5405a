#include "memory.h"

#include <ATen/cuda/EmptyTensor.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "gemm.h"

namespace fp8lt {
namespace {

struct Persistent {
  std::mutex mutex;
  void* pointer = nullptr;
};

// Scratch memory of all kernels: one per stream, for life, since streams that run side by side must
// not share it. It does not come from torch's allocator, which may be lending out the memory pool
// of a CUDA graph just now: a block kept from there would outlive the graph, or be shared with it.
Persistent& persistent_workspace(const c10::cuda::CUDAStream& stream) {
  static auto* const mutex = new std::mutex;  // never destroyed: the driver may be gone at exit
  static auto* const found = new std::map<std::pair<int, cudaStream_t>, Persistent>;
  const std::lock_guard<std::mutex> lock(*mutex);
  return (*found)[{stream.device_index(), stream.stream()}];
}

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  return at::Tensor(at::detail::empty_cuda(sizes, dtype, device, std::nullopt));
}

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  TORCH_CHECK(false, "fp8lt: ", what, " failed: ", cudaGetErrorString(status));
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

RelaxedCapture::RelaxedCapture() {
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
}
RelaxedCapture::~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

Workspace::Workspace(const c10::cuda::CUDAStream& stream, size_t bytes, bool wants_zeros) {
  const auto zero = [&] {
    check_cuda(cudaMemsetAsync(zeros, 0, kZeroBytes, stream), "cudaMemsetAsync");
  };
  // One handle stands for a stream of each thread.
  const bool is_one = stream.stream() != cudaStreamPerThread;
  if (is_one && bytes <= kWorkspaceBytes && !is_capturing(stream)) {
    Persistent& mine = persistent_workspace(stream);
    lock = std::unique_lock<std::mutex>(mine.mutex);
    zeros = mine.pointer;
    if (zeros == nullptr) {
      const RelaxedCapture relaxed;
      if (cudaMalloc(&zeros, kZeroBytes + kWorkspaceBytes) == cudaSuccess) {
        zero();
        mine.pointer = zeros;
      } else {
        zeros = nullptr;
        cudaGetLastError();  // torch may hold all memory: then it is asked
      }
    }
  }
  if (zeros == nullptr) {
    const auto size = static_cast<int64_t>(kZeroBytes + bytes);
    borrowed = empty({size}, at::ScalarType::Byte, stream.device());
    zeros = borrowed.mutable_data_ptr();
    if (wants_zeros) zero();
  }
  pointer = static_cast<char*>(zeros) + kZeroBytes;
}

}  // namespace fp8lt
