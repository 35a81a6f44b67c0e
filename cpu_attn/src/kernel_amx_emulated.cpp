// The tile kernel with tiles as arrays: slow, and the same layout as AMX.
#include "cpu_attn/isa_avx512.h"
// The instruction set comes first.
#include "cpu_attn/dispatch.h"
#include "cpu_attn/tile_body.h"

namespace cpu_attn {
namespace {

thread_local char tiles[8][kTileBytes];

struct EmulatedTiles {
  static constexpr const char* kName = "amx-emulated";
  struct Session {
    ~Session() { std::memset(tiles, 0xff, sizeof(tiles)); }  // NaN: nothing may outlive it
  };

  template <int N>
  static void zero() {
    std::memset(tiles, 0, N * kTileBytes);
  }
  template <int T>
  static void load(const void* from, int64_t stride) {
    for (int r = 0; r < 16; ++r)
      std::memcpy(tiles[T] + r * kRowBytes, static_cast<const char*>(from) + r * stride, kRowBytes);
  }
  template <int T>
  static void store(void* to, int64_t stride) {
    for (int r = 0; r < 16; ++r)
      std::memcpy(static_cast<char*>(to) + r * stride, tiles[T] + r * kRowBytes, kRowBytes);
  }
  template <int C, int A, int B>
  static void multiply() {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (int row = 0; row < 16; ++row) {
      V sum = Isa::load(reinterpret_cast<const float*>(tiles[C] + row * kRowBytes));
      for (int pair = 0; pair < 16; ++pair) {
        int bits;
        std::memcpy(&bits, tiles[A] + row * kRowBytes + pair * 4, 4);
        const __m512i a = _mm512_set1_epi32(bits);
        const __m512i b = _mm512_loadu_si512(tiles[B] + pair * kRowBytes);
        sum = Isa::fma(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                       _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
        sum = Isa::fma(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                       _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
      }
      Isa::store(reinterpret_cast<float*>(tiles[C] + row * kRowBytes), sum);
    }
  }
};

}  // namespace

const Kernel* kernel_amx_emulated() { return tile_kernel<EmulatedTiles>(); }

}  // namespace cpu_attn
