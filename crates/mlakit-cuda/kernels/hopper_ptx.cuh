// Hopper's own instructions as small named functions: mbarriers, the bulk tensor copy, cp.async,
// warpgroup matrix products and the fences between the two memory proxies.
//
// A device compiles a kernel by putting this file in front of it; neither includes anything, so
// NVRTC needs no header path. Everything here needs the target sm_90a.

typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}

// A value that is the same in all lanes, in a form that the compiler knows to be: products of a
// warpgroup are serialised in branches that might diverge.
DEVICE int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// ---- mbarriers -------------------------------------------------------------------------------

DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// By a whole warp, one arrival: bytes that copies will bring.
DEVICE void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
      "}\n" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

// Waits until the phase of the given parity has completed.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A barrier of `threads` threads of the block; id 0 is __syncthreads'.
DEVICE void named_barrier(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// This thread's arrival at such a barrier, without waiting.
DEVICE void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Moves registers between the warpgroups of a block; every warp of the group calls it. Counts below
// 128 give registers back: a block of 512 threads has 128 a thread at its launch, one of 384 has
// 168.
template <int COUNT>
DEVICE void set_registers() {
  if (COUNT < 128)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
  else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- copies ----------------------------------------------------------------------------------

DEVICE u64 policy_evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

DEVICE u64 policy_evict_normal() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A tensor map in global memory that an earlier write in the stream may have replaced.
DEVICE void tensor_map_acquire(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

DEVICE void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

struct BoxOrigin {
  int column;
  int token;
  int page;
};

// One box of a three-dimensional tensor map into shared memory; out-of-range parts become zeros.
// All lanes of a warp call it with the same arguments and one copies, without a branch: operands
// that may differ between lanes cost a loop over the lanes, some 190 clocks a box.
DEVICE void copy_box(u32 destination, const void* map, BoxOrigin at, u32 barrier, u64 policy) {
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "@one cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;\n"
      "}\n" ::"r"(destination),
      "l"(map), "r"(at.column), "r"(at.token), "r"(at.page), "r"(barrier), "l"(policy)
      : "memory");
}

// 16 bytes, or 16 zero bytes (the source is then not read).
DEVICE void copy_16(u32 destination, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

// This thread's arrival, made when its earlier copy_16 have landed.
DEVICE void copy_16_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

DEVICE void copy_16_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Orders this thread's earlier ordinary accesses of shared memory before later ones of the tensor
// cores and the copy engine.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- global memory ---------------------------------------------------------------------------

DEVICE u32 load_acquire(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Adds without waiting for the old value; this block's earlier stores, as far as a barrier ordered
// them before this thread, are visible to whoever sees the sum.
DEVICE void add_release(u32* word, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

DEVICE u32 add_relaxed(u32* word, u32 value) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}

// Loads that see what other blocks stored in this launch (they bypass L1). They stay behind earlier
// barriers, but stores may pass them: a clobber of memory would make each wait for the one before.
DEVICE float load_fresh(const float* word) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(word));
  return value;
}

DEVICE uint4 load_fresh_16(const void* words) {
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(words));
  return value;
}

// ---- dependent launch ------------------------------------------------------------------------

// Lets the next kernel of the stream begin to launch, if it was launched so.
DEVICE void allow_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the kernels before this one are complete, if this was launched so.
DEVICE void await_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- small arithmetic ------------------------------------------------------------------------

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// One unit in the last place off at most.
DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two BF16 in one word, the first in the low half, rounded to nearest even.
DEVICE u32 pack_bf16(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

DEVICE float bf16_low(u32 word) { return __uint_as_float(word << 16); }
DEVICE float bf16_high(u32 word) { return __uint_as_float(word & 0xffff0000u); }

DEVICE uint4 load_shared_16(u32 address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

DEVICE void store_shared_16(u32 address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// Four 8x8 tiles of 16-bit elements; lane l gives the address of row l % 8 of tile l / 8.
DEVICE void store_tiles(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The same, each tile transposed: lane l gives the address of column l % 8 of tile l / 8.
DEVICE void store_tiles_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ---- warpgroup matrix products ---------------------------------------------------------------

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving arithmetic on an accumulator across a wait.
template <int N>
DEVICE void pin_registers(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// An operand in shared memory: the two words of its descriptor.
struct Operand {
  u32 where;
  u32 shape;
};

// Rows are 128 bytes, swizzled in groups of eight rows (1,024 bytes). `group_bytes`: from one group
// of eight rows to the next. `panel_bytes`: from one 128-byte wide panel to the next, used only
// where the contiguous axis is not the summed one.
DEVICE Operand operand(u32 address, u32 group_bytes, u32 panel_bytes) {
  return {(address & 0x3ffff) >> 4 | (panel_bytes >> 4) << 16, group_bytes >> 4 | 1u << 30};
}

// The operand that lies `bytes` further on, by one addition: built anew, a descriptor takes more
// clocks than a small product.
DEVICE u64 further(const Operand& o, u32 bytes) {
  u64 descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(o.where + (bytes >> 4)), "r"(o.shape));
  return descriptor;
}

#define R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#define R32(d, i) R16(d, i), R16(d, i + 16)

// S[64, 64] (+)= A[64, 16] B[64, 16]^T; both operands contiguous along the summed axis.
DEVICE void wgmma_64x64(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "%32, %33, p, 1, 1, 0, 0;\n"
      "}\n"
      : R32(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}

// O[64, 128] += A[64, 16] B[16, 128]; A contiguous along the summed axis, B along its columns.
DEVICE void wgmma_values(float (&d)[64], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "%64, %65, p, 1, 1, 0, 1;\n}\n"
      : R32(d, 0), R32(d, 32)
      : "l"(a), "l"(b));
}

// S[64, 16] (+)= A[64, 16] B[16, 16]^T; both operands contiguous along the summed axis.
DEVICE void wgmma_64x16(float (&d)[8], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, 0;\n"
      "}\n"
      : R4(d, 0), R4(d, 4)
      : "l"(a), "l"(b), "r"(accumulate));
}

// O[64, 16] += A[64, 16] B[16, 16]^T; A contiguous along its rows' axis, B along the summed axis.
DEVICE void wgmma_columns(float (&d)[8], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 1, 0;\n}\n"
      : R4(d, 0), R4(d, 4)
      : "l"(a), "l"(b));
}

// The same with 64 columns.
DEVICE void wgmma_values(float (&d)[32], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "%32, %33, p, 1, 1, 0, 1;\n}\n"
      : R32(d, 0)
      : "l"(a), "l"(b));
}
