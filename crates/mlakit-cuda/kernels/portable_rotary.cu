// Rotary position embedding: pair j of a row at position p turns by f32(p) * inv_freq[j].
//
// Every width, any number of heads, any I32 position, any frequency. A thread turns one pair of up
// to HEADS heads, so that a cosine and a sine serve several of them. No shared memory, no local
// memory; at most 64 registers.

#ifndef X_F32
#define X_F32 0
#endif

constexpr int THREADS = 128;
constexpr int HEADS = 8;

struct RotaryParams {
  const u8* x;            // BF16 or F32 [rows, heads, width], heads in_stride apart
  const int* positions;   // [rows]
  const float* inv_freq;  // [width / 2]
  u16* y;                 // BF16 [rows, heads, width], heads out_stride apart
  i64 rows;
  i64 heads;
  i64 pairs;       // width / 2
  i64 in_stride;   // elements
  i64 out_stride;  // elements
  i64 step;        // from the first element of a pair to that of the next
  i64 gap;         // from the first element of a pair to its second
  float factor;
};

static_assert(sizeof(RotaryParams) == 96, "the host mirrors this");

// 2 / pi = 0.a2f9836e..., in words of 32 bits, behind one word of zeros.
__constant__ u32 TWO_OVER_PI[8] = {0x00000000u, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u,
                                   0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};

// An angle as quarter turns and a rest of at most an eighth of a turn (pi / 4).
struct Reduced {
  u32 quarters;
  float rest;
};

// Exact for every finite F32: the angle is an integer of 24 bits times a power of two, and its
// product with 96 bits of 2 / pi, modulo 4, is computed in integers. Of 2 / pi those bits are taken
// whose product is below 4; what lies behind them adds less than 2^-70.
__device__ __forceinline__ Reduced reduce(float angle) {
  u32 bits = __float_as_uint(angle) & 0x7fffffffu;
  if (bits < 0x3f490fdbu) return Reduced{0, angle};                    // below pi / 4
  if (bits >= 0x7f800000u) return Reduced{0, angle - angle};           // NaN
  int exponent = int(bits >> 23) - 150;                                // -24 to 104
  u64 mantissa = (bits & 0x7fffffu) | 0x800000u;
  int first = exponent + 30;  // of the table's bits
  const u32* words = TWO_OVER_PI + first / 32;
  u32 shift = first % 32;
  u32 high = __funnelshift_l(words[1], words[0], shift);
  u32 middle = __funnelshift_l(words[2], words[1], shift);
  u32 low = __funnelshift_l(words[3], words[2], shift);

  u64 product = mantissa * low;
  u64 carried = mantissa * middle + (product >> 32);
  u32 top = u32(mantissa) * high + u32(carried >> 32);
  // The upper 64 of the 96 bits: 2 of quarters, 62 of a quarter's fraction.
  u64 turn = (u64(top) << 32) | (carried & 0xffffffffu);
  u32 quarters = u32(turn >> 62);
  i64 fraction = i64(turn << 2);  // signed: more than half a quarter counts from the next one
  quarters += fraction < 0;
  float rest = float(fraction) * 8.5153039502163873e-20f;  // pi / 2 * 2^-64
  if (angle < 0.0f) return Reduced{(0u - quarters) & 3u, -rest};
  return Reduced{quarters & 3u, rest};
}

// Cosine and sine by their series, whose first omitted terms are below 3e-8.
__device__ __forceinline__ void turn_of(float angle, float& cosine, float& sine) {
  Reduced reduced = reduce(angle);
  float x = reduced.rest, square = x * x;
  float s = fmaf(square, fmaf(square, fmaf(square, 1.0f / 362880.0f, -1.0f / 5040.0f),
                              1.0f / 120.0f),
                 -1.0f / 6.0f);
  s = fmaf(x * square, s, x);
  float c = fmaf(square, fmaf(square, fmaf(square, 1.0f / 40320.0f, -1.0f / 720.0f),
                              1.0f / 24.0f),
                 -0.5f);
  c = fmaf(square, c, 1.0f);
  bool odd = reduced.quarters & 1u;
  cosine = odd ? s : c;
  sine = odd ? c : s;
  if (reduced.quarters == 1u || reduced.quarters == 2u) cosine = -cosine;
  if (reduced.quarters >= 2u) sine = -sine;
}

__device__ __forceinline__ float element(const u8* x, i64 index) {
  return X_F32 ? ((const float*)x)[index] : f32_of_bf16(((const u16*)x)[index]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    portable_rotary(const __grid_constant__ RotaryParams p) {
  follow_predecessor();
  i64 groups = (p.heads + HEADS - 1) / HEADS;
  i64 index = i64(blockIdx.x) * THREADS + threadIdx.x;
  i64 pair = index % p.pairs;
  i64 row = index / p.pairs / groups;
  i64 first = index / p.pairs % groups * HEADS;
  if (row >= p.rows) return;

  float cosine, sine;
  // Both roundings are those of the contract: the position's, then the product's.
  turn_of(__fmul_rn(float(p.positions[row]), p.inv_freq[pair]), cosine, sine);
  cosine *= p.factor;
  sine *= p.factor;
  i64 last = min(first + HEADS, p.heads);
  for (i64 head = row * p.heads + first; head < row * p.heads + last; head++) {
    i64 from = head * p.in_stride + pair * p.step;
    i64 to = head * p.out_stride + pair * p.step;
    float a = element(p.x, from), b = element(p.x, from + p.gap);
    p.y[to] = bf16_of_f32(a * cosine - b * sine);
    p.y[to + p.gap] = bf16_of_f32(b * cosine + a * sine);
  }
}
