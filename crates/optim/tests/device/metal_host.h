// Makes of Metal Shading Language either C++ for OpenCL, whose compiler knows address spaces, or C++ that runs.
#define TAPER_HOST
#ifdef __OPENCL_CPP_VERSION__
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device global
#define thread private
namespace precise {
float sqrt(float);
}
template <class To, class From>
To as_type(From);
#pragma GCC poison double
#else
#include <cmath>
#include <cstring>
#define device
#define thread
#define constant const
#define kernel static
typedef _Float16 half;
namespace precise {
static float sqrt(float x) { return std::sqrt(x); }
}
template <class To, class From>
static To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
#endif
