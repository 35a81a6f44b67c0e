// Many short rounds, with pauses in which workers fall asleep. Exits with 1 if a round ended before
// all of it was done; the thread sanitizer sees the rest.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "cpu_attn/workers.h"

int main() {
  for (int count : {1, 2, 3, 5})
    for (double spin_s : {0.0, 1e-3}) {
      cpu_attn::Workers workers(count, spin_s);
      std::vector<int> done(count);  // plain: a round orders what came before it
      for (int round = 1; round <= 400; ++round) {
        workers.run([&](int worker) {
          if (worker == round % count && round % 7 == 0)
            std::this_thread::sleep_for(std::chrono::microseconds(300));
          ++done[worker];
        });
        for (int worker = 0; worker < count; ++worker)
          if (done[worker] != round) {
            std::printf("%d workers: worker %d did %d of %d\n", count, worker, done[worker], round);
            return 1;
          }
        if (round % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      }
    }
}
