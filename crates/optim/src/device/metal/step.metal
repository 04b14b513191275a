// One step of one rule, for one parameter of one dtype: rule and dtype are set by macros and by the text before this.
//
// Each parameter is a dispatch of its own, all in one command buffer; threads stride over its elements. As in step.cu,
// nothing depends on the grid or on the order of threads. See there for what the parts mean.

struct Head {
  float scale, limit;
  float max_norm;
  unsigned int rows;
  unsigned int step;
};

struct Row {
  unsigned int n;
  unsigned int first_chunk;
  unsigned int starts;
  float offset;
  float start[SLOTS];
  Scalars scalars;
};

struct Fault {
  unsigned int loss, norm;
};

#define CLIPPED(g) at_least(at_most((g) * head->scale, head->limit), -head->limit)

// Which of the two is there: 1 the loss, 2 the norm, 3 both.
kernel void NAME(begin)(device Head *head [[buffer(0)]], device Row *rows [[buffer(1)]],
                        device const float *loss [[buffer(2)]], device const float *norm [[buffer(3)]],
                        device Fault *fault [[buffer(4)]], constant unsigned int &given [[buffer(5)]],
                        unsigned int first [[thread_position_in_grid]],
                        unsigned int stride [[threads_per_grid]]) {
  if ((given & 2u) && first == 0) {
    const float factor = head->max_norm / (*norm + 1e-6f);
    if (is_finite(*norm) && factor == factor) {
      head->scale *= factor < 1.0f ? factor : 1.0f;
    } else {
      if (!fault->norm) fault->norm = head->step;
    }
  }
  if (!(given & 1u)) return;
  if (!is_finite(*loss)) {
    if (!fault->loss) fault->loss = head->step;
    return;
  }
#ifdef FOLLOWS_LOSS
  for (unsigned int r = first; r < head->rows; r += stride) {
    device Row *row = rows + r;
    const float sum = *loss + row->offset;
    if (!(sum > 0) || !is_finite(sum)) {
      if (!fault->loss) fault->loss = head->step;
      continue;
    }
    const float of_loss = root(sum);
    const Scalars known = row->scalars;
    row->scalars = follow(known, of_loss, 0.5f / of_loss);
    for (int b = 0; b < SLOTS; b++) {
      if (row->start[b] != row->start[b]) row->start[b] = of_loss;
    }
  }
#endif
}

kernel void NAME(step)(device const Head *head [[buffer(0)]], device const Row *row [[buffer(1)]],
                       device const Fault *fault [[buffer(2)]], device ELEMENT *x [[buffer(3)]],
                       device const ELEMENT *g [[buffer(4)]], device REAL *kept [[buffer(5)]],
                       unsigned int first [[thread_position_in_grid]],
                       unsigned int stride [[threads_per_grid]]) {
  if (fault->loss | fault->norm) return;
  const Scalars scalars = row->scalars;
  const unsigned int n = row->n;
  const bool starts = row->starts != 0;
  for (unsigned int i = first; i < n; i += stride) {
    REAL state[SLOTS];
    for (int b = 0; b < BUFFERS; b++) state[b] = starts ? row->start[b] : kept[b * n + i];
    x[i] = NARROW(update(scalars, WIDEN(x[i]), CLIPPED(WIDEN(g[i])), state));
    for (int b = 0; b < BUFFERS; b++) kept[b * n + i] = state[b];
  }
}

#ifdef REDUCES
#define PART_COUNT(n) (((n) + PART - 1) / PART)
#define CHUNK_COUNT(n) (((n) + PART * PARTS - 1) / (PART * PARTS))
kernel void NAME(lanes)(device const Head *head [[buffer(0)]], device const Row *row [[buffer(1)]],
                        device float *lanes [[buffer(2)]], device const ELEMENT *x [[buffer(3)]],
                        device const ELEMENT *g [[buffer(4)]], device REAL *kept [[buffer(5)]],
                        unsigned int first [[thread_position_in_grid]],
                        unsigned int stride [[threads_per_grid]]) {
  const unsigned int n = row->n;
  for (unsigned int t = first; t < PART_COUNT(n) * LANES; t += stride) {
    const unsigned int part = t / LANES;
    const unsigned int end = (part + 1) * PART < n ? (part + 1) * PART : n;
    float sums[SUMS] = {0};
    for (unsigned int i = part * PART + t % LANES; i < end; i += LANES) {
      float state[SLOTS], share[SUMS];
      for (int b = 0; b < BUFFERS; b++) state[b] = kept[b * n + i];
      reduce(WIDEN(x[i]), CLIPPED(WIDEN(g[i])), state, share);
      for (int k = 0; k < SUMS; k++) sums[k] += share[k];
    }
    for (int k = 0; k < SUMS; k++) lanes[(row->first_chunk * PARTS * LANES + t) * SUMS + k] = sums[k];
  }
}

kernel void NAME(chunks)(device const Row *row [[buffer(0)]], device const float *lanes [[buffer(1)]],
                         device float *chunks [[buffer(2)]], unsigned int first [[thread_position_in_grid]],
                         unsigned int stride [[threads_per_grid]]) {
  const unsigned int parts = PART_COUNT(row->n);
  for (unsigned int c = first; c < CHUNK_COUNT(row->n); c += stride) {
    const unsigned int end = (c + 1) * PARTS < parts ? (c + 1) * PARTS : parts;
    for (int k = 0; k < SUMS; k++) {
      float chunk = 0;
      for (unsigned int part = c * PARTS; part < end; part++) {
        float sum = 0;
        for (unsigned int lane = 0; lane < LANES; lane++) {
          sum += lanes[((row->first_chunk * PARTS + part) * LANES + lane) * SUMS + k];
        }
        chunk += sum;
      }
      chunks[(row->first_chunk + c) * SUMS + k] = chunk;
    }
  }
}

// By one thread.
kernel void NAME(total)(device const Head *head [[buffer(0)]], device const Row *rows [[buffer(1)]],
                        device const float *chunks [[buffer(2)]], device float *totals [[buffer(3)]],
                        unsigned int first [[thread_position_in_grid]]) {
  if (first > 0) return;
  for (int k = 0; k < SUMS; k++) {
    float total = 0;
    for (unsigned int r = 0; r < head->rows; r++) {
      float sum = 0;
      for (unsigned int c = 0; c < CHUNK_COUNT(rows[r].n); c++) {
        sum += chunks[(rows[r].first_chunk + c) * SUMS + k];
      }
      total += sum;
    }
    totals[k] = finish(total);
  }
}
#undef PART_COUNT
#undef CHUNK_COUNT
#endif

#undef CLIPPED
