// The arithmetic of Schedule-Free AdamW; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  REAL z = s.first > 0 ? x : state[0];
  REAL v = s.beta2 * state[1] + s.one_minus_beta2 * (g * g);
  REAL u = g / (root(v) * s.root_correction + s.eps) + s.weight_decay * x;
  state[0] = z - s.lr * u;
  state[1] = v;
  return s.keep * x + s.pull * z + s.step * u;
}
