// Runs the program before it on the job in `input`: see `Job` in job.rs.
#define DISPATCH(threads, kernel, ...) \
  for (unsigned first = 0; first < (threads); first++) kernel(__VA_ARGS__, first, (threads))

static void run() {
  const bool only_reduce = get<uint32_t>();
  const uint32_t rows = get<uint32_t>(), steps = get<uint32_t>();
  Head *head = allocate<Head>(1);
  Row *table = allocate<Row>(rows);
  Fault *fault = allocate<Fault>(1);
  uint32_t chunks = 0;
  std::vector<ELEMENT *> x(rows), g(rows);
  std::vector<REAL *> state(rows);
  for (uint32_t r = 0; r < rows; r++) {
    Row &row = table[r];
    row.n = (uint32_t)get<uint64_t>();
    row.first_chunk = chunks;
    chunks += (row.n + PART * PARTS - 1) / (PART * PARTS);
    x[r] = allocate<ELEMENT>(row.n);
    g[r] = allocate<ELEMENT>(row.n);
    state[r] = allocate<REAL>(row.n * BUFFERS);
    read_bytes(x[r], row.n * sizeof(ELEMENT));
    read_bytes(state[r], row.n * BUFFERS * sizeof(REAL));
  }
  float *loss = allocate<float>(1), *norm = allocate<float>(1);
  for (uint32_t t = 0; t < steps; t++) {
    head->scale = (float)get<double>(), head->limit = (float)get<double>(), head->max_norm = (float)get<double>();
    head->rows = rows, head->step = t + 1;
    const uint32_t given = get<uint32_t>();
    *loss = (float)get<double>(), *norm = (float)get<double>();
    for (uint32_t r = 0; r < rows; r++) {
      Row &row = table[r];
      row.offset = (float)get<double>();
      for (int b = 0; b < SLOTS; b++) row.start[b] = (float)get<double>();
      float *scalars = reinterpret_cast<float *>(&row.scalars);
      for (size_t k = 0; k < sizeof(Scalars) / sizeof(float); k++) scalars[k] = (float)get<double>();
      row.starts = get<uint32_t>();
      read_bytes(g[r], row.n * sizeof(ELEMENT));
    }
#ifdef REDUCES
    if (only_reduce) {
      float *lanes = allocate<float>(chunks * PARTS * LANES * SUMS);
      float *sums = allocate<float>(chunks * SUMS), *totals = allocate<float>(SUMS);
      for (uint32_t r = 0; r < rows; r++) {
        DISPATCH(96, NAME(lanes), head, table + r, lanes, x[r], g[r], state[r]);
        DISPATCH(3, NAME(chunks), table + r, lanes, sums);
      }
      NAME(total)(head, table, sums, totals, 0);
      const double wide[SUMS] = {totals[0], totals[1]};
      put_bytes(wide, sizeof wide);
      return;
    }
#endif
    const unsigned which = (given & 3 ? 1 : 0) | (given & 4 ? 2 : 0);
    if (which) DISPATCH(5, NAME(begin), head, table, loss, norm, fault, which);
    for (uint32_t r = 0; r < rows; r++) DISPATCH(96, NAME(step), head, table + r, fault, x[r], g[r], state[r]);
  }
  for (uint32_t r = 0; r < rows; r++) {
    put_bytes(x[r], table[r].n * sizeof(ELEMENT));
    put_bytes(state[r], table[r].n * BUFFERS * sizeof(REAL));
  }
  put_bytes(fault, sizeof *fault);
}
#undef DISPATCH
