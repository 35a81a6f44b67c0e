#include "cpu_attn/executor.h"

#include <omp.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

namespace cpu_attn {
namespace {

using Clock = std::chrono::steady_clock;

bool forked = false;
// At load, not at first use: the inherited team may have been made by someone else.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

void check_owner(pid_t owner, const char* what) {
  if (getpid() != owner)
    throw std::runtime_error(std::string(what) + " belongs to process " + std::to_string(owner) +
                             ", not to its forked child");
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int kLooksPerClock = 64;

// Returns true as soon as `flag` is set, or false after `seconds`. Yields, since whoever sets the
// flag may be waiting for this core.
bool spin(const std::atomic<bool>& flag, double seconds) {
  if (seconds <= 0.0) return false;
  const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                   std::chrono::duration<double>(seconds));
  do {
    for (int i = 0; i < kLooksPerClock; ++i) {
      if (flag.load(std::memory_order_acquire)) return true;
      relax();
    }
    std::this_thread::yield();
  } while (Clock::now() < end);
  return false;
}

}  // namespace

bool Job::in_owner() const { return getpid() == owner_; }
bool Executor::in_owner() const { return getpid() == owner_; }

Job::Job(std::function<void(Team&)> work, double spin_s)
    : owner_(getpid()), spin_s_(spin_s), work_(std::move(work)) {}

bool Job::wait(double seconds) const {
  check_owner(owner_, "job");
  const double spun = std::min(seconds, spin_s_);
  if (spin(settled_, spun)) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  return finished_.wait_for(lock, std::chrono::duration<double>(seconds - spun),
                            [this] { return outcome_ != Outcome::kPending; });
}

bool Job::done() const {
  check_owner(owner_, "job");
  std::lock_guard<std::mutex> lock(mutex_);
  return outcome_ != Outcome::kPending;
}

void Job::run(Team& team) {
  Outcome outcome = Outcome::kOk;
  std::string message;
  const Clock::time_point start = Clock::now();
  try {
    work_(team);
  } catch (const std::invalid_argument& error) {
    outcome = Outcome::kInvalid;
    message = error.what();
  } catch (const std::exception& error) {
    outcome = Outcome::kFailed;
    message = error.what();
  }
  settle(outcome, std::move(message), std::chrono::duration<double>(Clock::now() - start).count());
}

void Job::settle(Outcome outcome, std::string message, double seconds) {
  work_ = nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  message_ = std::move(message);
  seconds_ = seconds;
  outcome_ = outcome;
  settled_.store(true, std::memory_order_release);
  finished_.notify_all();
}

Executor::Executor(int threads, std::vector<int> cores, double spin_s)
    : owner_(getpid()), threads_(threads), spin_s_(spin_s) {
  thread_ = std::thread([this] { loop(); });
  if (cores.empty()) return;
  const std::shared_ptr<Job> pinned = submit([cores](Team& team) {
    if (!team.pin(cores)) throw std::runtime_error("cannot pin a thread to the cores asked for");
  });
  pinned->wait(60.0);
  if (pinned->outcome() == Job::Outcome::kOk) return;
  close();
  throw std::runtime_error(pinned->message());
}

Executor::~Executor() { close(); }

std::shared_ptr<Job> Executor::submit(std::function<void(Team&)> work) {
  check_owner(owner_, "executor");
  const std::shared_ptr<Job> job(new Job(std::move(work), spin_s_), DeleteInOwner());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) throw std::runtime_error("executor is closed");
    queue_.push_back(job);
    wanted_.store(true, std::memory_order_release);
  }
  wake_.notify_one();
  return job;
}

void Executor::close() {
  if (!in_owner()) return;
  std::lock_guard<std::mutex> closer(close_mutex_);
  std::deque<std::shared_ptr<Job>> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    wanted_.store(true, std::memory_order_release);
    dropped.swap(queue_);
  }
  wake_.notify_one();
  for (const auto& job : dropped)
    job->settle(Job::Outcome::kFailed, "executor was closed before the job ran", 0.0);
  if (thread_.joinable()) thread_.join();
}

void Executor::loop() {
  omp_set_dynamic(0);
  Team team(threads_);
  for (;;) {
    spin(wanted_, spin_s_);
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::shared_ptr<Job> job = std::move(queue_.front());
    queue_.pop_front();
    wanted_.store(closing_ || !queue_.empty(), std::memory_order_release);
    lock.unlock();
    job->run(team);
  }
}

void run_direct(int threads, const std::function<void(Team&)>& work) {
  if (!forked || threads == 1) {
    thread_local std::unique_ptr<Team> team;
    if (!team || team->threads() != threads) team = std::make_unique<Team>(threads);
    return work(*team);
  }
  std::exception_ptr error;
  std::thread fresh([&] {
    try {
      Team team(threads);
      work(team);
    } catch (...) {
      error = std::current_exception();
    }
  });
  fresh.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace cpu_attn
