#include "memory.h"

#include <ATen/cuda/EmptyTensor.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "gemm.h"

namespace fp8lt {

struct Persistent {
  std::mutex mutex;
  char* pointer = nullptr;  // zeros, two pieces of kTurnBytes, and scratch memory
  bool is_odd = false;      // whether the second piece is the one that is zero
};

namespace {

constexpr size_t kKeptBytes = Workspace::kZeroBytes + 2 * Workspace::kTurnBytes;

// Scratch memory of all kernels: one per stream, for life, since streams that run side by side must
// not share it. It does not come from torch's allocator, which may be lending out the memory pool
// of a CUDA graph just now: a block kept from there would outlive the graph, or be shared with it.
Persistent& persistent_workspace(const c10::cuda::CUDAStream& stream) {
  static auto* const mutex = new std::mutex;  // never destroyed: the driver may be gone at exit
  static auto* const found = new std::map<std::pair<int, cudaStream_t>, Persistent>;
  const std::lock_guard<std::mutex> lock(*mutex);
  return (*found)[{stream.device_index(), stream.stream()}];
}

// Null where there is no memory: torch may hold it all.
char* new_workspace(cudaStream_t stream) {
  const RelaxedCapture relaxed;
  void* made = nullptr;
  if (cudaMalloc(&made, kKeptBytes + kWorkspaceBytes) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  check_cuda(cudaMemsetAsync(made, 0, kKeptBytes, stream), "cudaMemsetAsync");
  return static_cast<char*>(made);
}

// Zeros for the launches that a capture takes of a stream. These follow each other and leave zeros,
// so they share them, and nobody else does, whenever the graph runs: none needs a memset before it.
// They are kept for life, as nothing says when a graph ends: a few bytes for each capture.
class CapturedZeros {
 public:
  // Null where there is no memory.
  static void* of(int device, cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    check_cuda(cudaStreamGetCaptureInfo(stream, &status, &capture), "cudaStreamGetCaptureInfo");
    static auto* const mutex = new std::mutex;  // never destroyed, as above
    static auto* const all = new std::map<int, CapturedZeros>;
    const std::lock_guard<std::mutex> lock(*mutex);
    return (*all)[device].take({capture, stream});
  }

 private:
  using Key = std::pair<unsigned long long, cudaStream_t>;
  static constexpr size_t kBytes = Workspace::kZeroBytes, kPageBytes = 1 << 20;
  static constexpr size_t kMostKept = 1024;  // of these few belong to a capture that goes on

  void* take(const Key& key) {
    const auto found = taken_.find(key);
    if (found != taken_.end()) return found->second;
    if (left_ == 0 && !add_page()) return nullptr;
    if (taken_.size() >= kMostKept) taken_.clear();  // who comes again gets others
    void* mine = next_;
    next_ += kBytes;
    left_ -= kBytes;
    taken_.emplace(key, mine);
    return mine;
  }

  bool add_page() {
    const RelaxedCapture relaxed;
    cudaStream_t stream = nullptr;  // what is done there is in no capture
    void* page = nullptr;
    const bool done = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
                      cudaMalloc(&page, kPageBytes) == cudaSuccess &&
                      cudaMemsetAsync(page, 0, kPageBytes, stream) == cudaSuccess &&
                      cudaStreamSynchronize(stream) == cudaSuccess;
    if (stream != nullptr) cudaStreamDestroy(stream);
    if (!done) {
      cudaFree(page);
      cudaGetLastError();
      return false;
    }
    next_ = static_cast<char*>(page);
    left_ = kPageBytes;
    return true;
  }

  std::map<Key, void*> taken_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  return at::Tensor(at::detail::empty_cuda(sizes, dtype, device, std::nullopt));
}

at::Tensor aligned(const at::Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 ? t : t.clone();
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
  const bool capturing = is_capturing(stream);
  // One handle stands for a stream of each thread.
  const bool is_one = stream.stream() != cudaStreamPerThread;
  if (is_one && bytes <= kWorkspaceBytes && !capturing) {
    Persistent& mine = persistent_workspace(stream);
    lock = std::unique_lock<std::mutex>(mine.mutex);
    if (mine.pointer == nullptr) mine.pointer = new_workspace(stream);
    if (mine.pointer != nullptr) {
      persistent_ = &mine;
      zeros = mine.pointer;
      pointer = mine.pointer + kKeptBytes;
      return;
    }
  }
  const auto size = static_cast<int64_t>(kZeroBytes + bytes);
  borrowed = empty({size}, at::ScalarType::Byte, stream.device());
  pointer = static_cast<char*>(borrowed.mutable_data_ptr()) + kZeroBytes;
  if (!wants_zeros) return;
  if (capturing) zeros = CapturedZeros::of(stream.device_index(), stream);
  if (zeros == nullptr) {
    zeros = borrowed.mutable_data_ptr();
    check_cuda(cudaMemsetAsync(zeros, 0, kZeroBytes, stream), "cudaMemsetAsync");
  }
}

std::pair<void*, void*> Workspace::turn() {
  if (persistent_ == nullptr) return {nullptr, nullptr};
  char* const first = persistent_->pointer + kZeroBytes;
  char* const second = first + kTurnBytes;
  persistent_->is_odd = !persistent_->is_odd;
  return persistent_->is_odd ? std::pair<void*, void*>(first, second)
                             : std::pair<void*, void*>(second, first);
}

void Workspace::clear_turns(cudaStream_t stream) {
  if (persistent_ == nullptr) return;
  cudaMemsetAsync(persistent_->pointer + kZeroBytes, 0, 2 * kTurnBytes, stream);
}

}  // namespace fp8lt
