// The choice of a router, a warp a row: scores, groups, the best experts, gates.
//
// Shared memory: 4 bytes an expert and 4 a group. At most 80 registers.

#ifndef SOFTMAX
#define SOFTMAX 0  // else sigmoid
#endif
#ifndef TOP_TWO
#define TOP_TWO 1  // the score of a group: its two best, else its best
#endif

// The key of what cannot be chosen, below all others.
constexpr u32 TAKEN = 0;

// Logits to scores, in place; each lane its own experts, which are every 32nd.
__device__ __forceinline__ void score(float* scores, u32 experts) {
  u32 lane = threadIdx.x;
#if SOFTMAX
  float top = -infinity();
  for (u32 i = lane; i < experts; i += WARP) top = fmaxf(top, scores[i]);
  top = warp_max(top);
  float sum = 0.0f;
  for (u32 i = lane; i < experts; i += WARP) {
    float value = expf(scores[i] - top);
    scores[i] = value;
    sum += value;
  }
  sum = warp_sum(sum);
  for (u32 i = lane; i < experts; i += WARP) scores[i] = scores[i] / sum;
#else
  for (u32 i = lane; i < experts; i += WARP) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
#endif
}

// What a group of experts counts.
__device__ __forceinline__ float group_score(const float* compared, u32 size) {
  float first = compared[0], second = 0.0f;
  bool have_second = false;
  for (u32 i = 1; i < size; i++) {
    float next = compared[i];
    if (selection_key(next) > selection_key(first)) {
      second = first;
      first = next;
      have_second = true;
    } else if (!have_second || selection_key(next) > selection_key(second)) {
      second = next;
      have_second = true;
    }
  }
  return TOP_TWO && have_second ? first + second : first;
}

// Marks the groups that a row does not use; `compared` becomes keys.
__device__ __forceinline__ void exclude_groups(const RouteParams& p, u32* keys, u32* group_keys) {
  u32 size = p.experts / p.groups;
  for (u32 g = threadIdx.x; g < p.groups; g += WARP) {
    group_keys[g] = selection_key(group_score((const float*)keys + g * size, size));
  }
  __syncwarp();
  for (u32 g = threadIdx.x; g < p.groups; g += WARP) {
    u32 before = 0, own = group_keys[g];
    for (u32 other = 0; other < p.groups; other++) {
      u32 key = group_keys[other];
      before += key > own || (key == own && other < g);
    }
    bool used = before < p.used_groups;
    for (u32 i = g * size; i < (g + 1) * size; i++) {
      keys[i] = used ? selection_key(__uint_as_float(keys[i])) : TAKEN;
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARP)
    portable_route_select(const __grid_constant__ RouteParams p) {
  extern __shared__ u32 keys[];  // [experts]; behind them those of groups
  follow_predecessor();
  i64 row = blockIdx.x;
  u32 lane = threadIdx.x;
  float* scores = p.scores + row * p.experts;
  bool grouped = p.used_groups < p.groups;
  score(scores, p.experts);
  for (u32 i = lane; i < p.experts; i += WARP) {
    float compared = p.bias ? scores[i] + p.bias[i] : scores[i];
    // Groups are scored by numbers, one expert is chosen by its key.
    keys[i] = grouped ? __float_as_uint(compared) : selection_key(compared);
  }
  __syncwarp();
  if (grouped) exclude_groups(p, keys, keys + p.experts);
  __syncwarp();

  int* ids = p.ids + row * p.used;
  float* gates = p.gates + row * p.used;
  float sum = 0.0f;
  for (u32 place = 0; place < p.used; place++) {
    u64 best = 0;
    for (u32 i = lane; i < p.experts; i += WARP) {
      u64 next = u64(keys[i]) << 32 | u32(~i);
      best = next > best ? next : best;
    }
    u32 expert = ~u32(warp_max(best));
    float gate = scores[expert];
    sum += gate;
    // Lane `place % 32` writes what it will read again below.
    if (lane == place % WARP) {
      ids[place] = int(expert);
      gates[place] = gate;
    }
    // The lane that reads this key writes it: nobody else does either.
    if (lane == expert % WARP) keys[expert] = TAKEN;
  }
  float divisor = p.normalize ? sum + 1e-20f : 1.0f;
  for (u32 place = lane; place < p.used; place += WARP) {
    gates[place] = gates[place] / divisor * p.scale;
  }
}
