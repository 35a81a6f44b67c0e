#pragma once

#include "cpu_attn/types.h"

namespace cpu_attn {

const Kernel* kernel_scalar();
const Kernel* kernel_avx2();
const Kernel* kernel_avx512();

// The i-th kernel this host can run, slowest first; nullptr past the last.
const Kernel* supported_kernel(int i);

// nullptr when the host cannot run it or the name is unknown.
const Kernel* find_kernel(const char* name);

}  // namespace cpu_attn
