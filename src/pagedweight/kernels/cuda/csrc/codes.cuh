// Bit-planes to codes: transposing nibbles (docs/format.md, "Tiles and bits").
//
// A lane's word of a plane holds one bit of 32 codes; bit 4j + s belongs to product s, place j:
//
//     place j     0    1    2      3        4..7
//     row         g    g    g      g        g + 8, the same columns
//     column      2s   2s+1 8+2s   8+2s+1
//
// Codes<B>::of leaves in x[s] the eight low nibbles of product s, place j at bits 4j..4j+3; what
// is above four bits stays in `upper`, two bits a place, even and odd products apart.
#pragma once
#include "arch.cuh"

// Two planes as 2-bit codes: products 0 and 2 in `even`, 1 and 3 in `odd`, two bits a place.
struct Pairs {
  u32 even, odd;
};
PW_INLINE Pairs pairs(u32 high, u32 low) {
  return {pick(0x55555555u, low, high << 1), pick(0x55555555u, low >> 1, high)};
}
PW_INLINE Pairs pairs(u32 low) { return {low & 0x55555555u, (low >> 1) & 0x55555555u}; }

PW_INLINE void nibbles(Pairs high, Pairs low, u32 (&x)[4]) {
  x[0] = pick(0x33333333u, low.even, high.even << 2);
  x[1] = pick(0x33333333u, low.odd, high.odd << 2);
  x[2] = pick(0x33333333u, low.even >> 2, high.even);
  x[3] = pick(0x33333333u, low.odd >> 2, high.odd);
}

template <int BITS>
struct Codes {
  u32 x[4];
  Pairs upper;     // 5 and 6 bits
  u32 above[4];    // 7 and 8 bits: upper nibbles, as x

  PW_INLINE static Codes of(const u32 (&plane)[BITS]) {
    Codes c;
    const int low = BITS > 4 ? BITS - 4 : 0;  // first of the (at most four) low planes
    if constexpr (BITS >= 4) {
      nibbles(pairs(plane[low], plane[low + 1]), pairs(plane[low + 2], plane[low + 3]), c.x);
    } else if constexpr (BITS == 3) {
      nibbles(pairs(plane[0]), pairs(plane[1], plane[2]), c.x);
    } else {
      nibbles({0u, 0u}, pairs(plane[0], plane[1]), c.x);
    }
    if constexpr (BITS == 5) c.upper = pairs(plane[0]);
    if constexpr (BITS == 6) c.upper = pairs(plane[0], plane[1]);
    if constexpr (BITS == 7) nibbles(pairs(plane[0]), pairs(plane[1], plane[2]), c.above);
    if constexpr (BITS == 8)
      nibbles(pairs(plane[0], plane[1]), pairs(plane[2], plane[3]), c.above);
    return c;
  }

  // Codes of the even places of product s (0, 2, 4, 6), one a byte, under `high`: what the bytes
  // shall hold above the code.
  PW_INLINE u32 even(int s, u32 high) const {
    const u32 low = 0x0F0F0F0Fu;
    if constexpr (BITS <= 4) return masked_or(x[s], low, high);
    if constexpr (BITS >= 7) return pick(low, x[s], above[s] << 4);
    const u32 u = s & 1 ? upper.odd : upper.even;
    return pick(low, x[s], masked_or(s & 2 ? u << 2 : u << 4, 0x30303030u, high));
  }

  PW_INLINE u32 even(int s) const {  // under zeros
    const u32 low = 0x0F0F0F0Fu;
    if constexpr (BITS <= 4) return x[s] & low;
    if constexpr (BITS >= 7) return pick(low, x[s], above[s] << 4);
    const u32 u = s & 1 ? upper.odd : upper.even;
    return pick(low, x[s], (s & 2 ? u << 2 : u << 4) & 0x30303030u);
  }

  // Twice the codes of the odd places (1, 3, 5, 7), one a byte.
  PW_INLINE u32 odd_doubled(int s) const {
    const u32 low = 0x1E1E1E1Eu;
    if constexpr (BITS <= 4) return (x[s] >> 3) & low;
    const u32 u = s & 1 ? upper.odd : upper.even;
    return pick(low, x[s] >> 3, (s & 2 ? u >> 1 : u << 1) & 0x60606060u);
  }

  // Codes of the odd places, for codes of more than 6 bits.
  PW_INLINE u32 odd(int s) const { return pick(0x0F0F0F0Fu, x[s] >> 4, above[s]); }
};
