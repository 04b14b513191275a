// The arithmetic of AdaGD; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  state[0] = x;
  state[1] = g;
  return x - s.lambda * g;
}

FN void reduce(ACC x, ACC g, const THREAD ACC *state, THREAD ACC *sums) {
  sums[0] = (x - state[0]) * (x - state[0]);
  sums[1] = (g - state[1]) * (g - state[1]);
}

FN ACC finish(ACC total) { return total; }
