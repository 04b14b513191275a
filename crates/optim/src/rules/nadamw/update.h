// The arithmetic of NAdamW; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  x = x * s.keep;
  REAL m = s.beta1 * state[0] + s.one_minus_beta1 * g;
  REAL v = s.beta2 * state[1] + s.one_minus_beta2 * (g * g);
  state[0] = m;
  state[1] = v;
  REAL ahead = s.beta1 * m + s.one_minus_beta1 * g;
  return x - s.step * (ahead / (root(v) * s.root_correction + s.eps));
}
