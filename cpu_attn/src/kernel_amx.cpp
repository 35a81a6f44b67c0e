// AMX-BF16: products of tiles in the tile unit, everything else in AVX-512. No other file may use
// tiles; a thread holds them for one accumulate or multiply.
#include "cpu_attn/isa_avx512.h"
// The instruction set comes first.
#include "cpu_attn/dispatch.h"
#include "cpu_attn/tile_body.h"

namespace cpu_attn {
namespace {

// Written as assembly: the compilers' intrinsics take tile numbers as literals only, and some of
// their releases hide from the optimiser what memory a load reads.
struct AmxTiles {
  static constexpr const char* kName = "amx";

  // Eight tiles of 16 rows of 64 bytes.
  struct Session {
    Session() {
      alignas(64) char config[64] = {1};  // palette
      for (int tile = 0; tile < 8; ++tile) {
        config[16 + 2 * tile] = kRowBytes;
        config[48 + tile] = 16;
      }
      __asm__ volatile("ldtilecfg %0" ::"m"(config));
    }
    ~Session() { __asm__ volatile("tilerelease"); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // Tiles 0 to N - 1.
  template <int N>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(N - 1));
    if constexpr (N > 1) zero<N - 1>();
  }
  template <int T>
  static void load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  static void store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  static void multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

}  // namespace

const Kernel* kernel_amx() { return tile_kernel<AmxTiles>(); }

}  // namespace cpu_attn
