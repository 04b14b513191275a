// The arithmetic of AEGD and AEGDW; see mod.rs.
FN Scalars follow(Scalars s, REAL of_loss, REAL half_inverse) {
  s.root = of_loss;
  s.half_inverse_root = half_inverse;
  return s;
}

FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  REAL q = g * s.half_inverse_root + s.coupled_q * x;
  REAL r = state[0] / (1 + s.twice_lr * (q * q));
  state[0] = r;
  return x * s.keep - s.twice_lr * (r * q);
}
