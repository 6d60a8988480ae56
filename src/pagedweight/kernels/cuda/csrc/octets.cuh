// Lookup by byte permutes: tables in registers, split in low and high bytes.
#pragma once
#include "codes.cuh"
#include "dtype.cuh"

// One row's first 8 centroids by bytes.
struct Octet {
  u32 low[2], high[2];
};
PW_INLINE Octet octet_of(uint4 raw) {
  const u32 w[4] = {centroids(raw.x), centroids(raw.y), centroids(raw.z), centroids(raw.w)};
  return {{bytes(w[0], w[1], 0x6420), bytes(w[2], w[3], 0x6420)},
          {bytes(w[0], w[1], 0x7531), bytes(w[2], w[3], 0x7531)}};
}
// The registers of near and far columns: `order` has the codes in its four low nibbles.
PW_INLINE void lookup_octet(const Octet& t, u32 order, u32& near, u32& far) {
  const u32 l = bytes(t.low[0], t.low[1], order), h = bytes(t.high[0], t.high[1], order);
  near = bytes(l, h, 0x5140);
  far = bytes(l, h, 0x7362);
}

// One row's 16 centroids by bytes: both halves are looked up, `choice` takes one of them.
PW_INLINE void lookup_sixteen(const Octet (&t)[2], u32 order, u32 choice, u32& near, u32& far) {
  const u32 l = bytes(bytes(t[0].low[0], t[0].low[1], order),
                      bytes(t[1].low[0], t[1].low[1], order), choice);
  const u32 h = bytes(bytes(t[0].high[0], t[0].high[1], order),
                      bytes(t[1].high[0], t[1].high[1], order), choice);
  near = bytes(l, h, 0x5140);
  far = bytes(l, h, 0x7362);
}
// `choice` for product s from the plane of the most significant bit: byte i of the upper half
// (4 + i) where the bit is set, else of the lower (i).
PW_INLINE u32 upper_half(u32 plane, int s) {
  const u32 moved = s == 0 ? plane << 2 : s == 1 ? plane << 1 : s == 2 ? plane : plane >> 1;
  return masked_or(moved, 0x44444444u, 0x32103210u);
}
