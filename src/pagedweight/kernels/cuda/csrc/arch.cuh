// Everything that names a machine instruction, so that the rest reads as arithmetic. No headers are
// included anywhere: the sources compile with NVRTC alone, for compute capability 8.0 and newer.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define PW_INLINE __device__ __forceinline__

// Bytes of a and b (0..3 and 4..7) by the four low nibbles of `order`; bit 3 of each must be 0.
PW_INLINE u32 bytes(u32 a, u32 b, u32 order) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(order));
  return d;
}

// sum over bytes of a_i * b_i, plus c: runs beside the logic pipe that everything else here fills.
PW_INLINE u32 dot4(u32 a, u32 b, u32 c) { return __dp4a(a, b, c); }

// low + high * 65536 on the multiply pipe, for the same reason.
PW_INLINE u32 join16(u32 low, u32 high, u32 two_to_16) {
  u32 d;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(high), "r"(two_to_16), "r"(low));
  return d;
}

// (a & mask) | (b & ~mask), and (a & mask) | b, as one instruction each; written out, because the
// compiler's own rewriting of shifts and masks would split them.
PW_INLINE u32 pick(u32 mask, u32 a, u32 b) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
  return d;
}
PW_INLINE u32 masked_or(u32 a, u32 mask, u32 b) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
  return d;
}

PW_INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Shared memory at an address that a lane's codes make. Written out so that the address is used as
// it is: the compiler would add the base of shared memory at every lookup. What is read depends on
// codes, so these cannot move before the waits that the codes were read behind.
template <int OFFSET>
PW_INLINE u32 shared16(u32 at) {
  u32 v;
  asm("{ .reg .u16 t; ld.shared.u16 t, [%1 + %2]; cvt.u32.u16 %0, t; }"
      : "=r"(v) : "r"(at), "n"(OFFSET));
  return v;
}
template <int OFFSET>
PW_INLINE u32 shared32(u32 at) {
  u32 v;
  asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(v) : "r"(at), "n"(OFFSET));
  return v;
}
// A word that other lanes copied: stays behind the wait for it.
PW_INLINE u32 shared_word(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
PW_INLINE void store_shared4(u32 at, u32 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(v) : "memory");
}

// 16 bytes from global to shared memory, past the L1 and the registers, in groups that a thread
// waits for in order. `copies_wait<n>`: until at most n groups are unfinished.
PW_INLINE void copy16(u32 to, u64 from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
PW_INLINE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
PW_INLINE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
PW_INLINE void prefetch_l2(u64 p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// A barrier among some warps of a thread block. Barrier 0 is __syncthreads.
PW_INLINE void barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Messages between warps of different thread blocks: what was written before `add_release` is seen
// after a `load_acquire` that reads its sum.
PW_INLINE u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
PW_INLINE void signal_release(u32* p, u32 v = 1) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
PW_INLINE u32 add_release(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

// Reads of what another thread block wrote in this launch; the first through an L1 that an acquire
// has emptied.
PW_INLINE uint4 load_fresh(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
PW_INLINE float load_l2(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
PW_INLINE uint4 load_l2(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
PW_INLINE float4 load_l2(const float4* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
