#include "cpu_attn/executor.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "cpu_attn/spin.h"

namespace cpu_attn {
namespace {

using Clock = std::chrono::steady_clock;

void check_owner(pid_t owner, const char* what) {
  if (getpid() != owner)
    throw std::runtime_error(std::string(what) + " belongs to process " + std::to_string(owner) +
                             ", not to its forked child");
}

}  // namespace

bool Job::in_owner() const { return getpid() == owner_; }
bool Executor::in_owner() const { return getpid() == owner_; }

void Signal::raise() const {
  if (at == nullptr) return;
  int32_t there = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (
      static_cast<int32_t>(static_cast<uint32_t>(value) - static_cast<uint32_t>(there)) > 0 &&
      !__atomic_compare_exchange_n(at, &there, value, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

Job::Job(std::function<void(Team&)> work, double spin_s, Signal signal)
    : owner_(getpid()), spin_s_(spin_s), signal_(signal), work_(std::move(work)) {}

bool Job::wait(double seconds) const {
  check_owner(owner_, "job");
  const double spun = std::min(seconds, spin_s_);
  if (spin([this] { return settled_.load(std::memory_order_acquire); }, spun)) return true;
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
  signal_.raise();
  std::lock_guard<std::mutex> lock(mutex_);
  message_ = std::move(message);
  seconds_ = seconds;
  outcome_ = outcome;
  settled_.store(true, std::memory_order_release);
  finished_.notify_all();
}

Executor::Executor(int threads, std::vector<int> cores, double spin_s)
    : owner_(getpid()), threads_(threads), spin_s_(spin_s), team_(new Team(threads, spin_s)) {
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

std::shared_ptr<Job> Executor::submit(std::function<void(Team&)> work, Signal signal) {
  check_owner(owner_, "executor");
  const std::shared_ptr<Job> job(new Job(std::move(work), spin_s_, signal), DeleteInOwner());
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
  team_.reset();
}

void Executor::loop() {
  for (;;) {
    spin([this] { return wanted_.load(std::memory_order_acquire); }, spin_s_);
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::shared_ptr<Job> job = std::move(queue_.front());
    queue_.pop_front();
    wanted_.store(closing_ || !queue_.empty(), std::memory_order_release);
    lock.unlock();
    job->run(*team_);
  }
}

void run_direct(int threads, const std::function<void(Team&)>& work) {
  struct Own {
    explicit Own(int threads) : team(threads, 0.0) {}
    bool in_owner() const { return getpid() == owner; }
    const pid_t owner = getpid();
    Team team;
  };
  // A team inherited by a fork has no threads.
  thread_local std::unique_ptr<Own, DeleteInOwner> own;
  if (!own || !own->in_owner() || own->team.threads() != threads) own.reset(new Own(threads));
  work(own->team);
}

}  // namespace cpu_attn
