// The dialect of the Metal Shading Language: once a program. There is no double: losses, norms and sums are float.
#ifndef TAPER_HOST
#include <metal_stdlib>
using namespace metal;
// No fused multiply-add: a rule rounds on the GPU as it does on the CPU.
#pragma clang fp contract(off)
#endif
#define FN static inline
#define THREAD thread
#define ACC float

FN float root(float x) { return precise::sqrt(x); }
FN unsigned int bits_of(float x) { return as_type<unsigned int>(x); }
FN float float_of(unsigned int bits) { return as_type<float>(bits); }
