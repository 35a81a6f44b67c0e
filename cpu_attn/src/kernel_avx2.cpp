#include "cpu_attn/isa_avx2.h"
// The instruction set comes first.
#include "cpu_attn/dispatch.h"
#include "cpu_attn/kernel_table.h"

namespace cpu_attn {

const Kernel* kernel_avx2() { return kernel(); }

}  // namespace cpu_attn
