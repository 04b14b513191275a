// Makes host C++ of CUDA C++ without shared memory and barriers: a launch runs its threads one after another.
#define TAPER_HOST
#include <cmath>
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline

struct Dim {
  unsigned x, y;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

template <class To, class From>
static To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
static float __fsqrt_rn(float x) { return std::sqrt(x); }
static double __dsqrt_rn(double x) { return std::sqrt(x); }
static unsigned __float_as_uint(float x) { return bit_cast<unsigned>(x); }
static float __uint_as_float(unsigned x) { return bit_cast<float>(x); }
static long long __double_as_longlong(double x) { return bit_cast<long long>(x); }
static double __longlong_as_double(long long x) { return bit_cast<double>(x); }
static float widen_f16(unsigned short bits) { return (float)bit_cast<_Float16>(bits); }
static unsigned short narrow_f16(float wide) { return bit_cast<unsigned short>((_Float16)wide); }

template <class Kernel, class... Args>
static void launch(Dim grid, Dim block, Kernel kernel, Args... args) {
  gridDim = grid, blockDim = block;
  for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++)
      for (threadIdx.x = 0; threadIdx.x < block.x; threadIdx.x++) kernel(args...);
}
