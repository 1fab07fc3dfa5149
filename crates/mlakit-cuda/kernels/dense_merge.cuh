// The merge of dense decode's partial results, inside the launch that made them.
//
// Every block that shares a tile with others stores its partial, counts itself in the tile's
// counter, and then waits for the others: a wide barrier of a microsecond in the place of a second
// launch. Then each merges its own slice of the tile's (row, eight columns) groups over all splits.
// The waiting is why all blocks of the grid must be resident together: the host launches
// cooperatively, with at most one block for each multiprocessor.
//
// First the warps turn each row's LSEs into weights (one warp a row, in shared memory), while the
// first partials are already on their way; then every thread adds its share of the splits of one
// group, and the shares are added in a fixed order. The shares depend on the shape of the work
// alone, and with fixed splits on their size alone; and a split of weight 0 adds nothing. So with
// fixed splits a row's bits are the same whatever other rows see.
//
// A split whose LSE is -inf has weight 0 and adds nothing, whatever its payload: it may be loaded
// (loads begin before the weights are known) but never reaches a sum. One whose LSE is NaN had a
// score that is not finite, and makes the row NaN.
//
// Columns inside a partial are permuted as the accumulators of the matrix products have them, so
// that stores and loads are 16 bytes wide; nothing outside the kernel reads them. Wide tiles: of
// each 32 columns, thread t of a quad holds columns 8 j + 2 t and 8 j + 2 t + 1 for j = 0..3 side
// by side. Narrow tiles: group 32 h + 8 w + g of a row holds columns 256 h + 64 j + 16 w + 8 e + g
// for j = 0..3 and e = 0, 1.

constexpr int MERGE_THREADS = 256;
constexpr int GROUP_COLUMNS = 8;
constexpr int GROUPS_PER_ROW = VALUE_WIDTH / GROUP_COLUMNS;
constexpr int IN_FLIGHT = 5;  // loads a thread has on the way; 32 lanes of 5 cover 132 splits
constexpr int PARTIAL_BYTES = PARTIAL_F32 ? 4 : 2;
constexpr int MERGE_SHARES_BYTES = MERGE_THREADS * GROUP_COLUMNS * 4;
constexpr int MAX_MERGE_WEIGHTS = 16384;  // in shared memory; also the most splits of a request
#define NEGATIVE_INFINITY __int_as_float((int)0xff800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

// One block's part in merging one request.
struct Slice {
  int begin;   // first group: row * GROUPS_PER_ROW + group of the row
  int end;
  int width;   // log2 of the groups merged at once; the other threads share the splits
  int first_row;   // of the slice
  int rows;        // whose weights fit in shared memory
  float* shares;   // [MERGE_THREADS][GROUP_COLUMNS]
  float* weights;  // [rows of the slice][splits]
};

struct Group {
  u32 word[PARTIAL_F32 ? 8 : 4];
};

DEVICE Group load_group(const char* address) {
  Group g;
  const uint4 a = load_fresh_16(address);
  g.word[0] = a.x, g.word[1] = a.y, g.word[2] = a.z, g.word[3] = a.w;
#if PARTIAL_F32
  const uint4 b = load_fresh_16(address + 16);
  g.word[4] = b.x, g.word[5] = b.y, g.word[6] = b.z, g.word[7] = b.w;
#endif
  return g;
}

DEVICE void add_group(float (&sum)[GROUP_COLUMNS], const Group& g, float weight) {
  if (weight == 0.f) return;
#pragma unroll
  for (int i = 0; i < GROUP_COLUMNS; ++i) {
#if PARTIAL_F32
    sum[i] += weight * __uint_as_float(g.word[i]);
#else
    sum[i] += weight * (i % 2 ? bf16_high(g.word[i / 2]) : bf16_low(g.word[i / 2]));
#endif
  }
}

DEVICE void store_group(char* address, const float (&v)[GROUP_COLUMNS]) {
#if PARTIAL_F32
  ((float4*)address)[0] = make_float4(v[0], v[1], v[2], v[3]);
  ((float4*)address)[1] = make_float4(v[4], v[5], v[6], v[7]);
#else
  *(uint4*)address = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
#endif
}

// Two neighbouring outputs, which may begin at any element.
DEVICE void store_outputs(char* to, u32 pair) {
  if ((u64)to & 2) {
    ((unsigned short*)to)[0] = pair;
    ((unsigned short*)to)[1] = pair >> 16;
  } else {
    *(u32*)to = pair;
  }
}

// Partials lie [slot][row][VALUE_WIDTH], their LSEs [row][slot]; `flat_row`: of the row's tile. Rows
// are those of the tile, or all pairs of the launch.
DEVICE char* partial_row(const DenseParams& p, int flat_row, int slot, int row) {
  const bool all = p.partial_rows == 0;
  const u64 at = (u64)slot * (u32)(all ? p.rows * p.heads : p.partial_rows) +
                 (u32)(all ? flat_row + row : row);
  return p.partials + at * (VALUE_WIDTH * PARTIAL_BYTES);
}

DEVICE float* partial_lse(const DenseParams& p, int flat_row, int slot, int row) {
  return p.partial_lse + (u64)(u32)(p.partial_rows == 0 ? flat_row + row : row) * p.slots + slot;
}

// What makes a split's weight into its share of the row: one over the sum of all.
DEVICE float share_of_weight(float sum, bool spoilt) {
  return spoilt ? NOT_A_NUMBER : sum > 0.f ? 1.f / sum : 0.f;
}

// The row's LSE (base 2), if the slice holds the row's first group.
DEVICE void store_row_lse(const DenseParams& p, const Request& r, const Slice& slice, int row,
                          float lse) {
  if (row * GROUPS_PER_ROW >= slice.begin)
    p.lse[(u64)r.flat_row + row] = lse * p.lse_scale;
}

// LSEs of a row on their way: of splits first, first + step, ...
struct Lses {
  float of[IN_FLIGHT];
};

DEVICE void load_lses(const DenseParams& p, const Request& r, const Sharing& h, const Slice& slice,
                      int3 row_first_step, Lses& lses) {
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    const int split = imin(row_first_step.y + row_first_step.z * i, h.splits - 1);
    const int slot = slot_of_split(p, h, split);
    lses.of[i] = load_fresh(partial_lse(p, r.flat_row, slot, row_first_step.x));
  }
}

// The LSEs that this thread weighs first, so that they come before the partials.
DEVICE void load_first_lses(const DenseParams& p, const Request& r, const Sharing& h,
                            const Slice& slice, Lses& lses) {
  const int thread = threadIdx.x % MERGE_THREADS, last_row = (slice.end - 1) / GROUPS_PER_ROW;
  const bool alone = h.splits <= IN_FLIGHT;
  const int row = imin(slice.first_row + (alone ? thread : thread / 32), last_row);
  load_lses(p, r, h, slice, make_int3(row, alone ? 0 : thread % 32, alone ? 1 : 32), lses);
}

// One warp: the weights of a row's splits, and its LSE. `lses`: the first, for the lanes.
DEVICE void weigh_row(const DenseParams& p, const Request& r, const Sharing& h, const Slice& slice,
                      int row, Lses& lses) {
  const int lane = threadIdx.x % 32;
  float* weights = slice.weights + (row - slice.first_row) * h.splits;
  float top = NEGATIVE_INFINITY, sum = 0.f;
  bool spoilt = false;
#pragma unroll 1
  for (int first = lane; first < h.splits; first += 32 * IN_FLIGHT) {
    if (first != lane) load_lses(p, r, h, slice, make_int3(row, first, 32), lses);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const float lse = lses.of[i];
      spoilt |= lse != lse;
      top = fmaxf(top, lse);
      if (first + 32 * i < h.splits) weights[first + 32 * i] = lse;
    }
  }
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float base = top == NEGATIVE_INFINITY ? 0.f : top;
  for (int i = lane; i < h.splits; i += 32) {
    weights[i] = exp2_fast(weights[i] - base);
    sum += weights[i];
  }
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  spoilt = __any_sync(~0u, spoilt);
  const float share = share_of_weight(sum, spoilt);
  for (int i = lane; i < h.splits; i += 32) weights[i] *= share;
  if (lane == 0)
    store_row_lse(p, r, slice, row, spoilt ? NOT_A_NUMBER : base + log2_fast(sum));
}

// The same for at most IN_FLIGHT splits, by one thread, which adds them as a warp does.
static_assert(IN_FLIGHT == 5, "the sum of a row's weights is written out");
DEVICE void weigh_row_alone(const DenseParams& p, const Request& r, const Sharing& h,
                            const Slice& slice, int row, const Lses& lses) {
  float lse[IN_FLIGHT], top = NEGATIVE_INFINITY, sum = 0.f;
  bool spoilt = false;
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) lse[i] = lses.of[i];
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    if (i >= h.splits) lse[i] = NEGATIVE_INFINITY;
    spoilt |= lse[i] != lse[i];
    top = fmaxf(top, lse[i]);
  }
  const float base = top == NEGATIVE_INFINITY ? 0.f : top;
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) lse[i] = exp2_fast(lse[i] - base);
  sum = lse[0] + lse[4] + lse[2] + (lse[1] + lse[3]);
  const float share = share_of_weight(sum, spoilt);
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i)
    if (i < h.splits) slice.weights[(row - slice.first_row) * h.splits + i] = lse[i] * share;
  store_row_lse(p, r, slice, row, spoilt ? NOT_A_NUMBER : base + log2_fast(sum));
}

// The slice's weights, one warp a row, or one thread where the splits are few.
DEVICE void weigh_rows(const DenseParams& p, const Request& r, const Sharing& h,
                       const Slice& slice, Lses& lses) {
  const int last_row = (slice.end - 1) / GROUPS_PER_ROW;
  if (h.splits <= IN_FLIGHT) {
    const int row = slice.first_row + threadIdx.x % MERGE_THREADS;
    if (row <= last_row) weigh_row_alone(p, r, h, slice, row, lses);
    named_barrier(1, MERGE_THREADS);
    return;
  }
  const int first = slice.first_row + threadIdx.x / 32 % (MERGE_THREADS / 32);
#pragma unroll 1
  for (int row = first; row <= last_row; row += MERGE_THREADS / 32) {
    if (row != first) load_lses(p, r, h, slice, make_int3(row, threadIdx.x % 32, 32), lses);
    weigh_row(p, r, h, slice, row, lses);
  }
  named_barrier(1, MERGE_THREADS);
}

// Stores two merged columns of a group in their place in the output.
DEVICE void store_pair(const DenseParams& p, const Request& r, int2 group_pair, float low,
                       float high) {
  const int row = group_pair.x / GROUPS_PER_ROW, within = group_pair.x % GROUPS_PER_ROW;
  const int pair = group_pair.y;
  char* out = p.out + ((u64)r.flat_row + row) * (VALUE_WIDTH * 2);
  const u32 word = pack_bf16(low, high);
#if NARROW
  const int column = within / 32 * 256 + pair * 64 + within % 32 / 8 * 16 + within % 8;
  *(unsigned short*)(out + column * 2) = word;
  *(unsigned short*)(out + column * 2 + 16) = word >> 16;
#else
  const int column = within / 4 * 32 + pair * 8 + within % 4 * 2;
  store_outputs(out + column * 2, word);
#endif
}

// Adds the lanes' shares of each group and stores two columns a thread.
DEVICE void store_shares(const DenseParams& p, const Request& r, const Slice& slice, int base,
                         const float (&sum)[GROUP_COLUMNS]) {
  const int thread = threadIdx.x % MERGE_THREADS, groups = 1 << slice.width;
  const int mine = thread & (groups - 1);
  const int entry = groups < 32 ? thread / 32 : thread >> slice.width;
  const int entries = groups < 32 ? MERGE_THREADS / 32 : MERGE_THREADS >> slice.width;
  if (groups >= 32 || thread % 32 < groups) {
    float4* share = (float4*)(slice.shares + (entry * groups + mine) * GROUP_COLUMNS);
    share[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    share[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  }
  named_barrier(1, MERGE_THREADS);
  for (int i = thread; i < groups * 4; i += MERGE_THREADS) {
    if (base + i / 4 >= slice.end) continue;
    float low = 0.f, high = 0.f;
#pragma unroll 4
    for (int e = 0; e < entries; ++e) {
      const float* share = slice.shares + (e * groups * 4 + i) * 2;
      low += share[0];
      high += share[1];
    }
    store_pair(p, r, make_int2(base + i / 4, i % 4), low, high);
  }
  named_barrier(1, MERGE_THREADS);
}

// One pass: the groups from `base` on. The first pass makes the weights while its partials come.
DEVICE void merge_pass(const DenseParams& p, const Request& r, const Sharing& h,
                       const Slice& slice, int base) {
  const int thread = threadIdx.x % MERGE_THREADS;
  const int mine = thread & ((1 << slice.width) - 1), lanes = MERGE_THREADS >> slice.width;
  const int group = imin(base + mine, slice.end - 1), row = group / GROUPS_PER_ROW;
  const u32 column = group % GROUPS_PER_ROW * (GROUP_COLUMNS * PARTIAL_BYTES);
  const float* weights = slice.weights + (row - slice.first_row) * h.splits;
  float sum[GROUP_COLUMNS] = {};
  bool weigh = base == slice.begin;
  Lses lses;
  if (weigh) load_first_lses(p, r, h, slice, lses);
#pragma unroll 1
  for (int split = thread >> slice.width, done = 0; done < h.splits; done += IN_FLIGHT * lanes) {
    Group g[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int slot = slot_of_split(p, h, imin(split + i * lanes, h.splits - 1));
      g[i] = load_group(partial_row(p, r.flat_row, slot, row) + column);
    }
    if (weigh) weigh_rows(p, r, h, slice, lses);
    weigh = false;
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i, split += lanes)
      if (split < h.splits) add_group(sum, g[i], weights[split]);
  }
  for (int d = 1 << slice.width; d < 32; d *= 2)
#pragma unroll
    for (int i = 0; i < GROUP_COLUMNS; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
  if (lanes > 1) {
    store_shares(p, r, slice, base, sum);
  } else if (base + mine < slice.end) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_pair(p, r, make_int2(group, i), sum[2 * i], sum[2 * i + 1]);
  }
}

// The threads that share the splits of a group are a power of two that follows from the size of the
// splits alone where that is fixed: many splits have many threads.
DEVICE int width_of_fixed(int fixed_blocks) {
  return fixed_blocks < 8 ? 3 : fixed_blocks < 32 ? 4 : 5;
}

// This block's slice of one tile, where `part` of the tile's blocks it is. `shared`: what the ring
// of key blocks held.
DEVICE Slice slice_of(const DenseParams& p, const Request& r, const Sharing& h, int part,
                      char* shared) {
  const u32 all = r.rows * GROUPS_PER_ROW;
  const u32 each = (all + h.blocks - 1) / (u32)h.blocks;
  Slice s;
  s.end = umin(each * (part + 1), all);
  s.begin = umin(each * part, all);
  s.width = p.fixed_blocks ? width_of_fixed(p.fixed_blocks) : 3;
  if (!p.fixed_blocks)
    while (s.width < 8 && (1u << s.width) < each) ++s.width;
  s.shares = (float*)shared;
  s.weights = (float*)(shared + MERGE_SHARES_BYTES);
  s.rows = imax(MAX_MERGE_WEIGHTS / h.splits, 1);
  s.first_row = s.begin / GROUPS_PER_ROW;
  return s;
}

// Merges a slice, as many rows at once as have room for their weights.
DEVICE void merge_slice(const DenseParams& p, const Request& r, const Sharing& h, Slice s) {
  const int end = s.end;
  while (s.begin < end) {
    s.first_row = s.begin / GROUPS_PER_ROW;
    s.end = imin(end, (s.first_row + s.rows) * GROUPS_PER_ROW);
    for (int base = s.begin; base < s.end; base += 1 << s.width) merge_pass(p, r, h, s, base);
    named_barrier(1, MERGE_THREADS);
    s.begin = s.end;
  }
}

// The counter of a tile that n blocks share: 10 bits of a word of the fault block, three in each word,
// for as many blocks as a grid has. It counts the blocks whose partials are stored up to n, then
// those that need it no more up to 2 n, and then becomes zero again for the next launch.
constexpr int COUNTER_BITS = 10;

DEVICE u32* counter_word(const DenseParams& p, int counter) {
  return p.faults + COUNTER_WORD + (u32)counter / 3;
}

DEVICE u32 counter_one(int counter) { return 1u << (u32)counter % 3 * COUNTER_BITS; }

// Waits until all blocks that share a tile have announced their partials.
DEVICE void await_partials(const DenseParams& p, const Sharing& h) {
  const u32* word = counter_word(p, h.counter);
  const int shift = (u32)h.counter % 3 * COUNTER_BITS;
  while ((load_acquire(word) >> shift) % (1u << COUNTER_BITS) < h.blocks) {
  }
}

// Once for each block that has waited.
DEVICE void leave_counter(const DenseParams& p, const Sharing& h) {
  u32* word = counter_word(p, h.counter);
  const u32 one = counter_one(h.counter), all = 2 * h.blocks;
  const u32 before = add_relaxed(word, one) >> (u32)h.counter % 3 * COUNTER_BITS;
  if (before % (1u << COUNTER_BITS) == all - 1) add_relaxed(word, 0u - all * one);
}
