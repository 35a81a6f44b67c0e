#include "cpu_attn/workers.h"

#include <algorithm>

#include "cpu_attn/spin.h"

namespace cpu_attn {
namespace {

// Between the rounds of one job nobody sleeps.
constexpr double kLeastSpin = 50e-6;

}  // namespace

Workers::Workers(int count, double spin_s) : count_(count), spin_s_(std::max(spin_s, kLeastSpin)) {
  try {
    for (int worker = 1; worker < count; ++worker)
      threads_.emplace_back([this, worker] { loop(worker); });
  } catch (...) {
    stop();
    throw;
  }
}

Workers::~Workers() { stop(); }

void Workers::stop() {
  run_round(nullptr, nullptr);
  for (std::thread& thread : threads_) thread.join();
}

void Workers::run_round(const void* work, Call call) {
  work_ = work;
  call_ = call;
  running_.store(static_cast<int>(threads_.size()));
  round_.fetch_add(1);
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    begun_.notify_all();
  }
  if (call != nullptr) call(work, 0);
  const auto ended = [this] { return running_.load() == 0; };
  if (spin(ended, spin_s_)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  caller_sleeps_.store(true);
  ended_.wait(lock, ended);
  caller_sleeps_.store(false);
}

void Workers::loop(int worker) {
  for (uint32_t seen = 0;; ++seen) {
    const auto begun = [&] { return round_.load() != seen; };
    if (!spin(begun, spin_s_)) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1);
      begun_.wait(lock, begun);
      sleepers_.fetch_sub(1);
    }
    const Call call = call_;
    if (call != nullptr) call(work_, worker);
    if (running_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_.notify_one();
    }
    if (call == nullptr) return;
  }
}

}  // namespace cpu_attn
