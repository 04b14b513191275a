// The arithmetic of DecGD; see mod.rs.
FN Scalars follow(Scalars s, REAL of_loss, REAL half_inverse) {
  s.root = of_loss;
  s.half_inverse_root = half_inverse;
  return s;
}

FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  REAL m = state[0], v = state[1];
#if BUFFERS >= 3
  REAL scale = state[2];
#else
  REAL scale = v;
#endif
#if BUFFERS == 4
  REAL d = s.stored * (x - state[3]);
  state[3] = x;
#else
  REAL d = s.moved * (scale * m) + s.shrunk * x;
#endif
  REAL q = (g + s.l2 * x) * s.half_inverse_root + s.coupled_q * x;
  m = s.momentum * m + q;
  v = at_least(v + m * d, s.v_floor);
  state[0] = m;
  state[1] = v;
  REAL used = v;
#if BUFFERS >= 3
  if (used > s.root + s.unbounded) used = s.falling > 0 ? s.root * (s.root / used) : s.root;
  if (!(s.forgets > 0)) used = at_most(scale, used);
  state[2] = used;
#endif
  return x - (s.twice_lr * (used * m) + s.decoupled * x);
}
