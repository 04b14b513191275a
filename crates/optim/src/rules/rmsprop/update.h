// The arithmetic of RMSprop; see mod.rs. Two buffers are an average and a momentum unless `centered`.
FN REAL update(Scalars s, REAL x, REAL g, THREAD REAL *state) {
  g = g + s.weight_decay * x;
  REAL square = s.alpha * state[0] + s.one_minus_alpha * (g * g);
  state[0] = square;
  REAL variance = square;
#if BUFFERS > 1
  if (s.centered > 0) {
    REAL mean = s.alpha * state[1] + s.one_minus_alpha * g;
    state[1] = mean;
    variance = at_least(square - mean * mean, 0);
  }
#endif
  REAL step = g / (root(variance) + s.eps);
#if BUFFERS == 2
  if (!(s.centered > 0)) {
    state[1] = s.momentum * state[1] + step;
    step = state[1];
  }
#elif BUFFERS == 3
  state[2] = s.momentum * state[2] + step;
  step = state[2];
#endif
  return x - s.lr * step;
}
