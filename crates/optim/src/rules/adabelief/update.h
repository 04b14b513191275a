// The arithmetic of AdaBelief; see mod.rs.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  x = x * s.keep;
  g = g + s.l2 * x;
  REAL m = s.beta1 * state[0] + s.one_minus_beta1 * g;
  REAL belief = s.beta2 * state[1] + s.one_minus_beta2 * ((g - m) * (g - m));
  state[0] = m;
#if BUFFERS == 3
  state[1] = belief;
  state[2] = at_least(state[2], belief) + s.eps;
  belief = state[2];
#else
  state[1] = belief + s.eps;
  belief = state[1];
#endif
  REAL denominator = s.adaptive == 1 ? root(belief) * s.root_correction + s.eps : (REAL)1;
  return x - s.step * (m / denominator);
}
