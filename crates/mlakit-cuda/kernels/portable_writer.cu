// Cache writer (sm_80 and newer): the records of new tokens go to their slots.
//
// Row i's latent, then its rotary part, become the record of slot slots[i]: BF16 bit for bit, or
// E4M3(value / scale). A negative slot is padding; one behind the pool is skipped and counted. Of
// two rows for one slot the later stays, as if rows were written in order.
//
// A block has 8 warps and 8 rows. First all of its threads look whether a later row of the call has
// the slot of one of them: that is quadratic in the rows, about 25 microseconds at 16,384 rows, and
// needs no memory. Then each warp writes one row, VECTOR elements a thread at a time where all
// addresses allow it, else one by one.

#ifndef RECORD_E4M3
#define RECORD_E4M3 0  // 0: BF16 records; 1: E4M3
#endif

constexpr int THREADS = 256;
constexpr int BLOCK_ROWS = THREADS / 32;
constexpr int VECTOR = 8;
constexpr int ELEMENT_BYTES = RECORD_E4M3 ? 1 : 2;

struct WriterParams {
  const u16* latent;       // BF16 [rows, latent_width]
  const u16* rope;         // BF16 [rows, rope_width]
  const i64* slots;        // [rows]
  const PoolView* view;    // [1]
  const float* kv_scale;   // [1], or null
  u32* faults;
  int rows;
  int latent_width;
  int rope_width;
  int page_size;           // tokens
  int record_bytes;        // from one token to the next
  int reserved;            // 0
};
static_assert(sizeof(WriterParams) == 72, "the host mirrors this");

// Marks the rows of the block whose slot a later row has.
DEVICE void find_superseded(const WriterParams& p, i64 first, int (&superseded)[BLOCK_ROWS]) {
  i64 slots[BLOCK_ROWS];
#pragma unroll
  for (int i = 0; i < BLOCK_ROWS; ++i) slots[i] = first + i < p.rows ? p.slots[first + i] : -1;
  for (i64 other = first + 1 + threadIdx.x; other < p.rows; other += THREADS) {
    const i64 slot = p.slots[other];
#pragma unroll
    for (int i = 0; i < BLOCK_ROWS; ++i)
      if (slot == slots[i] && other > first + i) superseded[i] = 1;
  }
}

DEVICE u32 encode_pair(u32 pair, float scale) {
  return encode_e4m3(bf16_low(pair), scale) | encode_e4m3(bf16_high(pair), scale) << 8;
}

// Writes `width` elements of a row, one warp.
DEVICE void write_part(u8* to, const u16* from, int width, float scale) {
  const u64 bits = (u64)from | (u64)to * (2 / ELEMENT_BYTES);
  const int whole = bits % 16 == 0 ? width / VECTOR * VECTOR : 0;
  const int lane = threadIdx.x % 32;
  for (int i = lane * VECTOR; i < whole; i += 32 * VECTOR) {
    const uint4 v = *(const uint4*)(from + i);
#if RECORD_E4M3
    *(uint2*)(to + i) = make_uint2(encode_pair(v.x, scale) | encode_pair(v.y, scale) << 16,
                                   encode_pair(v.z, scale) | encode_pair(v.w, scale) << 16);
#else
    *(uint4*)(to + i * 2) = v;
#endif
  }
  for (int i = whole + lane; i < width; i += 32) {
#if RECORD_E4M3
    to[i] = (u8)encode_e4m3(bf16_low(from[i]), scale);
#else
    ((u16*)to)[i] = from[i];
#endif
  }
}

DEVICE void write_row(const WriterParams& p, i64 row, bool superseded) {
  const i64 slot = p.slots[row];
  if (slot < 0) return;
  const u64 page = (u64)slot / (u32)p.page_size, offset = (u64)slot % (u32)p.page_size;
  if (page >= p.view->pages) {
    count_fault(p.faults, FAULT_ID, threadIdx.x % 32 == 0);
    return;
  }
  if (superseded) return;
  u8* record = (u8*)p.view->base + page * p.view->page_stride_bytes + offset * (u64)p.record_bytes;
  const float scale = p.kv_scale ? *p.kv_scale : 1.f;
  write_part(record, p.latent + row * p.latent_width, p.latent_width, scale);
  write_part(record + p.latent_width * ELEMENT_BYTES, p.rope + row * p.rope_width, p.rope_width,
             scale);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    portable_writer(const __grid_constant__ WriterParams p) {
  __shared__ int superseded[BLOCK_ROWS];
  wait_for_predecessor();
  const i64 first = (i64)blockIdx.x * BLOCK_ROWS, row = first + threadIdx.x / 32;
  if (threadIdx.x < BLOCK_ROWS) superseded[threadIdx.x] = 0;
  __syncthreads();
  find_superseded(p, first, superseded);
  __syncthreads();
  if (row < p.rows) write_row(p, row, superseded[threadIdx.x / 32]);
}
