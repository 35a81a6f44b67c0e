// Threads that run the same function at once, again and again, with as little as possible between
// two times.
//
// The thread that calls run() is worker 0; the others wait for the round to change. Who waits looks
// for a while and then sleeps: `sleepers_` and `round_` are each written before the other is read,
// so that either the sleeper sees the new round or the caller sees the sleeper. The end of a round
// is `running_` at zero, waited for likewise.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace cpu_attn {

// One caller at a time. Not to be destroyed in a forked child, where its threads do not exist.
class Workers {
 public:
  // spin_s: how long a worker looks for the next round before it sleeps. Throws std::system_error
  // where the system does not grant the threads.
  Workers(int count, double spin_s);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int count() const { return count_; }

  // Calls work(0) to work(count - 1), each on its own thread, and returns when all have. `work` may
  // not throw.
  template <class Work>
  void run(const Work& work) {
    run_round(&work, [](const void* own, int worker) { (*static_cast<const Work*>(own))(worker); });
  }

 private:
  using Call = void (*)(const void* work, int worker);

  void run_round(const void* work, Call call);
  void loop(int worker);
  void stop();

  const int count_;
  const double spin_s_;
  const void* work_ = nullptr;
  Call call_ = nullptr;  // none: the end
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> running_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::mutex mutex_;
  std::condition_variable begun_, ended_;
  std::vector<std::thread> threads_;
};

}  // namespace cpu_attn
