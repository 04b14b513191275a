// The arithmetic of ADOPT; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  x = x * s.keep;
  g = g + s.l2 * x;
  REAL v = state[1];
  state[1] = s.beta2 * v + s.one_minus_beta2 * (g * g);
  REAL ratio = at_least(at_most(g / at_least(root(v), s.eps), s.limit), -s.limit);
  REAL m = s.beta1 * state[0] + s.one_minus_beta1 * ratio;
  m = s.first > 0 ? (REAL)0 : m;
  state[0] = m;
  return x - s.lr * m;
}
