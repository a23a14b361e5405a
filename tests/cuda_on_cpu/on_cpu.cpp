// Fibers, the runtime's answers, and the function that the tests call.

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

#include "intrinsics.cuh"
#include "quantize.h"

dim3 threadIdx, blockIdx, gridDim;

namespace on_cpu {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr size_t kStackBytes = 128 << 10;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool ended;
};

// Where threads wait for `count` of them.
struct Barrier {
  int arrived = 0, generation = 0;
};

Fiber fibers[kThreads];
ucontext_t scheduler;
Barrier block, warps[kWarps];
uint32_t slots[kThreads];  // what a shuffle gives away
const std::function<void()>* body;
void* shared;
std::mt19937 random_order;

int me() { return static_cast<int>(threadIdx.x); }

void wait(Barrier& barrier, int count) {
  const int generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) swapcontext(&fibers[me()].context, &scheduler);
}

void start() {
  (*body)();
  fibers[me()].ended = true;
}

void run_block() {
  std::vector<int> order(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    Fiber& fiber = fibers[order[i] = i];
    fiber.ended = false;
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, start, 0);
  }
  while (!order.empty()) {
    std::shuffle(order.begin(), order.end(), random_order);
    for (const int i : order) {
      threadIdx = dim3(i);
      swapcontext(&scheduler, &fibers[i].context);
    }
    const auto ended = [](int i) { return fibers[i].ended; };
    const auto first = std::remove_if(order.begin(), order.end(), ended);
    // No kernel lets threads go before a barrier of the others: they would wait for ever.
    if (first != order.begin() && first != order.end() && block.arrived > 0) {
      std::fprintf(stderr, "threads ended while others wait for them\n");
      std::abort();
    }
    order.erase(first, order.end());
  }
}

}  // namespace

void* shared_memory() { return shared; }
void block_barrier() { wait(block, kThreads); }

uint32_t shuffle(uint32_t value, int lane) {
  const int warp = me() / 32;
  slots[me()] = value;
  wait(warps[warp], 32);
  const uint32_t other = slots[warp * 32 + lane];
  wait(warps[warp], 32);
  return other;
}

void run_grid(unsigned blocks, size_t shared_bytes, const std::function<void()>& kernel) {
  constexpr int kGarbage = 0x5a;  // nobody promises zeros
  std::vector<uint4> memory(shared_bytes / sizeof(uint4) + 1);
  std::memset(memory.data(), kGarbage, memory.size() * sizeof(uint4));
  shared = memory.data();
  body = &kernel;
  gridDim = dim3(blocks);
  for (unsigned b = 0; b < blocks; ++b) {
    blockIdx = dim3(b);
    run_block();
  }
}

}  // namespace on_cpu

// A GPU without clusters and early launches. Few multiprocessors: then a block has several tiles.
extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 3; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
    default: *value = 227 << 10;  // shared memory of a block
  }
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

// One quantise; all else about it is in `q`, which Python fills field by field.
int run_quantize(fp8lt::Quantize* q) {
  std::vector<uint4> scratch(fp8lt::quantize_scratch_bytes(*q) / sizeof(uint4) + 1);
  std::memset(scratch.data(), 0x7f, scratch.size() * sizeof(uint4));
  q->scratch = scratch.data();
  std::vector<uint32_t> counters(fp8lt::kCounters + 1);
  q->counters = counters.data();
  // Two pieces in turn, as a workspace has them; what was not left zero spoils the next quantise.
  static std::vector<uint32_t> turns[2] = {std::vector<uint32_t>(fp8lt::kZeros),
                                           std::vector<uint32_t>(fp8lt::kZeros)};
  static bool is_odd = false, spares = false;
  spares = !spares;  // both ways
  if (spares && fp8lt::takes_zeros(*q)) {
    is_odd = !is_odd;
    q->zeros = turns[is_odd].data();
    q->next_zeros = turns[!is_odd].data();
  }
  const int status = fp8lt::quantize(*q, nullptr);
  for (const uint32_t counter : counters) {
    if (counter != 0) std::fprintf(stderr, "a counter is not zero after the launch\n"), std::abort();
  }
  return status;
}

int run_transpose(fp8lt::Quantize* q) { return fp8lt::transpose(*q, nullptr); }

size_t size_of_quantize() { return sizeof(fp8lt::Quantize); }

}  // extern "C"
