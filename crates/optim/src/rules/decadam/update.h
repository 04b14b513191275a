// The arithmetic of DecAdam; see mod.rs.
FN Scalars follow(Scalars s, REAL of_loss, REAL half_inverse) {
  s.root = of_loss;
  s.half_inverse_root = half_inverse;
  return s;
}

FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  REAL m = state[0], v = state[1], u = state[2];
#if BUFFERS == 4
  int keeps_x = s.keeps_x > 0;
  REAL scale = keeps_x ? v : state[3];
#else
  REAL scale = v;
#endif
  REAL last = s.divides > 0 ? root(u) * s.last_correction + s.eps : (REAL)1;
  REAL before = last > 0 ? scale * m / last : (REAL)0;
#if BUFFERS == 4
  REAL d = keeps_x ? s.stored * (x - state[3]) : s.moved * before + s.shrunk * x;
#else
  REAL d = s.moved * before + s.shrunk * x;
#endif
  REAL q = (g + s.l2 * x) * s.half_inverse_root + s.coupled_q * x;
  m = s.momentum * m + q;
  v = at_least(v + m * d, s.v_floor);
#if BUFFERS == 4
  scale = keeps_x ? v : at_most(scale, v);
  state[3] = keeps_x ? x : scale;
#else
  scale = v;
#endif
  if (s.divides > 0) u = s.beta2 * u + s.one_minus_beta2 * (q * q);
  state[0] = m;
  state[1] = v;
  state[2] = u;
  REAL now = s.divides > 0 ? root(u) * s.root_correction + s.eps : (REAL)1;
  REAL moves = now > 0 ? scale * m / now : (REAL)0;
  return x - (s.step * moves + s.decoupled * x);
}
