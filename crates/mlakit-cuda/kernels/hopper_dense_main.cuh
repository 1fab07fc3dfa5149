// Dense decode on Hopper: the roles of a block and the kernel's entry. Comes last.

// ---- roles --------------------------------------------------------------------------------------

// After all of this block's partials are stored: its slices of the tiles that it shares, and the
// whole of those of which it has several splits.
DEVICE void merge_tiles(const Block& b, char* shared) {
  const DenseParams& p = *b.params;
  const Schedule s = b.state->schedule;
  for (Request r = s.first; r.units > 0; next_request(p, s, r)) {
    const Sharing h = sharing_of(p, s, r);
    if (h.splits == 1) continue;
    const Slice slice = slice_of(p, r, h, s.block - h.first_block, shared);
    const bool waits = threadIdx.x == VALUE_THREAD && h.blocks > 1;
    if (waits) await_partials(p, h);
    named_barrier(1, VALUE_THREADS);
    merge_slice(p, r, h, slice);
    if (waits) leave_counter(p, h);
  }
}

// Dynamic shared memory and threads of a block that a launch needs, for the host to read.
extern "C" __constant__ int mlakit_dense_decode_shared_bytes = SHARED_BYTES;
extern "C" __constant__ int mlakit_dense_decode_threads = THREADS;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mlakit_dense_decode(const __grid_constant__ DenseParams params) {
  extern __shared__ char shared_bytes[];
  Block b;
  b.params = &params;
  b.queries = (shared_address(shared_bytes) + 1023) & ~1023u;
  b.ring = b.queries + QUERY_BYTES;
  char* aligned = shared_bytes + (b.queries - shared_address(shared_bytes));
  b.state = (State*)(aligned + QUERY_BYTES + STAGES * STAGE_BYTES);
  const int warp = uniform(threadIdx.x / 32);
  b.half = warp / 4 - VALUE_THREAD / 128;
  allow_next_launch();
  if (threadIdx.x == 0) initialise_barriers(b);
  await_earlier_kernels();
  if (warp == PRODUCER_THREAD / 32) divide_work(b);
  __syncthreads();
  if (warp >= PRODUCER_THREAD / 32) {
    set_registers<PRODUCER_REGISTERS>();
    if (!USE_TENSOR_MAP || warp == PRODUCER_THREAD / 32) produce(b);
#if NARROW
  } else if (warp < VALUE_THREAD / 32) {
    set_registers<SCORE_REGISTERS>();
    score(b);
#endif
  } else {
    set_registers<VALUE_REGISTERS>();
    attend(b);
    merge_tiles(b, aligned + QUERY_BYTES);
  }
}
