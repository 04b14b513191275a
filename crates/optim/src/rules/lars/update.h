// The arithmetic of LARS; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  g = s.ratio * (g + s.weight_decay * x);
#if BUFFERS == 1
  state[0] = s.momentum * state[0] + s.undamped * g;
  return x - s.lr * (s.gradient_share * g + s.buffer_share * state[0]);
#else
  return x - s.lr * g;
#endif
}

FN void reduce(ACC x, ACC g, const THREAD ACC *state, THREAD ACC *sums) {
  sums[0] = x * x;
  sums[1] = g * g;
}

FN ACC finish(ACC total) { return total; }
