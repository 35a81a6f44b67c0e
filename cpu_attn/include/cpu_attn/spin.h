// Waiting without sleeping: being woken takes tens of microseconds.
#pragma once

#include <chrono>
#include <thread>

namespace cpu_attn {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True as soon as `ready()` is, false after `seconds`. Yields, since whoever makes it so may be
// waiting for this core.
template <class Ready>
bool spin(const Ready& ready, double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr int kLooksPerClock = 64;
  if (ready()) return true;
  if (seconds <= 0.0) return false;
  const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                   std::chrono::duration<double>(seconds));
  do {
    for (int i = 0; i < kLooksPerClock; ++i) {
      if (ready()) return true;
      relax();
    }
    std::this_thread::yield();
  } while (Clock::now() < end);
  return false;
}

}  // namespace cpu_attn
