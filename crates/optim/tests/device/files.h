// Binary files of little-endian numbers, as the test in Rust writes and reads them.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

static FILE *input, *output;

static void read_bytes(void *to, size_t bytes) {
  if (bytes && std::fread(to, 1, bytes, input) != bytes) std::exit(3);
}
template <class T>
static T get() {
  T value;
  read_bytes(&value, sizeof value);
  return value;
}
static void put_bytes(const void *from, size_t bytes) {
  if (bytes && std::fwrite(from, 1, bytes, output) != bytes) std::exit(4);
}
// Exactly as many elements as asked for, so that the address sanitizer sees the first one beyond.
template <class T>
static T *allocate(size_t n) {
  return static_cast<T *>(std::calloc(n ? n : 1, n ? sizeof(T) : 1));
}
