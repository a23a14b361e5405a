#include "shared_input.h"

#include <ATen/core/DimVector.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "memory.h"

namespace fp8lt {
namespace {

struct SharedInput {
  // Weak: they are not kept alive, but their addresses are not given to others.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> x;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint64_t made_by;
  int64_t version, offset;
  at::DimVector sizes, strides;
  cudaStream_t stream;
  Recipe::Kind kind;
  at::ScalarType dtype;
  bool power_of_two;
  Quantized quantized;

  SharedInput(const at::Tensor& x, uint64_t made_by, cudaStream_t stream, const Recipe& recipe)
      : x(x.getIntrusivePtr()),
        storage(x.storage().getWeakStorageImpl()),
        made_by(made_by),
        version(x._version()),
        offset(x.storage_offset()),
        sizes(x.sizes()),
        strides(x.strides()),
        stream(stream),
        kind(recipe.kind),
        dtype(recipe.forward_fp8),
        power_of_two(recipe.power_of_two) {}

  bool is_same(const SharedInput& other) const {
    return x == other.x && storage == other.storage && made_by == other.made_by &&
           version == other.version && offset == other.offset && sizes == other.sizes &&
           strides == other.strides && stream == other.stream && kind == other.kind &&
           dtype == other.dtype && power_of_two == other.power_of_two;
  }
};

// One for the process: backward runs on other threads than forward, and must be able to let go.
struct Last {
  std::mutex mutex;
  std::optional<SharedInput> input;
};

Last& last() {
  static auto* const one = new Last;  // never destroyed: the allocator may be gone at exit
  return *one;
}

}  // namespace

Quantized shared_input(const at::Tensor& x, uint64_t made_by, const Recipe& recipe,
                       c10::function_ref<Quantized()> make) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(x.get_device());
  // Inference tensors count no versions; what a capture makes is the graph's.
  if (x.is_inference() || is_capturing(stream)) return make();
  SharedInput input(x, made_by, stream, recipe);  // its version is read before x is
  {
    const std::lock_guard<std::mutex> lock(last().mutex);
    if (last().input.has_value() && last().input->is_same(input)) return last().input->quantized;
  }
  input.quantized = make();
  Quantized quantized = input.quantized;
  std::optional<SharedInput> dropped(std::move(input));  // the one before, freed after the lock
  const std::lock_guard<std::mutex> lock(last().mutex);
  dropped.swap(last().input);
  return quantized;
}

void forget_shared_input() {
  std::optional<SharedInput> dropped;  // freed after the lock
  const std::lock_guard<std::mutex> lock(last().mutex);
  dropped.swap(last().input);
}

}  // namespace fp8lt
