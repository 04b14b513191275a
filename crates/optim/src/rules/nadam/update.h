// The arithmetic of NAdam; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  x = x * s.keep;
  g = g + s.l2 * x;
  REAL m = s.beta1 * state[0] + s.one_minus_beta1 * g;
  REAL v = s.beta2 * state[1] + s.one_minus_beta2 * (g * g);
  state[0] = m;
  state[1] = v;
  return x - (s.gradient_share * g + s.momentum_share * m) / (root(v) * s.root_correction + s.eps);
}
