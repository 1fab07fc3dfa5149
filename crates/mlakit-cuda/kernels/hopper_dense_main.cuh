// Dense decode on Hopper: the roles of a block and the kernel's entry. Comes last.

// ---- roles --------------------------------------------------------------------------------------

DEVICE void score_segment(const Block& b, const Job& job, Rows& rows, Ring& ring) {
  float s[SCORES];
#pragma unroll 1
  for (int j = 0; j < job.blocks; ++j) {
    const int first_key = (job.first_block + j) * BLOCK_TOKENS;
    score_block(b, ring, s);
    weigh_block(b, ring, first_key, rows, s);
    if (first_key + BLOCK_TOKENS > job.kv_len)
      clear_values(stage_address(b, ring.stage), imax(job.kv_len - first_key, 0));
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      mbarrier_arrive(shared_address(&b.state->weighted[ring.stage]));
    advance<STAGES>(ring);
  }
}

DEVICE void score(const Block& b) {
  Rings rings = {{0, 0}, {0, 0}};
  Rows rows;
  for (Job job = take_job(b, rings.jobs); job.blocks > 0; job = take_job(b, rings.jobs)) {
    if (job.new_queries) {
      load_queries(b, job);
      start_rows(b, job, rows);
    }
    reset_rows(rows);
    score_segment(b, job, rows, rings.keys);
    publish_rows(b, rings.jobs, rows);
    advance<JOBS>(rings.jobs);
  }
}

DEVICE void weigh_values(const Block& b) {
  Rings rings = {{0, 0}, {0, 0}};
  for (Job job = take_job(b, rings.jobs); job.blocks > 0; job = take_job(b, rings.jobs)) {
    Outputs out;
    clear_outputs(out);
#pragma unroll 1
    for (int j = 0; j < job.blocks; ++j) {
      add_values(b, rings.keys, job.rows, out);
      advance<STAGES>(rings.keys);
    }
    store_segment(b, job, rings.jobs, out);
    advance<JOBS>(rings.jobs);
    if (job.counter < 0) continue;
    named_barrier(1, VALUE_THREADS);
    if (threadIdx.x == VALUE_THREAD) add_release(b.params->counters + job.counter, 1);
  }
}

// After all of this block's partials are out: its slices of the requests that it shares.
DEVICE void merge_requests(const Block& b, char* shared) {
  const DenseParams& p = *b.params;
  const Schedule s = b.state->schedule;
  int first_unit = s.request_begin;
  for (int index = s.request; index < p.batch && first_unit < s.end; ++index) {
    Request r = load_request(p, index, b.tile);
    r.first_unit = first_unit;
    first_unit += r.units;
    if (r.units == 0) continue;
    const Sharing h = sharing_of(p, s, r);
    if (h.splits == 1) continue;
    u32* counter = p.counters + counter_index(b, r);
    if (threadIdx.x == VALUE_THREAD) await_partials(counter, h.blocks);
    named_barrier(1, VALUE_THREADS);
    merge_slice(p, r, h, make_int2(b.tile, block_index(b) - h.first_block), shared);
    if (threadIdx.x == VALUE_THREAD) leave_counter(counter, h.blocks);
  }
}

// Dynamic shared memory that a launch needs, for the host to read.
extern "C" __constant__ int mlakit_dense_decode_shared_bytes = SHARED_BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mlakit_dense_decode(const __grid_constant__ DenseParams params) {
  extern __shared__ char shared_bytes[];
  Block b;
  b.params = &params;
  b.queries = (shared_address(shared_bytes) + 1023) & ~1023u;
  b.ring = b.queries + QUERY_BYTES;
  char* aligned = shared_bytes + (b.queries - shared_address(shared_bytes));
  b.state = (State*)(aligned + QUERY_BYTES + STAGES * STAGE_BYTES);
  b.tile = blockIdx.x % params.tiles;
  const int warp = uniform(threadIdx.x / 32);
  allow_next_launch();
  if (threadIdx.x == 0) initialise_barriers(b);
  await_earlier_kernels();
  if (warp == PRODUCER_THREAD / 32) divide_work(b);
  __syncthreads();
  if (warp >= PRODUCER_THREAD / 32) {
    release_registers<PRODUCER_REGISTERS>();
    if (!USE_TENSOR_MAP || warp == PRODUCER_THREAD / 32) produce(b);
  } else if (warp < VALUE_THREAD / 32) {
    release_registers<SCORE_REGISTERS>();
    score(b);
  } else {
    take_registers<VALUE_REGISTERS>();
    weigh_values(b);
    merge_requests(b, aligned + QUERY_BYTES);
  }
}
