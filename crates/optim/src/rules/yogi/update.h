// The arithmetic of Yogi; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  g = g + s.weight_decay * x;
  REAL m = s.beta1 * state[0] + s.one_minus_beta1 * g;
  REAL square = g * g;
  REAL share = s.one_minus_beta2 * square;
  REAL v = state[1];
  REAL drop = v > square ? share : -share;
  v = v - (v == square ? (REAL)0 : drop);
  state[0] = m;
  state[1] = v;
  return x - s.step * (m / (root(v) * s.root_correction + s.eps));
}
