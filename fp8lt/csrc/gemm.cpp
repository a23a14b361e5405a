// cuBLASLt for FP8: descriptors, and a cache of them with the algorithm chosen for each problem.
//
// cuBLASLt is column-major. Row-major d[m, n] = a[m, k] @ b[n, k].T is, read column-major,
// d'[n, m] = op_T(b'[k, n]) @ a'[k, m]: our b is its A (transposed), our a its B. That is the
// "TN" form; no other runs in FP8 before Blackwell.

#include "gemm.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <type_traits>
#include <unordered_map>

namespace fp8lt {
namespace {

#define FP8LT_CHECK(expr)                                                                     \
  do {                                                                                        \
    const cublasStatus_t fp8lt_status = (expr);                                               \
    TORCH_CHECK(fp8lt_status == CUBLAS_STATUS_SUCCESS, "fp8lt: ", #expr, " failed: ",         \
                cublasLtGetStatusString(fp8lt_status), " (cuBLASLt ", cublasLtGetVersion(), ")"); \
  } while (0)

// A deleter must not throw: it may run while another error unwinds.
template <auto Destroy>
struct Deleter {
  template <typename T>
  void operator()(T* handle) const noexcept {
    Destroy(handle);
  }
};
template <typename Handle, auto Destroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Deleter<Destroy>>;
using MatmulDesc = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

template <typename T>
void set(const MatmulDesc& desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  FP8LT_CHECK(cublasLtMatmulDescSetAttribute(desc.get(), attribute, &value, sizeof(value)));
}
template <typename T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const T& value) {
  FP8LT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value,
                                                   sizeof(value)));
}

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

struct Plan {
  MatmulDesc desc;
  Layout a, b, d;
  cublasLtMatmulAlgo_t algo;
};

// Everything that cuBLASLt's choice of a kernel may depend on.
using PlanKey = std::array<int64_t, 13>;
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

// What one GPU needs: a handle and its plans. A plan's descriptor is rewritten for every launch,
// so one lock is held from there to the launch.
struct Device {
  std::mutex mutex;
  cublasLtHandle_t handle = nullptr;
  bool has_vector_scales = false;  // Hopper alone, with cuBLASLt 12.9 or newer
  std::unordered_map<PlanKey, Plan, PlanKeyHash> plans;
};

// Below this many multiply-adds fast accumulation buys nothing (on an H200 the times are within
// 1 % at 16x4096x4096 and smaller, up to 9 % apart above), while a dot product of length 4096 may
// lose 2 % to it.
constexpr int64_t kFastAccumWork = int64_t{1} << 30;

bool fast_accum(const GemmProblem& p) { return p.fast_accum && p.m * p.n >= kFastAccumWork / p.k; }

// With a scale per row there is a single kernel, and for large GEMMs with fast accumulation it
// beats the first choice with a scale per tensor, so a tensor's scale is written out once per row.
// On an H200 it takes 2-14 % less time at 2^37 and above, up to 13 % more at some shapes below.
constexpr int64_t kVectorScaleWork = int64_t{1} << 37;

bool vector_scales(const Device& device, const GemmProblem& p) {
  return device.has_vector_scales && p.vector_scales && fast_accum(p) &&
         p.m * p.n >= kVectorScaleWork / p.k;
}

PlanKey plan_key(const Device& device, const GemmProblem& p) {
  return {p.m,
          p.n,
          p.k,
          p.a_type,
          p.b_type,
          p.d_type,
          fast_accum(p),
          vector_scales(device, p),
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

MatmulDesc make_desc(const Device& device, const GemmProblem& p) {
  cublasLtMatmulDesc_t raw = nullptr;
  FP8LT_CHECK(cublasLtMatmulDescCreate(&raw, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  MatmulDesc desc(raw);
  set(desc, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(desc, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(fast_accum(p)));
#if CUBLAS_VERSION >= 120900
  if (vector_scales(device, p)) {
    set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
    set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
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

Plan make_plan(const Device& device, const GemmProblem& p) {
  Plan plan{make_desc(device, p), make_layout(p.b_type, p.k, p.n), make_layout(p.a_type, p.k, p.m),
            make_layout(p.d_type, p.n, p.m), {}};
  cublasLtMatmulPreference_t raw = nullptr;
  FP8LT_CHECK(cublasLtMatmulPreferenceCreate(&raw));
  const Preference preference(raw);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspaceBytes));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.b));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.a));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.d));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.d));

  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      device.handle, plan.desc.get(), plan.a.get(), plan.b.get(), plan.d.get(), plan.d.get(),
      preference.get(), 1, &result, &found);
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS && found > 0, "fp8lt: cuBLASLt ",
              cublasLtGetVersion(), " has no kernel on cuda:", p.device, " for a ",
              type_name(p.a_type),
              " [", p.m, ", ", p.k, "] @ b ", type_name(p.b_type), " [", p.n, ", ", p.k, "].T -> ",
              type_name(p.d_type), p.bias != nullptr ? " with bias" : "", ": ",
              cublasLtGetStatusString(status));
  plan.algo = result.algo;
  return plan;
}

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
    state->has_vector_scales = major == 9 && cublasLtGetVersion() >= 120900;
    FP8LT_CHECK(cublasLtCreate(&state->handle));
  }
  return *state;
}

}  // namespace

void gemm_nt(const GemmProblem& p, void* workspace, cudaStream_t stream) {
  Device& device = device_state(p.device);
  const PlanKey key = plan_key(device, p);
  const std::lock_guard<std::mutex> lock(device.mutex);
  auto found = device.plans.find(key);
  if (found == device.plans.end()) {
    Plan plan = make_plan(device, p);
    // Dropping all is crude, but a plan costs some 50 us to make again and no bookkeeping to use.
    if (device.plans.size() >= kMaxPlans) device.plans.clear();
    found = device.plans.emplace(key, std::move(plan)).first;
  } else {
    set_pointers(found->second.desc, p);
  }
  const Plan& plan = found->second;
  const float alpha = 1.0f, beta = 0.0f;
  FP8LT_CHECK(cublasLtMatmul(device.handle, plan.desc.get(), &alpha, p.b, plan.a.get(), p.a,
                             plan.b.get(), &beta, p.d, plan.d.get(), p.d, plan.d.get(), &plan.algo,
                             workspace, kWorkspaceBytes, stream));
}

}  // namespace fp8lt
