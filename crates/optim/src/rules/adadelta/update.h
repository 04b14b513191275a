// The arithmetic of AdaDelta; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  g = g + s.weight_decay * x;
  REAL square = s.rho * state[0] + s.one_minus_rho * (g * g);
  REAL delta = root(state[1] + s.eps) / root(square + s.eps) * g;
  state[0] = square;
  state[1] = s.rho * state[1] + s.one_minus_rho * (delta * delta);
  return x - s.lr * delta;
}
