// What the kernels of the layer operations share: numbers, groups of eight elements, copies into
// shared memory, tensor core products, sums over a block, counting of faults.
//
// A row is read in groups of 8 elements, which is 16 bytes of BF16. Where a row or its address is
// not aligned to that, a group is read element by element; the numbers, and the order in which
// they are summed, are the same. So bits do not depend on addresses.
//
// Needs nothing but a compiler (NVRTC has no headers). sm_80 and newer.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 FULL = 0xffffffffu;
constexpr int WARP = 32;
// Elements of a group.
constexpr int GROUP = 8;

// The first word of a fault block counts ids that are none.
#define FAULT_ID 0

// ---------------------------------------------------------------- numbers

__device__ __forceinline__ float f32_of_bf16(u16 bits) { return __uint_as_float(u32(bits) << 16); }
// The two BF16 numbers of a word.
__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// The nearest BF16, ties to even.
__device__ __forceinline__ u16 bf16_of_f32(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Two BF16 numbers in a word, the first in its low half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// A number whose order as an unsigned integer is the order of selections: larger first, -0 equals
// 0, NaN below -inf. It is at least 1, so that 0 is free to mean "taken".
__device__ __forceinline__ u32 selection_key(float value) {
  if (value != value) return 1;
  u32 bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

// ---------------------------------------------------------------- groups of eight elements

struct Words {
  u32 x, y, z, w;
};

__device__ __forceinline__ bool aligned16(const void* address, i64 stride_bytes) {
  return ((u64(address) | u64(stride_bytes)) & 15) == 0;
}

__device__ __forceinline__ Words load16(const void* address) {
  Words v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ void store16(void* address, Words v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// The elements `first` to `first + 7` of a row of `width`, as F32; 0 behind its end. `wide`: the
// row is aligned to 16 bytes.
template <bool F32>
__device__ __forceinline__ void load_group(const void* row, i64 first, i64 width, bool wide,
                                           float (&values)[GROUP]) {
  if (wide && first + GROUP <= width) {
    if (F32) {
      Words a = load16((const float*)row + first);
      Words b = load16((const float*)row + first + 4);
      u32 words[GROUP] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < GROUP; i++) values[i] = __uint_as_float(words[i]);
    } else {
      Words a = load16((const u16*)row + first);
      u32 words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        values[2 * i] = low_of(words[i]);
        values[2 * i + 1] = high_of(words[i]);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < GROUP; i++) {
    bool inside = first + i < width;
    if (F32) {
      values[i] = inside ? ((const float*)row)[first + i] : 0.0f;
    } else {
      values[i] = inside ? f32_of_bf16(((const u16*)row)[first + i]) : 0.0f;
    }
  }
}

// The reverse: rounds to BF16 unless `F32`, and writes nothing behind the row's end.
template <bool F32>
__device__ __forceinline__ void store_group(void* row, i64 first, i64 width, bool wide,
                                            const float (&values)[GROUP]) {
  if (wide && first + GROUP <= width) {
    if (F32) {
      float* to = (float*)row + first;
      store16(to, Words{__float_as_uint(values[0]), __float_as_uint(values[1]),
                        __float_as_uint(values[2]), __float_as_uint(values[3])});
      store16(to + 4, Words{__float_as_uint(values[4]), __float_as_uint(values[5]),
                            __float_as_uint(values[6]), __float_as_uint(values[7])});
    } else {
      store16((u16*)row + first,
              Words{bf16_pair(values[0], values[1]), bf16_pair(values[2], values[3]),
                    bf16_pair(values[4], values[5]), bf16_pair(values[6], values[7])});
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < GROUP; i++) {
    if (first + i >= width) break;
    if (F32) {
      ((float*)row)[first + i] = values[i];
    } else {
      ((u16*)row)[first + i] = bf16_of_f32(values[i]);
    }
  }
}

// ---------------------------------------------------------------- copies into shared memory

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return u32(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes past the L1 cache; zeros where `inside` is false.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `LEFT` of this thread's committed groups are under way.
template <int LEFT>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ Words load_shared16(u32 address) {
  Words v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared16(u32 address, Words v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; thread `i` gives the address of row `i % 8` of matrix
// `i / 8`.
__device__ __forceinline__ Words load_matrices(u32 address) {
  Words v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// The same, each transposed.
__device__ __forceinline__ Words load_matrices_transposed(u32 address) {
  Words v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// The 16 bytes of elements `first` on (`BYTES` each) of a row of `width`, into shared memory;
// zeros behind its end and where `inside` is false. Copies of rows that are not `wide` are done
// when this returns, the others once they are committed and waited for.
template <int BYTES>
__device__ __forceinline__ void fill16(u32 to, const u8* row, i64 first, i64 width, bool wide,
                                       bool inside) {
  constexpr int COUNT = 16 / BYTES;
  if (wide && (first + COUNT <= width || first >= width || !inside)) {
    bool any = inside && first < width;
    copy16(to, row + (any ? first * BYTES : 0), any);
    return;
  }
  u32 words[4] = {0, 0, 0, 0};
  if (inside) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (first + i >= width) break;
      if (BYTES == 4) {
        words[i % 4] = ((const u32*)row)[first + i];
      } else {
        words[(i / 2) % 4] |= u32(((const u16*)row)[first + i]) << (16 * (i % 2));
      }
    }
  }
  store_shared16(to, Words{words[0], words[1], words[2], words[3]});
}

// ---------------------------------------------------------------- tensor cores

// `sum += a b`: `a` is 16 x 16, `b` 16 x 8, the sums are F32. Lane `4 g + t` holds of `a` the
// words (row g, columns 2t, 2t + 1), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); of `b` (rows 2t,
// 2t + 1, column g), (2t + 8, g); of the sums (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---------------------------------------------------------------- sums and faults

// The sum of a warp, the same in all of its lanes, always in one order.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(FULL, value, step);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(FULL, value, step));
  }
  return value;
}

__device__ __forceinline__ u64 warp_max(u64 value) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) {
    u64 other = __shfl_xor_sync(FULL, value, step);
    value = other > value ? other : value;
  }
  return value;
}

__device__ __forceinline__ void count_fault(u32* faults, int which, u32 count) {
  if (count > 0) atomicAdd(faults + which, count);
}

// How every kernel begins: waits for the kernel before it, which its launch may overlap, and lets
// the blocks of the next one take their places, which then wait in the same way.
__device__ __forceinline__ void follow_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
