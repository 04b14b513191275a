// The arithmetic of DecGD; see mod.rs.
FN Scalars follow(Scalars s, REAL of_loss, REAL half_inverse) {
  s.root = of_loss;
  s.half_inverse_root = half_inverse;
  return s;
}

FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  REAL m = state[0], v = state[1];
#if BUFFERS == 3
  REAL scale = state[2];
#else
  REAL scale = v;
#endif
  REAL d = s.moved * (scale * m) + s.shrunk * x;
  REAL q = (g + s.l2 * x) * s.half_inverse_root + s.coupled_q * x;
  m = s.momentum * m + q;
  v = at_least(v + m * d, s.v_floor);
  state[0] = m;
  state[1] = v;
#if BUFFERS == 3
  scale = at_most(scale, v);
  state[2] = scale;
#else
  scale = v;
#endif
  return x - (s.twice_lr * (scale * m) + s.decoupled * x);
}
