// cuBLASLt for FP8: descriptors, and a cache of them with the algorithm chosen for each problem.
//
// cuBLASLt is column-major. Row-major d[m, n] = a[m, k] @ b[n, k].T is, read column-major,
// d'[n, m] = op_T(b'[k, n]) @ a'[k, m]: our b is its A (transposed), our a its B. That is the
// "TN" form; no other runs in FP8 before Blackwell.

#include "gemm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autotune.h"
#include "memory.h"
#include "plan.h"

namespace fp8lt {
namespace {

// Column-major [rows, cols]: of a row-major matrix, its transpose.
Layout make_layout(cudaDataType_t type, int64_t rows, int64_t cols) {
  cublasLtMatrixLayout_t raw = nullptr;
  FP8LT_CHECK(cublasLtMatrixLayoutCreate(&raw, type, rows, cols, rows));
  return Layout(raw);
}

// The largest power of two, up to 256, that divides the address: what kernels are chosen by.
uint32_t alignment(const void* pointer) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer) | 256;
  return static_cast<uint32_t>(address & (~address + 1));
}

// Everything that a choice of a kernel may depend on.
using PlanKey = std::array<int64_t, 15>;
struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const noexcept {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const int64_t word : key) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001b3ull;
      hash ^= hash >> 32;
    }
    return static_cast<size_t>(hash);
  }
};
using Plans = std::unordered_map<PlanKey, Plan, PlanKeyHash>;

// What one GPU needs: a handle and its plans. A plan's descriptor is rewritten for every launch,
// so one lock is held from there to the launch.
struct Device {
  std::mutex mutex;
  cublasLtHandle_t handle = nullptr;
  bool has_scale_modes = false;  // Hopper alone, with cuBLASLt 12.9 or newer
  Plans plans, tuned;              // by the rule below; by time
};

PlanKey plan_key(const GemmProblem& p) {
  return {p.m,
          p.n,
          p.k,
          p.a_type,
          p.b_type,
          p.d_type,
          p.fast_accum,
          static_cast<int64_t>(p.a_scaling),
          static_cast<int64_t>(p.b_scaling),
          p.written_out,
          p.bias != nullptr ? 1 : 0,
          alignment(p.a),
          alignment(p.b),
          alignment(p.d),
          p.bias != nullptr ? alignment(p.bias) : 0};
}

void set_pointers(const MatmulDesc& desc, const GemmProblem& p) {
  set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale_inv);
  set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale_inv);
  if (p.bias != nullptr) set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
}

#if CUBLAS_VERSION >= 120900
cublasLtMatmulMatrixScale_t scale_mode(Scaling scaling) {
  switch (scaling) {
    case Scaling::kTensorwise: return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    case Scaling::kRowwise: return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case Scaling::k1x128: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    default: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  }
}
#endif

// With `by_row` a tensor's scale is read where it is written out.
MatmulDesc make_desc(const GemmProblem& p, bool fast_accum, bool by_row) {
  cublasLtMatmulDesc_t raw = nullptr;
  FP8LT_CHECK(cublasLtMatmulDescCreate(&raw, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  MatmulDesc desc(raw);
  set(desc, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(desc, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(fast_accum));
#if CUBLAS_VERSION >= 120900
  if (by_row || p.a_scaling != Scaling::kTensorwise) {
    const auto mode = [&](Scaling own) { return scale_mode(by_row ? Scaling::kRowwise : own); };
    set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode(p.b_scaling));
    set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode(p.a_scaling));
  }
#endif
  if (p.bias != nullptr) {
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    // The default, d's type, is illegal for f32.
    const cudaDataType_t bias_type = p.d_type == CUDA_R_32F ? CUDA_R_16BF : p.d_type;
    set(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_type);
  }
  set_pointers(desc, p);  // before the heuristic: it reads the bias pointer's alignment
  return desc;
}

struct Candidates {
  std::vector<Plan> plans;   // the heuristic's favourite first
  std::vector<float> waves;  // of each: how often its tiles fill the GPU
  cublasStatus_t status;     // why there are none
};

constexpr int kMostCandidates = 16;

// The kernels that cuBLASLt has for a problem with this accumulation and form of its scales.
Candidates find_candidates(const Device& device, const GemmProblem& p, bool fast_accum,
                           bool by_row, int most) {
  const auto make_plan = [&](const cublasLtMatmulAlgo_t& algo) {
    return Plan{make_desc(p, fast_accum, by_row),
                make_layout(p.b_type, p.k, p.n),
                make_layout(p.a_type, p.k, p.m),
                make_layout(p.d_type, p.n, p.m),
                algo,
                fast_accum,
                by_row};
  };
  const Plan plan = make_plan({});
  cublasLtMatmulPreference_t raw = nullptr;
  FP8LT_CHECK(cublasLtMatmulPreferenceCreate(&raw));
  const Preference preference(raw);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspaceBytes));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.b));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.a));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.d));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.d));
  std::vector<cublasLtMatmulHeuristicResult_t> results(most);
  int found = 0;
  Candidates candidates;
  candidates.status = cublasLtMatmulAlgoGetHeuristic(
      device.handle, plan.desc.get(), plan.a.get(), plan.b.get(), plan.d.get(), plan.d.get(),
      preference.get(), most, results.data(), &found);
  if (candidates.status != CUBLAS_STATUS_SUCCESS) return candidates;
  for (int i = 0; i < found; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS) {
      candidates.plans.push_back(make_plan(results[i].algo));
      candidates.waves.push_back(results[i].wavesCount);
    }
  }
  return candidates;
}

const char* type_name(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_8F_E4M3: return "float8_e4m3fn";
    case CUDA_R_8F_E5M2: return "float8_e5m2";
    case CUDA_R_16F: return "float16";
    case CUDA_R_16BF: return "bfloat16";
    case CUDA_R_32F: return "float32";
    default: return "another type";
  }
}

// ------------------------------------------------------------------------------ choice by a rule

// Below this many multiply-adds fast accumulation buys little or nothing (on an H200 slow
// accumulation takes 30 % less time at 64x4096x4096, 2 % less at 16x8192x8192, 5 % more at
// 256x4096x1024), while a dot product of length 4096 may lose 2 % to it.
constexpr int64_t kFastAccumWork = int64_t{1} << 31;

// Kernels for large GEMMs with fast accumulation, and what a wave of their tiles takes, in ns. The
// heuristic likes larger tiles, whose last wave is the emptier, and which store their results while
// nothing is multiplied. With a scale per row there is one kernel, and where k is long it is the
// fastest of all: so a tensor's scale is written out once per row.
//
// By least squares from 122 shapes of y on an H200. Of the 53 that have as many tiles, it chooses
// 10 % faster than the heuristic in the mean, 28 % at best and 1 % slower at worst.
struct Kernel {
  cublasLtMatmulTile_t tile;
  cublasLtClusterShape_t cluster;
  bool by_row;
  double per_k, once;  // ns a wave
};
#if CUBLAS_VERSION >= 120900
constexpr Kernel kKernels[] = {
    {CUBLASLT_MATMUL_TILE_128x128, CUBLASLT_CLUSTER_SHAPE_2x1x1, true, 2.87, 690},
    {CUBLASLT_MATMUL_TILE_128x128, CUBLASLT_CLUSTER_SHAPE_2x1x1, false, 2.92, 260},
    {CUBLASLT_MATMUL_TILE_128x160, CUBLASLT_CLUSTER_SHAPE_2x1x1, false, 3.80, 0},
    {CUBLASLT_MATMUL_TILE_168x128, CUBLASLT_CLUSTER_SHAPE_1x2x1, false, 3.99, 0},
    {CUBLASLT_MATMUL_TILE_176x128, CUBLASLT_CLUSTER_SHAPE_1x2x1, false, 4.16, 0},
};
#else
constexpr std::array<Kernel, 0> kKernels{};
#endif
constexpr int64_t kManyTiles = 1024 * 128 * 128;  // elements of d: some 8 waves on an H200

const char* scaling_name(Scaling scaling) {
  switch (scaling) {
    case Scaling::kTensorwise: return "tensorwise";
    case Scaling::kRowwise: return "rowwise";
    case Scaling::k1x128: return "1x128";
    default: return "128x128";
  }
}

template <typename T>
T config(const Plan& plan, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  T value{};
  size_t written = 0;
  FP8LT_CHECK(cublasLtMatmulAlgoConfigGetAttribute(&plan.algo, attribute, &value, sizeof(value),
                                                   &written));
  return value;
}

// What a candidate takes, in ns; infinity for one that is not in the table.
double estimate(const Plan& plan, float waves, int64_t k) {
  const auto tile = config<uint32_t>(plan, CUBLASLT_ALGO_CONFIG_TILE_ID);
  const auto cluster = config<uint16_t>(plan, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID);
  for (const Kernel& kernel : kKernels) {
    if (kernel.tile == tile && kernel.cluster == cluster && kernel.by_row == plan.by_row) {
      return std::max(1.0f, std::ceil(waves)) * (kernel.per_k * k + kernel.once);
    }
  }
  return std::numeric_limits<double>::infinity();
}

Plan choose(const Device& device, const GemmProblem& p) {
  TORCH_CHECK(p.a_scaling == Scaling::kTensorwise || device.has_scale_modes,
              "fp8lt: cuBLASLt has scales of rows and blocks from version 12.9 (120900) on, for "
              "compute capability 9.0 alone; cuda:", p.device, " with cuBLASLt ",
              cublasLtGetVersion(), " was asked for ", scaling_name(p.a_scaling), " @ ",
              scaling_name(p.b_scaling));
  const bool fast_accum = p.fast_accum && p.m * p.n >= kFastAccumWork / p.k;
  const bool by_table = device.has_scale_modes && fast_accum && p.m * p.n >= kManyTiles &&
                        p.a_scaling == Scaling::kTensorwise;
  constexpr bool kByRow = true;
  Candidates candidates =
      find_candidates(device, p, fast_accum, !kByRow, by_table ? kMostCandidates : 1);
  TORCH_CHECK(!candidates.plans.empty(), "fp8lt: cuBLASLt ", cublasLtGetVersion(),
              " has no kernel on cuda:", p.device, " for a ", type_name(p.a_type), " [", p.m, ", ",
              p.k, "] @ b ", type_name(p.b_type), " [", p.n, ", ", p.k, "].T -> ",
              type_name(p.d_type), p.bias != nullptr ? " with bias" : "", ", scaled ",
              scaling_name(p.a_scaling), " @ ", scaling_name(p.b_scaling), ": ",
              cublasLtGetStatusString(candidates.status));
  if (!by_table) return std::move(candidates.plans.front());
  if (p.written_out) {
    Candidates others = find_candidates(device, p, fast_accum, kByRow, kMostCandidates);
    std::move(others.plans.begin(), others.plans.end(), std::back_inserter(candidates.plans));
    candidates.waves.insert(candidates.waves.end(), others.waves.begin(), others.waves.end());
  }
  size_t best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < candidates.plans.size(); ++i) {
    const double ns = estimate(candidates.plans[i], candidates.waves[i], p.k);
    if (ns < least) {
      best = i;
      least = ns;
    }
  }
  return std::move(candidates.plans[best]);
}

// -------------------------------------------------------------------------------- choice by time

// Of each accumulation and form of scales that the problem allows, the first is the rule's choice.
std::vector<Plan> all_candidates(const Device& device, const GemmProblem& p) {
  std::vector<Plan> all;
  all.push_back(choose(device, p));
  for (const bool fast_accum : {true, false}) {
    if (fast_accum && !p.fast_accum) continue;
    for (const bool by_row : {false, true}) {
      if (by_row && !(device.has_scale_modes && p.written_out)) continue;
      Candidates found = find_candidates(device, p, fast_accum, by_row, kMostCandidates);
      std::move(found.plans.begin(), found.plans.end(), std::back_inserter(all));
    }
  }
  return all;
}

void launch(const Device& device, const Plan& plan, const GemmProblem& p, void* workspace,
            cudaStream_t stream) {
  const float alpha = 1.0f, beta = p.adds ? 1.0f : 0.0f;
  FP8LT_CHECK(cublasLtMatmul(device.handle, plan.desc.get(), &alpha, p.b, plan.a.get(), p.a,
                             plan.b.get(), &beta, p.d, plan.d.get(), p.d, plan.d.get(), &plan.algo,
                             workspace, kWorkspaceBytes, stream));
}

// A choice that was kept, as a plan; or none where it does not fit this library after all.
std::vector<Plan> restore(const Device& device, const GemmProblem& p, const Choice& kept) {
  if (kept.by_row && !(device.has_scale_modes && p.written_out)) return {};
  if (kept.fast_accum && !p.fast_accum) return {};
  Candidates found = find_candidates(device, p, kept.fast_accum, kept.by_row, 1);
  if (found.plans.empty()) return {};
  Plan& plan = found.plans.front();
  plan.algo = kept.algo;
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status =
      cublasLtMatmulAlgoCheck(device.handle, plan.desc.get(), plan.a.get(), plan.b.get(),
                              plan.d.get(), plan.d.get(), &plan.algo, &result);
  if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > kWorkspaceBytes) return {};
  return std::move(found.plans);
}

// The fastest plan, in `device.tuned`; null where nothing can be timed, unless it is known.
Plan* tuned_plan(Device& device, const GemmProblem& p, const PlanKey& key, void* workspace,
                 cudaStream_t stream) {
  const auto found = device.tuned.find(key);
  if (found != device.tuned.end()) return &found->second;
  Choices& choices = Choices::of(p.device);
  const std::string name = choice_name(key.data(), key.size());
  std::vector<Plan> plans;
  if (const Choice* kept = choices.find(name)) plans = restore(device, p, *kept);
  if (plans.empty()) {
    if (is_capturing(stream) || p.adds) return nullptr;  // timing would add time after time
    plans = all_candidates(device, p);
    const auto run = [&](const Plan& plan) { launch(device, plan, p, workspace, stream); };
    const auto delay = [&] {  // some 20 us
      for (int i = 0; i < 2; ++i) {
        check_cuda(cudaMemsetAsync(workspace, 0, kWorkspaceBytes, stream), "cudaMemsetAsync");
      }
    };
    const Timing timing = fastest(plans, run, delay, stream);
    std::swap(plans.front(), plans[timing.best]);
    const Plan& best = plans.front();
    choices.keep(name, {best.fast_accum, best.by_row, best.algo}, timing);
  }
  return &device.tuned.emplace(key, std::move(plans.front())).first->second;
}

// ------------------------------------------------------------------------------------- the cache

constexpr size_t kMaxPlans = 4096;  // some 10 MiB; a new token count every step must not grow it

Device& device_state(int device) {
  // Never destroyed: at exit the driver may be gone, and destroying a handle waits for the GPU.
  static auto* const mutex = new std::mutex;
  static auto* const devices = new std::unordered_map<int, std::unique_ptr<Device>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& state = (*devices)[device];
  if (state == nullptr) state = std::make_unique<Device>();
  if (state->handle == nullptr) {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    state->has_scale_modes = major == 9 && cublasLtGetVersion() >= 120900;
    const RelaxedCapture relaxed;  // it allocates
    FP8LT_CHECK(cublasLtCreate(&state->handle));
  }
  return *state;
}

Plan& rule_plan(Device& device, const GemmProblem& p, const PlanKey& key) {
  auto found = device.plans.find(key);
  if (found == device.plans.end()) found = device.plans.emplace(key, choose(device, p)).first;
  return found->second;
}

}  // namespace

void gemm_nt(const GemmProblem& p, void* workspace, cudaStream_t stream) {
  Device& device = device_state(p.device);
  const PlanKey key = plan_key(p);
  const std::lock_guard<std::mutex> lock(device.mutex);
  // Dropping all is crude, but a plan costs some 50 us to make again and no bookkeeping to use.
  for (Plans* plans : {&device.plans, &device.tuned}) {
    if (plans->size() >= kMaxPlans) plans->clear();
  }
  Plan* plan = nullptr;
  if (autotune_enabled()) plan = tuned_plan(device, p, key, workspace, stream);
  if (plan == nullptr) plan = &rule_plan(device, p, key);
  set_pointers(plan->desc, p);
  launch(device, *plan, p, workspace, stream);
}

}  // namespace fp8lt
