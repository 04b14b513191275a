// One step of one rule, for parameters of one dtype: rule and dtype are set by macros and by the text before this.
//
// A step is one launch for all parameters: blockIdx.y chooses the row of a table, threads stride over its elements.
// No kernel uses shared memory, barriers or atomics, and every sum has one fixed order, so that a result depends
// neither on the grid nor on the order in which threads run: a serial run of this text on a CPU has the same bits.

typedef unsigned long long Count;

struct Head {
  double scale, limit;  // of the gradient
  double max_norm;      // what a deferred norm is clipped to
  Count rows;
  Count step;  // its number, from 1
};

struct Row {
  ELEMENT *x;
  const ELEMENT *g;
  REAL *state;  // buffer b of element i is at b * n + i
  Count n;
  Count first_chunk;  // of this row in the scratch of a reduction
  double offset;      // c, which the rule adds to the loss
  REAL start[SLOTS];  // what the state is before the first step; NaN for the root of the loss
  Scalars scalars;
  unsigned int starts;  // whether this is the first step
};

// What went wrong on the device stays here, and stops every later step: the number of the first step with a loss, and of
// the first with a norm, that was refused; 0 for none.
struct Fault {
  unsigned int loss, norm;
};

#define FIRST ((Count)blockIdx.x * blockDim.x + threadIdx.x)
#define STRIDE ((Count)gridDim.x * blockDim.x)

FN REAL clipped(const Head *head, REAL g) {
  const REAL limit = (REAL)head->limit;
  return at_least(at_most(g * (REAL)head->scale, limit), -limit);
}

// Puts into the table what the host has not seen: the loss, and the norm of all gradients. Either may be null.
extern "C" __global__ void NAME(begin)(Head *head, Row *rows, const float *loss32, const double *loss64,
                                       const double *norm, Fault *fault) {
  if (norm && FIRST == 0) {
    const double factor = head->max_norm / (*norm + 1e-6);
    if (is_finite(*norm) && factor == factor) {
      head->scale *= factor < 1.0 ? factor : 1.0;
    } else {
      if (!fault->norm) fault->norm = (unsigned int)head->step;
    }
  }
  if (!loss32 && !loss64) return;
  const double loss = loss32 ? (double)*loss32 : *loss64;
  if (!is_finite(loss)) {
    if (!fault->loss) fault->loss = (unsigned int)head->step;
    return;
  }
#ifdef FOLLOWS_LOSS
  for (Count r = FIRST; r < head->rows; r += STRIDE) {
    const double sum = loss + rows[r].offset;
    if (!(sum > 0) || !is_finite(sum)) {
      if (!fault->loss) fault->loss = (unsigned int)head->step;
      continue;
    }
    const double of_loss = root(sum);
    rows[r].scalars = follow(rows[r].scalars, (REAL)of_loss, (REAL)(0.5 / of_loss));
    for (int b = 0; b < SLOTS; b++) {
      if (rows[r].start[b] != rows[r].start[b]) rows[r].start[b] = (REAL)of_loss;
    }
  }
#endif
}

extern "C" __global__ void NAME(step)(const Head *head, const Row *rows, const Fault *fault) {
  if (fault->loss | fault->norm) return;
  const Row *row = rows + blockIdx.y;
  const Scalars scalars = row->scalars;
  ELEMENT *x = row->x;
  const ELEMENT *g = row->g;
  REAL *kept = row->state;
  const Count n = row->n;
  const bool starts = row->starts != 0;
  for (Count i = FIRST; i < n; i += STRIDE) {
    REAL state[SLOTS];
    for (int b = 0; b < BUFFERS; b++) state[b] = starts ? row->start[b] : kept[b * n + i];
    x[i] = NARROW(update(scalars, WIDEN(x[i]), clipped(head, WIDEN(g[i])), state));
    for (int b = 0; b < BUFFERS; b++) kept[b * n + i] = state[b];
  }
}

#ifdef REDUCES
// Sums over all elements of all rows. A chunk has PARTS parts of PART elements, and a part LANES lanes, each summed in
// the order of its elements; then lanes, parts, chunks and rows are summed in their order, as on the CPU.
#define PART_COUNT(n) (((n) + PART - 1) / PART)
#define CHUNK_COUNT(n) (((n) + PART * PARTS - 1) / (PART * PARTS))

extern "C" __global__ void NAME(lanes)(const Head *head, const Row *rows, double *lanes) {
  const Row *row = rows + blockIdx.y;
  const Count n = row->n;
  for (Count t = FIRST; t < PART_COUNT(n) * LANES; t += STRIDE) {
    const Count part = t / LANES;
    const Count end = (part + 1) * PART < n ? (part + 1) * PART : n;
    double sums[SUMS] = {0};
    for (Count i = part * PART + t % LANES; i < end; i += LANES) {
      double state[SLOTS], share[SUMS];
      for (int b = 0; b < BUFFERS; b++) state[b] = row->state[b * n + i];
      reduce(WIDEN(row->x[i]), clipped(head, WIDEN(row->g[i])), state, share);
      for (int k = 0; k < SUMS; k++) sums[k] += share[k];
    }
    for (int k = 0; k < SUMS; k++) lanes[(row->first_chunk * PARTS * LANES + t) * SUMS + k] = sums[k];
  }
}

extern "C" __global__ void NAME(chunks)(const Row *rows, const double *lanes, double *chunks) {
  const Row *row = rows + blockIdx.y;
  const Count parts = PART_COUNT(row->n);
  for (Count c = FIRST; c < CHUNK_COUNT(row->n); c += STRIDE) {
    const Count end = (c + 1) * PARTS < parts ? (c + 1) * PARTS : parts;
    const double *from = lanes + row->first_chunk * PARTS * LANES * SUMS;
    for (int k = 0; k < SUMS; k++) {
      double chunk = 0;
      for (Count part = c * PARTS; part < end; part++) {
        double sum = 0;
        for (Count lane = 0; lane < LANES; lane++) sum += from[(part * LANES + lane) * SUMS + k];
        chunk += sum;
      }
      chunks[(row->first_chunk + c) * SUMS + k] = chunk;
    }
  }
}

// By one thread.
extern "C" __global__ void NAME(total)(const Head *head, const Row *rows, const double *chunks, double *totals) {
  for (int k = 0; k < SUMS; k++) {
    double total = 0;
    for (Count r = 0; r < head->rows; r++) {
      const double *from = chunks + rows[r].first_chunk * SUMS + k;
      double sum = 0;
      for (Count c = 0; c < CHUNK_COUNT(rows[r].n); c++) sum += from[c * SUMS];
      total += sum;
    }
    totals[k] = finish(total);
  }
}
#undef PART_COUNT
#undef CHUNK_COUNT
#endif

#undef FIRST
#undef STRIDE
