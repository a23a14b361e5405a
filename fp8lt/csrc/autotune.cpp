#include "autotune.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <utility>

#include "memory.h"

namespace fp8lt {
namespace {

struct Settings {
  std::mutex mutex;
  std::string directory;
  std::atomic<bool> enabled{false}, verbose{false};
};

Settings& settings() {
  static auto* const all = new Settings;
  return *all;
}

std::string directory() {
  const std::lock_guard<std::mutex> lock(settings().mutex);
  return settings().directory;
}

struct EventDeleter {
  void operator()(CUevent_st* event) const noexcept { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<CUevent_st, EventDeleter>;

Event make_event() {
  cudaEvent_t raw = nullptr;
  check_cuda(cudaEventCreate(&raw), "cudaEventCreate");
  return Event(raw);
}

// The plans that run at all; the first must. Loads their kernels, too.
std::vector<size_t> that_run(const std::vector<Plan>& plans,
                             const std::function<void(const Plan&)>& run) {
  std::vector<size_t> good;
  for (size_t i = 0; i < plans.size(); ++i) {
    try {
      run(plans[i]);
      good.push_back(i);
    } catch (const c10::Error&) {
      if (i == 0) throw;
      cudaGetLastError();  // or torch would report it
    }
  }
  return good;
}

// Times, in us, of one call each; the plans take turns, so that all meet the same heat.
std::vector<std::vector<float>> take_turns(const std::vector<size_t>& turns,
                                           const std::vector<Plan>& plans, int rounds,
                                           const std::function<void(const Plan&)>& run,
                                           const std::function<void()>& delay,
                                           cudaStream_t stream) {
  std::vector<std::pair<Event, Event>> events;
  for (size_t i = 0; i < turns.size() * rounds; ++i) {
    events.emplace_back(make_event(), make_event());
    delay();
    check_cuda(cudaEventRecord(events.back().first.get(), stream), "cudaEventRecord");
    run(plans[turns[i % turns.size()]]);
    check_cuda(cudaEventRecord(events.back().second.get(), stream), "cudaEventRecord");
  }
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  std::vector<std::vector<float>> times(turns.size());
  for (size_t i = 0; i < events.size(); ++i) {
    float ms = 0;
    const auto& [start, end] = events[i];
    check_cuda(cudaEventElapsedTime(&ms, start.get(), end.get()), "cudaEventElapsedTime");
    times[i % turns.size()].push_back(ms * 1e3f);
  }
  return times;
}

float median(std::vector<float> times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

std::string hex(const cublasLtMatmulAlgo_t& algo) {
  std::string text;
  for (const uint64_t word : algo.data) {
    char digits[17];
    std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(word));
    text += digits;
  }
  return text;
}

bool parse(const std::string& text, cublasLtMatmulAlgo_t* algo) {
  constexpr size_t kDigits = 16;
  if (text.size() != std::size(algo->data) * kDigits) return false;
  for (size_t i = 0; i < std::size(algo->data); ++i) {
    unsigned long long word = 0;
    if (std::sscanf(text.substr(i * kDigits, kDigits).c_str(), "%16llx", &word) != 1) return false;
    algo->data[i] = word;
  }
  return true;
}

}  // namespace

void set_autotune(bool enabled, const std::string& directory, bool verbose) {
  const std::lock_guard<std::mutex> lock(settings().mutex);
  settings().directory = directory;
  settings().verbose = verbose;
  settings().enabled = enabled;
}

bool autotune_enabled() { return settings().enabled.load(std::memory_order_relaxed); }

Timing fastest(const std::vector<Plan>& plans, const std::function<void(const Plan&)>& run,
               const std::function<void()>& delay, cudaStream_t stream) {
  constexpr int kRounds = 15;
  constexpr size_t kFinalists = 4;
  constexpr float kGain = 0.99f;  // what is not faster by this much does not replace the first
  const RelaxedCapture relaxed;
  std::vector<size_t> turns = that_run(plans, run);
  const auto heats = take_turns(turns, plans, 3, run, delay, stream);
  std::vector<float> heat(plans.size());
  for (size_t i = 0; i < turns.size(); ++i) heat[turns[i]] = median(heats[i]);
  // The first always is a finalist: the others must beat it.
  std::stable_sort(turns.begin() + 1, turns.end(),
                   [&](size_t a, size_t b) { return heat[a] < heat[b]; });
  turns.resize(std::min(turns.size(), kFinalists));
  const auto times = take_turns(turns, plans, kRounds, run, delay, stream);
  const float first_us = median(times[0]);
  Timing timing{0, first_us, first_us};
  for (size_t i = 1; i < turns.size(); ++i) {
    const float us = median(times[i]);
    if (us < timing.best_us && us < kGain * first_us) timing = {turns[i], us, first_us};
  }
  return timing;
}

std::string choice_name(const int64_t* key, size_t size) {
  std::string name;
  for (size_t i = 0; i < size; ++i) name += std::to_string(key[i]) + (i + 1 < size ? "," : "");
  return name;
}

Choices& Choices::of(int device) {
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::unordered_map<int, std::unique_ptr<Choices>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& mine = (*all)[device];
  if (mine == nullptr) mine.reset(new Choices(device));
  return *mine;
}

Choices::Choices(int device) {
  cudaDeviceProp gpu{};
  check_cuda(cudaGetDeviceProperties(&gpu, device), "cudaGetDeviceProperties");
  for (const char c : std::string(gpu.name)) {
    file_name_ += std::isalnum(static_cast<unsigned char>(c)) ? c : '-';
  }
  file_name_ += "-" + std::to_string(gpu.multiProcessorCount) + "sm-cublaslt-" +
                std::to_string(cublasLtGetVersion()) + ".txt";
}

void Choices::read() {
  const std::string folder = directory();
  if (folder == read_from_) return;
  read_from_ = folder;
  std::ifstream file(folder + "/" + file_name_);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name, algo;
    Choice choice{};
    // A line that was cut off, by a full disk say, is not understood and does no harm.
    if (words >> name >> choice.fast_accum >> choice.by_row >> algo &&
        parse(algo, &choice.algo)) {
      found_.emplace(name, choice);
    }
  }
}

const Choice* Choices::find(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  read();
  const auto found = found_.find(name);
  return found == found_.end() ? nullptr : &found->second;
}

void Choices::keep(const std::string& name, const Choice& choice, const Timing& timing) {
  std::ostringstream line;
  line << name << ' ' << choice.fast_accum << ' ' << choice.by_row << ' '
       << hex(choice.algo) << ' ' << timing.best_us << " us, was " << timing.first_us << " us\n";
  if (settings().verbose) {
    std::fprintf(stderr, "fp8lt: autotune %s: %.1f us, was %.1f us\n", name.c_str(),
                 timing.best_us, timing.first_us);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  found_.insert_or_assign(name, choice);
  const std::string folder = directory();
  if (folder.empty()) return;
  // One write to a file opened for appending: lines of several processes do not mix.
  const int file =
      open((folder + "/" + file_name_).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) return;  // a read-only cache: then it is measured again next time
  const std::string text = line.str();
  if (write(file, text.data(), text.size()) < 0 && settings().verbose) {
    std::fprintf(stderr, "fp8lt: autotune: %s/%s: %s\n", folder.c_str(), file_name_.c_str(),
                 std::strerror(errno));
  }
  close(file);
}

}  // namespace fp8lt
