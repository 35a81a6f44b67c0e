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
// Tile data is off until the process asks for it; once granted, every thread has it. Refused where
// the kernel is older than 5.16, and where a thread's signal stack is too small for the tiles.
bool request_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;      // of leaf 7, edx
  constexpr unsigned kTileState = 3u << 17;                   // configuration and data, of XCR0
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTile) == 0)
    return false;
  __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a & kTileState) == kTileState &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
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
    if (request_tiles()) kernels[count++] = kernel_amx();
#endif
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
  for (int i = 0; const Kernel* kernel = supported_kernel(i); ++i)
    if (std::strcmp(kernel->name, name) == 0) return kernel;
#ifdef CPU_ATTN_X86
  // Needs AVX-512 for all but the tiles, so whatever runs that.
  const Kernel* emulated = kernel_amx_emulated();
  for (int i = 0; const Kernel* kernel = supported_kernel(i); ++i)
    if (kernel == kernel_avx512() && std::strcmp(emulated->name, name) == 0) return emulated;
#endif
  return nullptr;
}

}  // namespace cpu_attn
