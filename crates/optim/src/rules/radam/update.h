// The arithmetic of RAdam; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  g = g + s.l2 * x;
  REAL m = s.beta1 * state[0] + s.one_minus_beta1 * g;
  REAL v = s.beta2 * state[1] + s.one_minus_beta2 * (g * g);
  state[0] = m;
  state[1] = v;
  REAL denominator = s.adaptive == 1 ? root(v) + s.eps : (REAL)1;
  return x * s.keep - s.step * (m / denominator);
}
