// The arithmetic of Schedule-Free SGD; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  REAL z = s.first > 0 ? x : state[0];
  REAL u = g + s.weight_decay * x;
  state[0] = z - s.lr * u;
  return s.keep * x + s.pull * z + s.step * u;
}
