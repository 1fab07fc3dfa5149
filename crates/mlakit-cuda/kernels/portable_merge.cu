// Merging partial results (sm_80 and newer), for the operation `merge` and behind dense attention.
//
// Of the parts of one pair (row, head), with log-sum-exps l_s to base b and normalised outputs o_s:
// w_s = b^(l_s - m), m = max l_s; out = sum w_s o_s / (sum w_s + b^(sink - m));
// lse = m + log_b sum w_s.
// Shapes: any number of splits and heads, any width; 16-byte accesses where the width is a multiple
// of 8 and all addresses are of 16.
//
// A block takes one pair at a time. All threads weigh the parts; then 64 threads side by side have
// 8 columns each, and 4 such rows of threads share the splits. Which thread adds which split
// depends on the split's number alone, and parts of weight 0 add nothing, so the bits do not depend
// on how many empty parts there are. Shared memory: 9 KiB.

#ifndef PARTS_F32
#define PARTS_F32 0  // 1: F32 partial outputs
#endif

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int COLUMN_THREADS = 64;
constexpr int SPLIT_THREADS = THREADS / COLUMN_THREADS;
constexpr int VECTOR = 8;  // columns of a thread
constexpr int IN_FLIGHT = 4;  // parts that a thread has on the way

struct MergeParams {
  const u8* outs;      // BF16 or F32 [splits, results, width]
  const float* lses;   // F32 [splits, results]
  const float* sink;   // F32 [heads], natural; or null
  u16* out;            // BF16 [results, width]
  float* lse;          // F32 [results]
  i64 results;         // rows x heads
  int splits;
  int heads;
  int width;
  int nan_spreads;     // 1: a NaN log-sum-exp makes the result NaN; 0: it counts as -inf
  int sink_in_lse;
  int whole_vectors;   // 1: 16-byte accesses
  float log2_of_base;  // of the log-sum-exps of the parts
  float sink_scale;    // from natural logarithms to that base
  float lse_scale;     // from that base to the base of the result
  int reserved;        // 0
};
static_assert(sizeof(MergeParams) == 88, "the host mirrors this");

// What the parts of one pair amount to.
struct Weights {
  float top;     // largest log-sum-exp
  float factor;  // one over the denominator; 0: the output is 0; NaN: it is NaN
  float lse;
};

// A part's log-sum-exp, -inf where it counts as empty.
DEVICE float usable(float lse) { return lse < INFINITE ? lse : -INFINITE; }

DEVICE float weight_of(const MergeParams& p, float lse, float top) {
  return lse == -INFINITE ? 0.f : exp2f(__fmul_rn(__fsub_rn(lse, top), p.log2_of_base));
}

DEVICE float part_lse(const MergeParams& p, i64 result, int split) {
  return p.lses[split * p.results + result];
}

// Of the whole block, the same for all threads: the warps' values are taken in order.
template <bool MAXIMUM>
DEVICE float reduce(float value, float* warps) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float other = __shfl_xor_sync(~0u, value, d);
    value = MAXIMUM ? fmaxf(value, other) : value + other;
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = warps[0];
#pragma unroll
  for (int w = 1; w < WARPS; ++w) value = MAXIMUM ? fmaxf(value, warps[w]) : value + warps[w];
  __syncthreads();
  return value;
}

// The denominator, the sink included, and the log-sum-exp. A sink so large that the rest vanishes
// makes the denominator infinite and the output 0.
DEVICE Weights finish_weights(const MergeParams& p, i64 result, float top, float sum) {
  Weights w = {top, 0.f, top};
  const float sink = p.sink ? p.sink[result % p.heads] : -INFINITE;
  const float in_base = sink * p.sink_scale;
  if (top == -INFINITE) {
    if (p.sink_in_lse) w.lse = in_base;
  } else {
    float denominator = sum;
    if (p.sink) denominator += exp2f((in_base - top) * p.log2_of_base);
    w.factor = __fdiv_rn(1.f, denominator);
    const float counted = p.sink_in_lse ? denominator : sum;
    w.lse = counted < INFINITE ? top + log2f(counted) / p.log2_of_base : in_base;
  }
  w.lse = __fmul_rn(w.lse, p.lse_scale);
  return w;
}

struct Columns {
  float v[VECTOR];
};

// VECTOR columns of a part as they lie in memory: nothing waits for a load before all are on the
// way.
struct Part {
  u32 words[PARTS_F32 ? VECTOR : VECTOR / 2];
};

// `count` columns from element `at` on.
DEVICE Part load_part(const MergeParams& p, i64 at, int count) {
  Part part = {};
  if (p.whole_vectors) {
    const uint4* from = (const uint4*)(p.outs + at * (PARTS_F32 ? 4 : 2));
#pragma unroll
    for (int i = 0; i < (PARTS_F32 ? 2 : 1); ++i) {
      const uint4 four = from[i];
      part.words[4 * i] = four.x, part.words[4 * i + 1] = four.y;
      part.words[4 * i + 2] = four.z, part.words[4 * i + 3] = four.w;
    }
    return part;
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    if (i >= count) continue;
    if (PARTS_F32)
      part.words[i] = ((const u32*)p.outs)[at + i];
    else
      part.words[i / 2] |= (u32)((const u16*)p.outs)[at + i] << (16 * (i % 2));
  }
  return part;
}

DEVICE float column(const Part& part, int i) {
  if (PARTS_F32) return __uint_as_float(part.words[i]);
  return i % 2 ? bf16_high(part.words[i / 2]) : bf16_low(part.words[i / 2]);
}

// What the threads of a block tell each other.
struct Shared {
  float warps[WARPS];
  float weights[THREADS];   // of the first parts; few pairs have more
  Columns shares[THREADS];
};

DEVICE Weights weigh(const MergeParams& p, i64 result, Shared& shared) {
  const int mine = threadIdx.x;
  const float own = mine < p.splits ? part_lse(p, result, mine) : -INFINITE;
  float top = usable(own);
  bool nan = own != own;
  for (int split = mine + THREADS; split < p.splits; split += THREADS) {
    const float lse = part_lse(p, result, split);
    nan |= lse != lse;
    top = fmaxf(top, usable(lse));
  }
  if (__syncthreads_or(nan & (p.nan_spreads != 0))) {
    const float none = __int_as_float(0x7fffffff);
    return {none, none, none};
  }
  top = reduce<true>(top, shared.warps);
  float sum = shared.weights[mine] = weight_of(p, usable(own), top);
  for (int split = mine + THREADS; split < p.splits; split += THREADS)
    sum += weight_of(p, usable(part_lse(p, result, split)), top);
  return finish_weights(p, result, top, reduce<false>(sum, shared.warps));
}

DEVICE float weight_of_part(const MergeParams& p, const Shared& shared, i64 result, int split,
                            float top) {
  if (split < THREADS) return shared.weights[split];
  return split < p.splits ? weight_of(p, usable(part_lse(p, result, split)), top) : 0.f;
}

// This thread's share of the weighted sum of its columns. It begins with -0, to which adding
// changes no bit.
DEVICE Columns add_parts(const MergeParams& p, const Shared& shared, i64 result, int first_column,
                         float top) {
  Columns sum;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) sum.v[i] = -0.f;
#pragma unroll 1
  for (int first = threadIdx.x / COLUMN_THREADS; first < p.splits;
       first += IN_FLIGHT * SPLIT_THREADS) {
    Part parts[IN_FLIGHT];
    float weights[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int split = first + i * SPLIT_THREADS;
      weights[i] = weight_of_part(p, shared, result, split, top);
      if (weights[i] > 0.f)
        parts[i] = load_part(p, (split * p.results + result) * p.width + first_column,
                             p.width - first_column);
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      if (!(weights[i] > 0.f)) continue;
#pragma unroll
      for (int j = 0; j < VECTOR; ++j)
        sum.v[j] = __fmaf_rn(weights[i], column(parts[i], j), sum.v[j]);
    }
  }
  return sum;
}

DEVICE void store_columns(const MergeParams& p, i64 at, int count, const Columns& c) {
  u32 pairs[VECTOR / 2];
#pragma unroll
  for (int i = 0; i < VECTOR / 2; ++i) pairs[i] = pack<false>(c.v[2 * i], c.v[2 * i + 1]);
  if (p.whole_vectors) {
    *(uint4*)(p.out + at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i)
    if (i < count) p.out[at + i] = (u16)(pairs[i / 2] >> (16 * (i % 2)));
}

DEVICE void merge_pair(const MergeParams& p, i64 result, const Weights& w, Shared& shared) {
  const int thread = threadIdx.x % COLUMN_THREADS;
  for (int base = 0; base < p.width; base += COLUMN_THREADS * VECTOR) {
    const int first = base + thread * VECTOR;
    const bool live = first < p.width;
    if (live && w.factor > 0.f)
      shared.shares[threadIdx.x] = add_parts(p, shared, result, first, w.top);
    __syncthreads();
    if (live && threadIdx.x < COLUMN_THREADS) {
      Columns out;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        float sum = shared.shares[thread].v[i];
        for (int s = 1; s < SPLIT_THREADS; ++s)
          sum += shared.shares[s * COLUMN_THREADS + thread].v[i];
        out.v[i] = w.factor > 0.f ? sum * w.factor : w.factor;
      }
      store_columns(p, result * p.width + first, p.width - first, out);
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PARTS_F32 ? 3 : 4)
    portable_merge(const __grid_constant__ MergeParams p) {
  __shared__ Shared shared;
  wait_for_predecessor();
  for (i64 result = blockIdx.x; result < p.results; result += gridDim.x) {
    const Weights w = weigh(p, result, shared);
    merge_pair(p, result, w, shared);
    if (threadIdx.x == 0) p.lse[result] = w.lse;
  }
}
