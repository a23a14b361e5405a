// Which of several cuBLASLt kernels is fastest: measured once, kept in memory and on disk.
#pragma once

#include <cublasLt.h>

#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "plan.h"

namespace fp8lt {

// For the whole process. Choices are kept in files in `directory`; in memory alone where it is
// empty. `verbose` prints every choice to stderr.
void set_autotune(bool enabled, const std::string& directory, bool verbose);
bool autotune_enabled();

struct Timing {
  size_t best;               // its index
  float best_us, first_us;   // medians; first is what would run without autotuning
};

// Time the plans against each other, launched by `run`. `delay` keeps the GPU busy for longer than
// a launch takes, or small GEMMs would be measured by the host. Waits for the stream.
Timing fastest(const std::vector<Plan>& plans, const std::function<void(const Plan&)>& run,
               const std::function<void()>& delay, cudaStream_t stream);

struct Choice {
  bool fast_accum, by_row;
  cublasLtMatmulAlgo_t algo;  // may be kept and used again with the same version of cuBLASLt
};

// A problem as a line of text begins with it.
std::string choice_name(const int64_t* key, size_t size);

// The choices for one GPU and one version of cuBLASLt: a line of text each, in a file that is only
// ever appended to, so that processes may share it. Where two chose differently, the first counts.
class Choices {
 public:
  static Choices& of(int device);

  const Choice* find(const std::string& name);
  void keep(const std::string& name, const Choice& choice, const Timing& timing);

 private:
  explicit Choices(int device);
  void read();

  std::mutex mutex_;
  std::string file_name_, read_from_;
  std::unordered_map<std::string, Choice> found_;
};

}  // namespace fp8lt
