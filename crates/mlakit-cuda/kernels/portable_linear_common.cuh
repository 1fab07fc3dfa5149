// Linear layers, y[r, o] = sum over k of x[r, k] w[o, k]: what a host passes, which rows a block
// has, the arithmetic, and what happens to a sum.
//
// The arithmetic is the same in every kernel, so that the bits of a row depend neither on the
// number of rows nor on the kernel that a launch takes:
// - k is cut into chunks of 32, and the chunks into SLICES runs of equal length (the last may be
//   shorter or empty);
// - a slice is summed by tensor core products, chunk after chunk, the weights as their first
//   operand; of a chunk the first product takes the elements 8t to 8t + 3 of each t below 4, the
//   second 8t + 4 to 8t + 7 (a lane then reads 16 bytes of a row);
// - an F32 x is high + low, each BF16: 16 bits of it. The low part follows the high one;
// - the slices are added in order, in F32.

#ifndef X_F32
#define X_F32 0  // the dtype of x: F32, else BF16
#endif
#ifndef GROUPED
#define GROUPED 0  // rows are grouped by expert, with a matrix each
#endif

constexpr int SLICES = 8;
constexpr int CHUNK = 32;  // elements of k
constexpr int X_BYTES = X_F32 ? 4 : 2;
constexpr int X_SLOTS = X_F32 ? 2 : 1;  // 16-byte words that hold 8 elements of x

// Rows of one expert that one block takes.
struct RowTile {
  u32 expert;  // the number of experts: ids that are none
  u32 first;   // in `order`
  u32 count;
};

struct LinearParams {
  const u8* x;           // BF16 or F32 [rows of x, in_width]
  const u8* weight;      // BF16 [out_width, in_width], with experts [experts, out_width, in_width]
  const float* bias;     // F32 [out_width], or null
  u8* y;                 // BF16 or F32 [rows, out_width]
  const u32* order;      // GROUPED: rows of y, by expert
  const u32* tiles;      // GROUPED: the number of tiles, then that many RowTiles
  i64 rows;              // of y
  i64 in_width;
  i64 out_width;
  u32 row_tiles;         // tiles of rows in the grid: neighbours share weights
  u32 rows_per_x;        // GROUPED: rows of y that have one row of x
  u32 experts;           // GROUPED
  u32 y_f32;             // the dtype of y: F32, else BF16
  u32 accumulate;        // y += instead of y =
};

static_assert(sizeof(LinearParams) == 96, "the host mirrors this");

// What a block works on.
struct BlockRows {
  const u8* weight;
  u32 expert;
  i64 first;  // GROUPED: in `order`, otherwise of y
  int count;  // at most the rows of a tile
};

// False: there is nothing to do.
__device__ __forceinline__ bool rows_of_block(const LinearParams& p, int tile_rows,
                                              BlockRows& rows) {
  u32 tile = blockIdx.x % p.row_tiles;
#if GROUPED
  if (tile >= p.tiles[0]) return false;
  const u32* found = p.tiles + 1 + 3 * u64(tile);
  rows.expert = found[0];
  rows.first = found[1];
  rows.count = int(found[2]);
  rows.weight = p.weight + i64(rows.expert) * p.out_width * p.in_width * 2;
#else
  rows.expert = 0;
  rows.first = i64(tile) * tile_rows;
  rows.count = int(min(i64(tile_rows), p.rows - rows.first));
  rows.weight = p.weight;
#endif
  return true;
}

// The row of y that is number `row` of the block.
__device__ __forceinline__ i64 row_of_y(const LinearParams& p, const BlockRows& rows, int row) {
#if GROUPED
  return p.order[rows.first + row];
#else
  return rows.first + row;
#endif
}

// The row of x of number `row` of the block; some row that exists where there is none.
__device__ __forceinline__ const u8* row_of_x(const LinearParams& p, const BlockRows& rows,
                                              int row) {
  i64 y = row_of_y(p, rows, min(row, rows.count - 1));
#if GROUPED
  y /= p.rows_per_x;
#endif
  return p.x + y * p.in_width * X_BYTES;
}

__device__ __forceinline__ void store(const LinearParams& p, i64 row, i64 out, float sum) {
  i64 at = row * p.out_width + out;
  if (p.bias) sum += p.bias[out];
  if (p.y_f32) {
    float* y = (float*)p.y + at;
    *y = p.accumulate ? *y + sum : sum;
  } else {
    ((u16*)p.y)[at] = bf16_of_f32(sum);
  }
}

// The results of ids that are no expert: nothing is added, or zeros.
__device__ __forceinline__ void store_nothing(const LinearParams& p, const BlockRows& rows,
                                              i64 first_out, int outs) {
  if (p.accumulate) return;
  for (int i = threadIdx.x; i < rows.count * outs; i += blockDim.x) {
    i64 out = first_out + i % outs;
    if (out < p.out_width) store(p, row_of_y(p, rows, i / outs), out, 0.0f);
  }
}

// Chunks of one slice.
__device__ __forceinline__ i64 slice_chunks(i64 chunks) { return (chunks + SLICES - 1) / SLICES; }

// 8 elements of a row of x as operands, in pairs; `low` only for F32.
struct XOperand {
  u32 high[4];
  u32 low[4];
};

// What is left of a number beside its BF16; nothing is left of one that is not finite.
__device__ __forceinline__ float rest_of(float value, float high) {
  bool finite = (__float_as_uint(high) & 0x7f800000u) != 0x7f800000u;
  return finite ? value - high : 0.0f;
}

__device__ __forceinline__ XOperand operand_of(const Words (&slots)[X_SLOTS]) {
  XOperand x;
#if X_F32
  u32 words[GROUP] = {slots[0].x, slots[0].y, slots[0].z, slots[0].w,
                      slots[1].x, slots[1].y, slots[1].z, slots[1].w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float first = __uint_as_float(words[2 * i]), second = __uint_as_float(words[2 * i + 1]);
    x.high[i] = bf16_pair(first, second);
    x.low[i] = bf16_pair(rest_of(first, low_of(x.high[i])), rest_of(second, high_of(x.high[i])));
  }
#else
  u32 words[4] = {slots[0].x, slots[0].y, slots[0].z, slots[0].w};
#pragma unroll
  for (int i = 0; i < 4; i++) x.high[i] = words[i];
#endif
  return x;
}

// Adds one chunk: `upper` and `lower` are 8 elements of the rows g and g + 8 of the weights.
__device__ __forceinline__ void add_chunk(float (&sum)[4], const Words& upper, const Words& lower,
                                          const XOperand& x) {
  u32 first[4] = {upper.x, lower.x, upper.y, lower.y};
  u32 second[4] = {upper.z, lower.z, upper.w, lower.w};
  multiply(sum, first, x.high[0], x.high[1]);
#if X_F32
  multiply(sum, first, x.low[0], x.low[1]);
#endif
  multiply(sum, second, x.high[2], x.high[3]);
#if X_F32
  multiply(sum, second, x.low[2], x.low[3]);
#endif
}
