// Gathers rows of a table: y[r] = table[ids[r]] * scale, a thread a group of 8 elements.
//
// Every width. No shared memory; at most 64 registers.

#ifndef X_F32
#define X_F32 0
#endif
#ifndef Y_F32
#define Y_F32 0
#endif

constexpr int THREADS = 256;

struct EmbedParams {
  const u8* table;  // BF16 or F32 [vocab, width]
  const int* ids;   // [rows]; not trusted
  u8* y;            // BF16 or F32 [rows, width]
  u32* faults;
  i64 rows;
  i64 width;
  i64 vocab;
  float scale;
};

static_assert(sizeof(EmbedParams) == 64, "the host mirrors this");

extern "C" __global__ void __launch_bounds__(THREADS)
    portable_embed(const __grid_constant__ EmbedParams p) {
  follow_predecessor();
  i64 groups = (p.width + GROUP - 1) / GROUP;
  i64 index = i64(blockIdx.x) * THREADS + threadIdx.x;
  i64 row = index / groups;
  i64 first = index % groups * GROUP;
  if (row >= p.rows) return;
  i64 id = p.ids[row];
  bool known = id >= 0 && id < p.vocab;
  if (first == 0) count_fault(p.faults, FAULT_ID, !known && id != -1);

  float values[GROUP] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  if (known) {
    const u8* from = p.table + id * p.width * (X_F32 ? 4 : 2);
    load_group<X_F32>(from, first, p.width, aligned16(from, 0), values);
#pragma unroll
    for (int i = 0; i < GROUP; i++) values[i] *= p.scale;
  }
  u8* y = p.y + row * p.width * (Y_F32 ? 4 : 2);
  store_group<Y_F32>(y, first, p.width, aligned16(y, 0), values);
}
