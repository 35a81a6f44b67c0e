#pragma once

#include "cpu_attn/types.h"

namespace cpu_attn {

const Kernel* kernel_scalar();
const Kernel* kernel_avx2();
const Kernel* kernel_avx512();
const Kernel* kernel_avx512bf16();
const Kernel* kernel_amx();
// AMX's data layout without AMX: tiles are arrays. For tests on hosts with AVX-512.
const Kernel* kernel_amx_emulated();
const Kernel* kernel_neon();

// The i-th kernel this host can run, slowest first; nullptr past the last.
const Kernel* supported_kernel(int i);

// nullptr when the host cannot run it or the name is unknown. Knows the emulated kernel too.
const Kernel* find_kernel(const char* name);

}  // namespace cpu_attn
