// Runs the program before it on the job in `input`: see `Job` in job.rs.
static void run() {
  const bool only_reduce = get<uint32_t>();
  const uint32_t rows = get<uint32_t>(), steps = get<uint32_t>();
  const Dim grid = {3, rows}, block = {64, 1};
  Head *head = allocate<Head>(1);
  Row *table = allocate<Row>(rows);
  Fault *fault = allocate<Fault>(1);
  Count chunks = 0;
  std::vector<ELEMENT *> x(rows), g(rows);
  for (uint32_t r = 0; r < rows; r++) {
    Row &row = table[r];
    row.n = get<uint64_t>();
    row.first_chunk = chunks;
    chunks += (row.n + PART * PARTS - 1) / (PART * PARTS);
    row.x = x[r] = allocate<ELEMENT>(row.n);
    row.g = g[r] = allocate<ELEMENT>(row.n);
    row.state = allocate<REAL>(row.n * BUFFERS);
    read_bytes(x[r], row.n * sizeof(ELEMENT));
    read_bytes(row.state, row.n * BUFFERS * sizeof(REAL));
  }
  float *loss32 = allocate<float>(1);
  double *loss64 = allocate<double>(1), *norm = allocate<double>(1);
  for (uint32_t t = 0; t < steps; t++) {
    head->scale = get<double>(), head->limit = get<double>(), head->max_norm = get<double>();
    head->rows = rows, head->step = t + 1;
    const uint32_t given = get<uint32_t>();
    *loss64 = get<double>(), *norm = get<double>();
    *loss32 = (float)*loss64;
    for (uint32_t r = 0; r < rows; r++) {
      Row &row = table[r];
      row.offset = get<double>();
      for (int b = 0; b < SLOTS; b++) row.start[b] = (REAL)get<double>();
      REAL *scalars = reinterpret_cast<REAL *>(&row.scalars);
      for (size_t k = 0; k < sizeof(Scalars) / sizeof(REAL); k++) scalars[k] = (REAL)get<double>();
      row.starts = get<uint32_t>();
      read_bytes(g[r], row.n * sizeof(ELEMENT));
    }
#ifdef REDUCES
    if (only_reduce) {
      double *lanes = allocate<double>(chunks * PARTS * LANES * SUMS);
      double *sums = allocate<double>(chunks * SUMS), *totals = allocate<double>(SUMS);
      launch(grid, block, NAME(lanes), head, table, lanes);
      launch(grid, block, NAME(chunks), table, lanes, sums);
      launch(Dim{1, 1}, Dim{1, 1}, NAME(total), head, table, sums, totals);
      put_bytes(totals, SUMS * sizeof(double));
      return;
    }
#endif
    if (given)
      launch(Dim{1, 1}, Dim{64, 1}, NAME(begin), head, table, given & 1 ? loss32 : nullptr,
             given & 2 ? loss64 : nullptr, given & 4 ? norm : nullptr, fault);
    launch(grid, block, NAME(step), head, table, fault);
  }
  for (uint32_t r = 0; r < rows; r++) {
    put_bytes(x[r], table[r].n * sizeof(ELEMENT));
    put_bytes(table[r].state, table[r].n * BUFFERS * sizeof(REAL));
  }
  put_bytes(fault, sizeof *fault);
}
