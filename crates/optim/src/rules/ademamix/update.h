// The arithmetic of AdEMAMix; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  x = x * s.keep;
  REAL m = s.beta1 * state[0] + s.one_minus_beta1 * g;
  REAL slow = s.beta3 * state[1] + s.one_minus_beta3 * g;
  REAL v = s.beta2 * state[2] + s.one_minus_beta2 * (g * g);
  state[0] = m;
  state[1] = slow;
  state[2] = v;
  return x - (s.step * m + s.slow_step * slow) / (root(v) * s.root_correction + s.eps);
}
