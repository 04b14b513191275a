// The arithmetic of AdaBound and AMSBound; see mod.rs.
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
  REAL rate = at_most(at_least(s.step / (root(v) + s.eps), s.lower), s.upper);
  return x - rate * m;
}
