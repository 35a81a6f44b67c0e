#include "cpu_attn/dispatch.h"

#include <cstring>

#ifdef CPU_ATTN_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cpu_attn {
namespace {

#ifdef CPU_ATTN_AMX
bool has_tiles() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;  // of leaf 7, edx
  constexpr unsigned kTileState = 3u << 17;               // configuration and data, of XCR0
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTile) == 0)
    return false;
  __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a & kTileState) == kTileState;
}

// Tile data is off until the process asks for it, which it does only where amx is chosen: once
// granted, every thread has it, and signal stacks must be larger. Refused where the kernel is older
// than 5.16, and where a thread's signal stack is too small for the tiles.
bool request_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

struct Found {
  const Kernel* kernels[5] = {kernel_scalar()};
  int count = 1;

  Found() {
#ifdef CPU_ATTN_X86
    // The builtin also asks the operating system whether it saves the wide registers.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
      kernels[count++] = kernel_avx2();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl"))
      return;
    kernels[count++] = kernel_avx512();
#ifdef CPU_ATTN_AVX512BF16
    if (__builtin_cpu_supports("avx512bf16")) kernels[count++] = kernel_avx512bf16();
#endif
#ifdef CPU_ATTN_AMX
    if (has_tiles()) kernels[count++] = kernel_amx();
#endif
#endif
#ifdef CPU_ATTN_NEON
    kernels[count++] = kernel_neon();
#endif
  }
};

const Found& found() {
  static const Found found;
  return found;
}

}  // namespace

const Kernel* supported_kernel(int i) { return i < found().count ? found().kernels[i] : nullptr; }

const Kernel* find_kernel(const char* name) {
  bool wide = false;
  for (int i = 0; const Kernel* kernel = supported_kernel(i); ++i) {
    wide = wide || std::strcmp(kernel->name, "avx512") == 0;
    if (std::strcmp(kernel->name, name) != 0) continue;
#ifdef CPU_ATTN_AMX
    if (std::strcmp(name, "amx") == 0 && !request_tiles()) return nullptr;
#endif
    return kernel;
  }
#ifdef CPU_ATTN_X86
  // Needs AVX-512 for all but the tiles, so its code is not even entered elsewhere.
  if (wide && std::strcmp(name, "amx-emulated") == 0) return kernel_amx_emulated();
#endif
  return nullptr;
}

}  // namespace cpu_attn
