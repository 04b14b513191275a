// The arithmetic of Adan; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  REAL turn = s.first > 0 ? (REAL)0 : g - state[3];
  REAL ahead = g + s.beta2 * turn;
  REAL m = s.beta1 * state[0] + s.one_minus_beta1 * g;
  REAL d = s.beta2 * state[1] + s.one_minus_beta2 * turn;
  REAL n = s.beta3 * state[2] + s.one_minus_beta3 * (ahead * ahead);
  state[0] = m;
  state[1] = d;
  state[2] = n;
  state[3] = g;
  REAL u = (s.correction1 * m + s.correction2 * d) / (root(n) * s.root_correction + s.eps);
  return (x * s.keep - s.lr * u) * s.shrink;
}
