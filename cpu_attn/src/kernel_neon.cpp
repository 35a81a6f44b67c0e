#include "cpu_attn/isa_neon.h"
// The instruction set comes first.
#include "cpu_attn/dispatch.h"
#include "cpu_attn/kernel_table.h"

namespace cpu_attn {

const Kernel* kernel_neon() { return kernel(); }

}  // namespace cpu_attn
