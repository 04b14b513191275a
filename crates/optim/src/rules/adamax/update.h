// The arithmetic of Adamax; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  g = g + s.weight_decay * x;
  REAL m = s.beta1 * state[0] + s.one_minus_beta1 * g;
  REAL size = g < 0 ? -g : g;
  REAL u = at_least(s.beta2 * state[1], size + s.eps);
  state[0] = m;
  state[1] = u;
  return x - s.step * (m / u);
}
