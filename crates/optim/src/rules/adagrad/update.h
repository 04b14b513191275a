// The arithmetic of AdaGrad; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  g = g + s.weight_decay * x;
  state[0] = state[0] + g * g;
  return x - s.lr * (g / (root(state[0]) + s.eps));
}
