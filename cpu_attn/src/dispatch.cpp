#include "cpu_attn/dispatch.h"

#include <cstring>

namespace cpu_attn {

const Kernel* supported_kernel(int i) {
  const Kernel* found[3] = {kernel_scalar()};
  int count = 1;
#ifdef CPU_ATTN_X86
  // The builtin also asks the operating system whether it saves the wide registers.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    found[count++] = kernel_avx2();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    found[count++] = kernel_avx512();
#endif
  return i < count ? found[i] : nullptr;
}

const Kernel* find_kernel(const char* name) {
  for (int i = 0; const Kernel* kernel = supported_kernel(i); ++i)
    if (std::strcmp(kernel->name, name) == 0) return kernel;
  return nullptr;
}

}  // namespace cpu_attn
