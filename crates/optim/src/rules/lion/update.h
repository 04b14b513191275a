// The arithmetic of Lion; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  x = x * s.keep;
  REAL direction = s.beta1 * state[0] + s.one_minus_beta1 * g;
  state[0] = s.beta2 * state[0] + s.one_minus_beta2 * g;
  REAL step = direction > 0 ? s.lr : direction < 0 ? -s.lr : (REAL)0;
  return x - step;
}
