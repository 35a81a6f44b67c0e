// One thread that runs submitted jobs in order with its own team.
//
// Hand-off: submit() queues under `mutex_` and signals `wake_`; the thread takes the oldest job,
// runs it without the lock, drops what the job captured, then sets its result under the job's own
// mutex and signals `finished_`. So once a waiter sees a job done, it touches no memory of the
// caller. Whoever waits spins for up to `spin_s` before it sleeps, because being woken takes tens
// of microseconds. After a fork the thread exists only in the parent: the child may not lock
// anything here, hence the process id checks.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cpu_attn/team.h"

namespace cpu_attn {

// Destroying a condition variable waits for its waiters, and a forked child inherits waiters that
// do not exist: there the object is leaked.
struct DeleteInOwner {
  template <class T>
  void operator()(T* object) const {
    if (object->in_owner()) delete object;
  }
};

// Where a job tells its end to whoever cannot wait for it, such as a GPU. Values count up, around
// the end of their range, and what is there never goes back.
struct Signal {
  void raise() const;
  int32_t* at = nullptr;  // none
  int32_t value = 0;
};

class Job {
 public:
  enum class Outcome { kPending, kOk, kInvalid, kFailed };

  Job(std::function<void(Team&)> work, double spin_s, Signal signal);
  // False on time-out. Throws std::runtime_error in a forked child.
  bool wait(double seconds) const;
  bool done() const;
  // Valid once done.
  Outcome outcome() const { return outcome_; }
  const std::string& message() const { return message_; }
  double seconds() const { return seconds_; }
  bool in_owner() const;

 private:
  friend class Executor;
  void run(Team& team);
  void settle(Outcome outcome, std::string message, double seconds);

  const pid_t owner_;
  const double spin_s_;
  const Signal signal_;  // raised when everything is written, however the job ended
  std::function<void(Team&)> work_;
  mutable std::mutex mutex_;
  mutable std::condition_variable finished_;
  std::atomic<bool> settled_{false};  // written last, after what it makes valid
  Outcome outcome_ = Outcome::kPending;
  std::string message_;
  double seconds_ = 0.0;
};

class Executor {
 public:
  // cores: empty (inherit the caller's affinity) or one per thread. Throws when pinning fails or
  // the system does not grant the threads. spin_s > 0 wants a core for the caller beside the
  // team's.
  Executor(int threads, std::vector<int> cores, double spin_s);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  std::shared_ptr<Job> submit(std::function<void(Team&)> work, Signal signal = {});
  // Lets the running job end, fails the queued ones, joins the thread. Idempotent.
  void close();
  int threads() const { return threads_; }
  bool in_owner() const;

 private:
  void loop();

  const pid_t owner_;
  const int threads_;
  const double spin_s_;
  std::unique_ptr<Team> team_;  // until closed
  std::mutex close_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> queue_;
  bool closing_ = false;
  std::atomic<bool> wanted_{false};  // closing, or the queue is not empty
  std::thread thread_;
};

// Runs `work` on the calling thread's own team, which stays until another size is asked for.
void run_direct(int threads, const std::function<void(Team&)>& work);

}  // namespace cpu_attn
