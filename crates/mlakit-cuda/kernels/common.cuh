// What the portable attention kernels share: types, the words of a pool's view and of a fault
// block, 16-bit and 8-bit floats, and the instructions of sm_80 and newer as small named functions.
//
// A device compiles a kernel by putting this file in front of it; neither includes anything, so
// NVRTC needs no header path.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define INFINITE __int_as_float(0x7f800000)

DEVICE int minimum(int a, int b) { return a < b ? a : b; }
DEVICE int maximum(int a, int b) { return a > b ? a : b; }
DEVICE int clamp(int value, int low, int high) { return minimum(maximum(value, low), high); }
__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The first words of a pool's view (256 bytes in device memory, rewritten in stream order).
struct PoolView {
  u64 base;               // address of page 0
  u64 pages;
  u64 page_stride_bytes;
};

// Words of a lane's fault block.
enum Fault { FAULT_ID = 0, FAULT_LENGTH = 1, FAULT_OFFSET = 2 };

DEVICE void count_fault(u32* faults, Fault fault, bool bad) {
  if (bad) atomicAdd(faults + fault, 1u);
}

// ---- dependent launches ----------------------------------------------------------------------

// Waits until the launch before this one has ended and its stores are visible. Everything that a
// predecessor may have written is read behind it.
DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the blocks of the next launch take their places; they wait before they read.
DEVICE void allow_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- shared memory ---------------------------------------------------------------------------

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Copies `bytes` (0 to 16) and fills up to 16 with zeros. Of 0 bytes the source is not read.
DEVICE void copy_async_16(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` groups of this thread's copies are under way.
template <int PENDING>
DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Matrices of 8 rows of 16 bytes: lane 8 i + j gives the address of row j of matrix i; a thread
// gets bytes 4 (lane % 4) to 4 (lane % 4) + 3 of row lane / 4 of each.
DEVICE void load_matrices(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

DEVICE void load_matrices(u32 (&m)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(m[0]), "=r"(m[1])
               : "r"(address)
               : "memory");
}

DEVICE void load_matrices(u32 (&m)[1], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(m[0])
               : "r"(address)
               : "memory");
}

// The same transposed: a thread gets the 16-bit units lane / 4 of rows 2 (lane % 4) and the next.
DEVICE void load_transposed(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

DEVICE void load_transposed(u32 (&m)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(m[0]), "=r"(m[1])
               : "r"(address)
               : "memory");
}

// ---- matrix products -------------------------------------------------------------------------

// c[16, 8] += a[16, 16] . b[16, 8], F32 sums. With g = lane / 4 and t = lane % 4 a thread holds
// rows g, g + 8 of columns 2 t, 2 t + 1 of c; of a the pairs from column 2 t on of rows g, g + 8,
// then from column 2 t + 8 on; of b the pairs of rows 2 t and 2 t + 8 of column g.
template <bool HALF>
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (HALF) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---- numbers ---------------------------------------------------------------------------------

// 2^x, 1 at 0 exactly, 0 at -inf.
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two numbers rounded to 16 bits each, to nearest even; the first is the low half.
template <bool HALF>
DEVICE u32 pack(float low, float high) {
  u32 pair;
  if (HALF)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two E4M3 codes (bits 0-7 and 8-15) as F16, exact; NaN stays NaN.
DEVICE u32 decode_e4m3(u32 codes) {
  u32 pair;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)codes));
#else
  // Exponent and mantissa in the place of F16's count from 2^-15 in place of 2^-7: times 2^8, which
  // also makes denormals right.
  const u32 bytes = (codes & 0xffu) | (codes & 0xff00u) << 8;
  const u32 raw = (bytes & 0x00800080u) << 8 | (bytes & 0x007f007fu) << 7;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(raw), "r"(0x5c005c00u));
  if ((bytes & 0x7f) == 0x7f) pair |= 0x7e00u;
  if ((bytes >> 16 & 0x7f) == 0x7f) pair |= 0x7e000000u;
#endif
  return pair;
}

// Two F16 numbers that BF16 holds, as BF16.
DEVICE u32 f16_to_bf16(u32 pair) {
  float low, high;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
  return pack<false>(low, high);
}

// The nearest E4M3 code of value / scale, ties to even; beyond 448 it saturates, NaN stays NaN and
// keeps its sign. The bytes are the same on every architecture.
DEVICE u32 encode_e4m3(float value, float scale) {
  const float quotient = __fdiv_rn(value, scale);
  if (quotient != quotient) return (__float_as_uint(value) >> 24 & 0x80u) | 0x7fu;
#if __CUDA_ARCH__ >= 890
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.f), "f"(quotient));
  return codes & 0xffu;
#else
  const u32 sign = __float_as_uint(quotient) >> 24 & 0x80u;
  const float magnitude = fabsf(quotient);
  if (magnitude >= 448.f) return sign | 0x7eu;
  // Below 2^-6 the spacing is 2^-9, above it 2^(e - 3); scaling by a power of two is exact.
  const int exponent = maximum((int)(__float_as_uint(magnitude) >> 23) - 127, -6);
  const int steps = __float2int_rn(magnitude * __uint_as_float((u32)(130 - exponent) << 23));
  return sign | (u32)minimum(((exponent + 6) << 3) + steps, 0x7e);
#endif
}
