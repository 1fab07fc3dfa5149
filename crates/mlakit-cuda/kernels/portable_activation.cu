// The gate of a gated MLP: y[r, i] = silu(x[r, i]) * x[r, width + i], a thread a group of 8
// elements.
//
// Every width. No shared memory; at most 64 registers.

#ifndef X_F32
#define X_F32 0
#endif
#ifndef Y_F32
#define Y_F32 0
#endif

constexpr int THREADS = 256;

struct ActivationParams {
  const u8* x;  // BF16 or F32 [rows, 2, width]
  u8* y;        // BF16 or F32 [rows, width]
  i64 rows;
  i64 width;
};

static_assert(sizeof(ActivationParams) == 32, "the host mirrors this");

extern "C" __global__ void __launch_bounds__(THREADS)
    portable_activation(const __grid_constant__ ActivationParams p) {
  follow_predecessor();
  i64 groups = (p.width + GROUP - 1) / GROUP;
  i64 index = i64(blockIdx.x) * THREADS + threadIdx.x;
  i64 row = index / groups;
  i64 first = index % groups * GROUP;
  if (row >= p.rows) return;
  const u8* gates = p.x + row * 2 * p.width * (X_F32 ? 4 : 2);
  const u8* ups = gates + p.width * (X_F32 ? 4 : 2);
  u8* y = p.y + row * p.width * (Y_F32 ? 4 : 2);

  float gate[GROUP], up[GROUP], values[GROUP];
  load_group<X_F32>(gates, first, p.width, aligned16(gates, 0), gate);
  load_group<X_F32>(ups, first, p.width, aligned16(ups, 0), up);
#pragma unroll
  for (int i = 0; i < GROUP; i++) values[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
  store_group<Y_F32>(y, first, p.width, aligned16(y, 0), values);
}
