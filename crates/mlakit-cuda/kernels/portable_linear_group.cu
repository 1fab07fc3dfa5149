// Linear layers with experts, before the products: one block sorts rows of y by expert and cuts each
// expert's into tiles.
//
// Ids that are no expert are counted as faults and become a group of their own, the last. Where
// rows stand inside a group is left to the atomics: a row's bits do not depend on it.
//
// Shared memory: 4 bytes an expert and 4 more, and 256. At most 64 registers.

constexpr int THREADS = 1024;

struct GroupParams {
  const int* ids;  // [rows]; not trusted
  u32* order;      // [rows]
  u32* tiles;      // the number of tiles, then expert, first row and count of each
  u32* faults;
  i64 rows;
  u32 experts;
  u32 tile_rows;
};

static_assert(sizeof(GroupParams) == 48, "the host mirrors this");

// The sum of the values of all threads before this one.
__device__ __forceinline__ u64 block_sum_before(u64 value) {
  __shared__ u64 sums[THREADS / WARP];
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  u64 sum = value;
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    u64 before = __shfl_up_sync(FULL, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == WARP - 1) sums[warp] = sum;
  __syncthreads();
  for (int i = 0; i < warp; i++) sum += sums[i];
  return sum - value;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    portable_linear_group(const __grid_constant__ GroupParams p) {
  extern __shared__ u32 counts[];  // of each group; then where its next row goes
  follow_predecessor();
  u32 groups = p.experts + 1;
  for (u32 i = threadIdx.x; i < groups; i += THREADS) counts[i] = 0;
  __syncthreads();
  for (i64 row = threadIdx.x; row < p.rows; row += THREADS) {
    atomicAdd(&counts[min(u32(p.ids[row]), p.experts)], 1u);
  }
  __syncthreads();
  if (threadIdx.x == 0) count_fault(p.faults, FAULT_ID, counts[p.experts]);

  // Rows in the low half, tiles in the high half, of this thread's groups.
  u32 each = (groups + THREADS - 1) / THREADS;
  u32 begin = min(threadIdx.x * each, groups), end = min(begin + each, groups);
  u64 own = 0;
  for (u32 i = begin; i < end; i++) {
    own += counts[i] | u64((counts[i] + p.tile_rows - 1) / p.tile_rows) << 32;
  }
  u64 before = block_sum_before(own);
  u32 first = u32(before), tile = u32(before >> 32);
  for (u32 i = begin; i < end; i++) {
    u32 count = counts[i];
    for (u32 done = 0; done < count; done += p.tile_rows) {
      u32* to = p.tiles + 1 + 3 * u64(tile);
      to[0] = i;
      to[1] = first + done;
      to[2] = min(count - done, p.tile_rows);
      tile++;
    }
    counts[i] = first;
    first += count;
  }
  if (threadIdx.x == THREADS - 1) p.tiles[0] = tile;
  __syncthreads();
  for (i64 row = threadIdx.x; row < p.rows; row += THREADS) {
    p.order[atomicAdd(&counts[min(u32(p.ids[row]), p.experts)], 1u)] = u32(row);
  }
}
