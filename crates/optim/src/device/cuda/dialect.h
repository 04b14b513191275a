// The dialect of CUDA C++: once a program. It needs no header of the toolkit, so that NVRTC needs no include path.
#define FN static __device__ __forceinline__
#define THREAD
// What sums, losses and norms are computed in.
#define ACC double

FN float root(float x) { return __fsqrt_rn(x); }
FN double root(double x) { return __dsqrt_rn(x); }
FN unsigned int bits_of(float x) { return __float_as_uint(x); }
FN float float_of(unsigned int bits) { return __uint_as_float(bits); }
FN unsigned long long bits_of(double x) { return (unsigned long long)__double_as_longlong(x); }
FN double double_of(unsigned long long bits) { return __longlong_as_double((long long)bits); }

// f16 and bf16 are carried as their bits.
#ifndef TAPER_HOST
FN float widen_f16(unsigned short bits) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
  return wide;
}
FN unsigned short narrow_f16(float wide) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
  return bits;
}
#endif
