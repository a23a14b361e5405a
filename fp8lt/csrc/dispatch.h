// Who would hear of an operator: where that is nobody, it need not go through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/DispatchKeyExtractor.h>
#include <ATen/record_function.h>

namespace fp8lt {

// The key under which the dispatcher would run an operator of ours with these tensors: a plain
// device's or its autograd's, or that of a mode, a subclass, a transform. Undefined where a
// profiler listens, which hears of all.
template <typename... Tensors>
c10::DispatchKey dispatch_key(const Tensors&... tensors) {
  if (at::hasGlobalCallbacks() || at::hasThreadLocalCallbacks()) return c10::DispatchKey::Undefined;
  static const auto heeded = c10::DispatchKeySet(c10::DispatchKeySet::FULL) -
                             c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) -
                             c10::DispatchKeySet(c10::DispatchKey::BackendSelect) -
                             c10::autocast_dispatch_keyset;
  return c10::impl::computeDispatchKeySet((tensors.key_set() | ...), heeded)
      .highestPriorityTypeId();
}

// Whether the dispatcher would just call the CUDA kernel of an operator. Below autograd.
template <typename... Tensors>
bool is_direct(const Tensors&... tensors) {
  return dispatch_key(tensors...) == c10::DispatchKey::CUDA;
}

}  // namespace fp8lt
