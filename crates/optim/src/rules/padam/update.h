// The arithmetic of PAdam; see mod.rs.
FN REAL to_the(REAL base, REAL exponent) {
  if (exponent == (REAL)1 / 2) return root(base);
  if (exponent == (REAL)1 / 4) return root(root(base));
  if (exponent == 1) return base;
  return power(base, exponent);
}

FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  g = g + s.weight_decay * x;
  REAL m = s.beta1 * state[0] + s.one_minus_beta1 * g;
  REAL v = s.beta2 * state[1] + s.one_minus_beta2 * (g * g);
  state[0] = m;
  state[1] = v;
#if BUFFERS == 3
  state[2] = at_least(state[2], v);
  v = state[2];
#endif
  return x - s.step * (m / to_the(root(v) + s.eps, s.exponent));
}
