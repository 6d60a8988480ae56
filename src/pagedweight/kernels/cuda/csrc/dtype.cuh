// The two 16-bit types as bit patterns. PW_BF16: activations are bfloat16, else float16.
// PW_TABLE_BF16: the same for centroids. Both are set by the compiler's command line.
#pragma once
#include "arch.cuh"

#ifndef PW_BF16
#error "PW_BF16 and PW_TABLE_BF16 must be defined as 0 or 1"
#endif

PW_INLINE float bf16_to_float(u16 v) { return __uint_as_float((u32)v << 16); }
PW_INLINE float f16_to_float(u16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}
PW_INLINE float to_float(u16 v) { return PW_BF16 ? bf16_to_float(v) : f16_to_float(v); }

PW_INLINE u16 to_act(float v) {
#if PW_BF16
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(0.0f), "f"(v));
  return (u16)d;
#else
  u16 d;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(v));
  return d;
#endif
}

// A centroid, and two of them, in the type of the activations.
PW_INLINE u16 centroid(u16 raw) {
  if (PW_TABLE_BF16 == PW_BF16) return raw;
  return to_act(PW_TABLE_BF16 ? bf16_to_float(raw) : f16_to_float(raw));
}
PW_INLINE u32 centroids(u32 raw) {
  if (PW_TABLE_BF16 == PW_BF16) return raw;
  return centroid((u16)raw) | (u32)centroid((u16)(raw >> 16)) << 16;
}

// c += a (16 x 16) * b (16 x 8), float32 sums.
PW_INLINE void multiply16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if PW_BF16
#define PW_MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define PW_MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
  asm volatile(PW_MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#undef PW_MMA
}

// act(gate) * up, rounded to the activations' type; activation 0 silu, 1 gelu, 2 gelu (tanh).
PW_INLINE float activate(float gate, int activation) {
  if (activation == 0) return gate / (1.0f + __expf(-gate));
  if (activation == 1) return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f));
  const float inner = 0.79788456080286536f * (gate + 0.044715f * gate * gate * gate);
  return 0.5f * gate * (1.0f + tanhf(inner));
}
