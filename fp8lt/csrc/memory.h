// Device memory: outputs of operators, and scratch memory of kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>
#include <mutex>
#include <utility>

namespace fp8lt {

// at::empty without its way through the dispatcher.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

// `t`, or a copy of it where that is not 16-byte aligned: views may be anywhere. cuBLASLt refuses
// other pointers, those of scalars too.
at::Tensor aligned(const at::Tensor& t);

// One allocation, cut into tensors.
class Block {
 public:
  Block(size_t bytes, c10::Device device)
      : whole_(empty({static_cast<int64_t>(bytes)}, at::ScalarType::Byte, device)) {}

  // What a tensor takes of a block: its bytes, and those until the next may begin.
  static size_t bytes_of(int64_t elements, at::ScalarType dtype) {
    return (elements * at::elementSize(dtype) + kAlignment - 1) / kAlignment * kAlignment;
  }

  at::Tensor take(at::IntArrayRef sizes, at::ScalarType dtype) {
    at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(whole_.storage()), whole_.key_set(), c10::scalarTypeToTypeMeta(dtype));
    auto* impl = t.unsafeGetTensorImpl();
    impl->set_storage_offset(static_cast<int64_t>(used_ / at::elementSize(dtype)));
    impl->set_sizes_contiguous(sizes);
    used_ += bytes_of(impl->numel(), dtype);
    return t;
  }

 private:
  static constexpr size_t kAlignment = 256;  // what torch's allocator gives, too
  at::Tensor whole_;
  size_t used_ = 0;
};

// Throws c10::Error with CUDA's reason; clears it, or torch's next check would report it again.
void check_cuda(cudaError_t status, const char* what);

struct Persistent;  // what a stream has for life

// Scratch memory for launches on a stream, ours until this is destroyed: what is launched after
// that may have the same. So threads that share a stream wait for each other.
struct Workspace {
  void* pointer = nullptr;
  void* zeros = nullptr;  // kZeroBytes of them, where they are wanted: a launch leaves them so
  std::unique_lock<std::mutex> lock;
  at::Tensor borrowed;  // inside a capture, from the graph's pool; or of more than usual

  static constexpr size_t kZeroBytes = 256, kTurnBytes = 256 << 10;

  Workspace(const c10::cuda::CUDAStream& stream, size_t bytes, bool wants_zeros = false);

  // Two more pieces of kTurnBytes, which change places from call to call: zeros, which the launch
  // may write, and what it must leave as zeros for the next. Null where that cannot be kept up.
  std::pair<void*, void*> turn();

  // After a launch that failed: nobody knows what it left.
  void clear_turns(cudaStream_t stream);

 private:
  Persistent* persistent_ = nullptr;
};

bool is_capturing(cudaStream_t stream);

// While it lives, what this thread does cannot break another thread's capture of a CUDA graph.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace fp8lt
