// The next token of each row: the largest logit, or one drawn from softmax(logits / temperature). A
// block a row.
//
// Drawing inverts the running sum of the weights w_i = exp((z_i - max z) / t). Weights are F32,
// sums F64: the row is cut into parts of 1024 logits, a warp sums a part, the parts are added in
// order, and in the part in which the sum passes its bound one warp finds the place.
//
// Every vocabulary up to 2^20. Shared memory: 8.5 KB. At most 64 registers.

#ifndef TEMPERATURE
#define TEMPERATURE 0
#endif

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP;
constexpr int PART = 1024;
constexpr int PART_OF_LANE = PART / WARP;
constexpr int MAX_PARTS = (1 << 20) / PART;

struct SampleParams {
  const float* logits;       // [rows, vocab]
  const float* temperature;  // [1], or null
  const float* random;       // [rows], or null
  int* ids;                  // [rows]
  i64 vocab;
};

static_assert(sizeof(SampleParams) == 40, "the host mirrors this");

// Larger means chosen before: by the logit, then by the smaller id.
__device__ __forceinline__ u64 candidate(float logit, i64 id) {
  return u64(selection_key(logit)) << 32 | u32(~u32(id));
}

// The id of the largest logit, in all threads.
__device__ __forceinline__ i64 largest(const float* logits, i64 vocab) {
  __shared__ u64 bests[WARPS];
  u64 best = 0;
  for (i64 i = threadIdx.x; i < vocab; i += THREADS) {
    u64 next = candidate(logits[i], i);
    best = next > best ? next : best;
  }
  best = warp_max(best);
  if (threadIdx.x % WARP == 0) bests[threadIdx.x / WARP] = best;
  __syncthreads();
  best = warp_max(bests[threadIdx.x % WARP]);
  return u32(~u32(best));
}

#if TEMPERATURE

struct Scale {
  float top;
  float temperature;
};

// Halves and doubles, so that no difference of two F32 is out of range.
__device__ __forceinline__ float weight(float logit, Scale scale) {
  if (logit == scale.top) return 1.0f;
  float scaled = (0.5f * logit - 0.5f * scale.top) / scale.temperature * 2.0f;
  return scaled == scaled ? expf(scaled) : 0.0f;
}

// The sum of this lane's logits of a part.
__device__ __forceinline__ double lane_sum(const float* logits, i64 first, i64 vocab,
                                           Scale scale) {
  double sum = 0.0;
  for (int i = 0; i < PART_OF_LANE; i++) {
    if (first + i < vocab) sum += double(weight(logits[first + i], scale));
  }
  return sum;
}

__device__ __forceinline__ double lanes_before(double sum) {
  double before = sum;
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    double other = __shfl_up_sync(FULL, before, step);
    if (threadIdx.x % WARP >= step) before += other;
  }
  return before - sum;
}

// The place in the row at which the running sum passes `bound`, by the warp of the part that begins
// at `begin` with the sum `before`: the first id whose sum is above it, else the last with weight;
// -1 if there is none. In all lanes.
__device__ __forceinline__ int find(const float* logits, i64 vocab, Scale scale, i64 begin,
                                    double before, double bound) {
  int lane = threadIdx.x % WARP;
  i64 first = begin + lane * PART_OF_LANE;
  double sum = before + lanes_before(lane_sum(logits, first, vocab, scale));
  int passed = -1, last = -1;
  for (int i = 0; i < PART_OF_LANE; i++) {
    if (first + i >= vocab) break;
    float w = weight(logits[first + i], scale);
    if (!(w > 0.0f)) continue;
    sum += double(w);
    last = int(first + i);
    if (passed < 0 && sum > bound) passed = last;
  }
  u32 lanes = __ballot_sync(FULL, passed >= 0);
  if (lanes) return __shfl_sync(FULL, passed, __ffs(int(lanes)) - 1);
  lanes = __ballot_sync(FULL, last >= 0);
  if (lanes) return __shfl_sync(FULL, last, 31 - __clz(int(lanes)));
  return -1;
}

// An id drawn by the row's random number; -1 if no logit has weight.
__device__ __forceinline__ int draw(const float* logits, i64 vocab, Scale scale, float random) {
  __shared__ double sums[MAX_PARTS];
  int parts = int((vocab + PART - 1) / PART);
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  for (int part = warp; part < parts; part += WARPS) {
    double sum = lane_sum(logits, i64(part) * PART + lane * PART_OF_LANE, vocab, scale);
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(FULL, sum, step);
    if (lane == 0) sums[part] = sum;
  }
  __syncthreads();
  if (warp > 0) return -1;
  double total = 0.0;
  for (int part = 0; part < parts; part++) total += sums[part];
  // fmaxf takes 0 for NaN.
  double bound = double(fmaxf(random, 0.0f)) * total;
  // The part in which the sum passes the bound, or else the last with weight.
  int chosen = -1;
  double sum = 0.0, before = 0.0;
  for (int part = 0; part < parts; part++) {
    if (!(sums[part] > 0.0)) continue;
    chosen = part;
    before = sum;
    sum += sums[part];
    if (sum > bound) break;
  }
  if (chosen < 0) return -1;
  return find(logits, vocab, scale, i64(chosen) * PART, before, bound);
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    portable_sample(const __grid_constant__ SampleParams p) {
  follow_predecessor();
  i64 row = blockIdx.x;
  const float* logits = p.logits + row * p.vocab;
  int id = int(largest(logits, p.vocab));
#if TEMPERATURE
  float temperature = *p.temperature;
  if (temperature > 0.0f) {
    int drawn = draw(logits, p.vocab, Scale{logits[id], temperature}, p.random[row]);
    if (drawn >= 0) id = drawn;
  }
#endif
  if (threadIdx.x == 0) p.ids[row] = id;
}
