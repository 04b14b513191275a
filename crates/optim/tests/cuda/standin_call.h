// Host builds of kernels, called with the arguments of cuLaunchKernel: the address of each argument.
#include <cstddef>
#include <utility>

template <class... Args, size_t... I>
static void apply(void (*kernel)(Args...), void **args, std::index_sequence<I...>) {
  kernel(*static_cast<Args *>(args[I])...);
}

template <class... Args>
static void call(void (*kernel)(Args...), const unsigned *grid, unsigned threads, unsigned seen, void **args) {
  gridDim = {grid[0], grid[1]}, blockDim = {seen, 1};
  for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++)
      for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
        apply(kernel, args, std::index_sequence_for<Args...>{});
}

#define EXPAND(name) host_##name
#define HOST_NAME(name) EXPAND(name)
#define CALLABLE(kernel)                                                                                         \
  extern "C" void HOST_NAME(NAME(kernel))(const unsigned *grid, unsigned threads, unsigned seen, void **args) { \
    call(NAME(kernel), grid, threads, seen, args);                                                               \
  }
