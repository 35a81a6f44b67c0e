#pragma once

namespace cpu_attn {
namespace {

// 2^f for f in [-1/2, 1/2]: minimax, relative error 1.9e-9 before rounding.
template <class Isa>
typename Isa::V exp2_fraction(typename Isa::V f) {
  typename Isa::V p = Isa::set1(1.5345812e-4f);
  p = Isa::fma(p, f, Isa::set1(1.3399931e-3f));
  p = Isa::fma(p, f, Isa::set1(9.6184890e-3f));
  p = Isa::fma(p, f, Isa::set1(5.5503288e-2f));
  p = Isa::fma(p, f, Isa::set1(2.4022647e-1f));
  p = Isa::fma(p, f, Isa::set1(6.9314721e-1f));
  return Isa::fma(p, f, Isa::set1(1.0f));
}

}  // namespace
}  // namespace cpu_attn
