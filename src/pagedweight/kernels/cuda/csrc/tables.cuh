// Codes to centroids as in lookup.cuh, for decode_groups.cu and prefill.cu: tables that may lie
// anywhere in shared memory, filled from global memory.
//
// 2, 3 bits: each row's centroids in registers, split in low and high bytes; a byte permute looks
//            four codes up at once.
// 4 to 6:    shared memory, word [row tile][code][lane]: low half row g, high half row g + 8. Every
//            lane reads its own bank, so a lookup never conflicts.
// 7, 8 bits: read from global memory where they lie; slow, and rarely worth their bytes.
#pragma once
#include "octets.cuh"

// Shared memory of the tables of `rows` row tiles.
PW_INLINE constexpr int table_bytes(int bits, int rows) {
  return bits < 4 || bits > 6 ? 0 : rows * 128 << bits;
}

// Tables of one row tile, or of two.
template <int BITS, int ROWS>
struct Tables {
  // 2, 3 bits: [row tile][g, g + 8]. 4 bits: row g of row tile 0, a quarter of the lookups, because
  // shared memory would be the limit.
  Octet octet[BITS <= 3 ? 2 * ROWS : 2];
  u32 lane;                               // address of this lane's column of the shared table
  u32 two_to_16;
  const u16* row[ROWS];                   // in global memory: row g of each row tile

  static const int TABLE = 128 << BITS;   // bytes of a row tile: 128 from a code to the next

  // Product s of row tile R: near columns (2s, 2s + 1) and far ones (8 + 2s, 9 + 2s) of rows g and
  // g + 8. `top`: the plane of the most significant bits.
  template <int R>
  PW_INLINE void at(const Codes<BITS>& codes, u32 top, int s, u32 (&near)[2],
                    u32 (&far)[2]) const {
    if constexpr (BITS <= 3) {
      lookup_octet(octet[2 * R], codes.x[s], near[0], far[0]);
      lookup_octet(octet[2 * R + 1], codes.x[s] >> 16, near[1], far[1]);
    } else if constexpr (BITS <= 6) {
      const u32 e = codes.even(s), o = codes.odd_doubled(s);
      const int first = R * TABLE, second = first + 2;
      if (BITS == 4 && R == 0) {
        lookup_sixteen(octet, codes.x[s] & 0x7777u, upper_half(top, s), near[0], far[0]);
      } else {
        near[0] = join16(shared16<first>(even(e, 0)), shared16<first>(odd(o, 0)), two_to_16);
        far[0] = join16(shared16<first>(even(e, 1)), shared16<first>(odd(o, 1)), two_to_16);
      }
      near[1] = join16(shared16<second>(even(e, 2)), shared16<second>(odd(o, 2)), two_to_16);
      far[1] = join16(shared16<second>(even(e, 3)), shared16<second>(odd(o, 3)), two_to_16);
    } else {
      const u32 even = codes.even(s), odd = codes.odd(s);
      near[0] = global_pair(row[R], even, odd);
      far[0] = global_pair(row[R], even >> 8, odd >> 8);
      near[1] = global_pair(row[R] + (8 << BITS), even >> 16, odd >> 16);
      far[1] = global_pair(row[R] + (8 << BITS), even >> 24, odd >> 24);
    }
  }

  // Address of a centroid from byte b of codes, or of codes doubled: a dot product multiplies the
  // byte by 128 or 64 and adds the table's address, beside the logic pipe that all else here fills.
  PW_INLINE u32 even(u32 codes, int b) const { return dot4(codes, 0x80u << 8 * b, lane); }
  PW_INLINE u32 odd(u32 doubled, int b) const { return dot4(doubled, 0x40u << 8 * b, lane); }
  PW_INLINE static u32 global_pair(const u16* row, u32 low, u32 high) {
    return centroid(row[low & 255]) | (u32)centroid(row[high & 255]) << 16;
  }

  // Centroids on their way from global memory into the tables. A lane takes rows g and g + 8 and
  // eight codes at a time (4 to 6 bits), or the rows that it looks up itself.
  static const int OCTETS = BITS < 3 ? 1 : (1 << BITS) / 8;
  static const int TURNS = BITS < 4 || BITS > 6 ? 0 : ROWS * OCTETS / 4;
  struct Raw {
    uint4 row[BITS <= 3 ? 2 * ROWS : 2], lower[TURNS ? TURNS : 1], upper[TURNS ? TURNS : 1];
  };

  // Asks for the centroids of the row tiles, which start at tile[r].
  PW_INLINE static Raw load(const u64 (&tile)[ROWS], int lane_index) {
    Raw raw;
    const int g = lane_index / 4;
    if constexpr (BITS <= 3) {
#pragma unroll
      for (int i = 0; i < 2 * ROWS; ++i) {
        const u64 at = tile[i / 2] + (g + i % 2 * 8) * (2 << BITS);
        if constexpr (BITS == 3) {
          raw.row[i] = *(const uint4*)at;
        } else {
          const uint2 v = *(const uint2*)at;
          raw.row[i] = make_uint4(v.x, v.y, 0, 0);
        }
      }
    }
    if constexpr (BITS == 4) {
      raw.row[0] = *(const uint4*)(tile[0] + g * 32);
      raw.row[1] = *(const uint4*)(tile[0] + g * 32 + 16);
    }
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const int chunk = lane_index / 8 + i * 4, r = chunk / OCTETS;
      const u64 start = ROWS == 2 && r ? tile[ROWS - 1] : tile[0];
      const u64 at = start + ((lane_index & 7) * 2 << BITS) + chunk % OCTETS * 16;
      raw.lower[i] = *(const uint4*)at;
      raw.upper[i] = *(const uint4*)(at + (16 << BITS));
    }
    return raw;
  }

  // Fills the tables, in shared memory at address `table`. One warp; beyond 6 bits centroids are
  // read where they are.
  PW_INLINE void fill(const Raw& raw, const u64 (&tile)[ROWS], u32 table, int lane_index,
                      u32 opaque_65536) {
    two_to_16 = opaque_65536;
    if constexpr (BITS <= 3) {
#pragma unroll
      for (int i = 0; i < 2 * ROWS; ++i) octet[i] = octet_of(raw.row[i]);
    } else if constexpr (BITS <= 6) {
      lane = table + lane_index * 4;
      if constexpr (BITS == 4) {
        octet[0] = octet_of(raw.row[0]);
        octet[1] = octet_of(raw.row[1]);
      }
      __syncwarp();  // nobody still looks codes up
#pragma unroll
      for (int i = 0; i < TURNS; ++i) store(raw.lower[i], raw.upper[i], table, lane_index, i);
      __syncwarp();
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) row[r] = (const u16*)tile[r] + (lane_index / 4 << BITS);
    }
  }

  // Eight codes of rows g and g + 8: a word goes to the four lanes of its row.
  PW_INLINE static void store(const uint4& lower, const uint4& upper, u32 table, int lane_index,
                              int turn) {
    const u32 a[4] = {centroids(lower.x), centroids(lower.y), centroids(lower.z),
                      centroids(lower.w)};
    const u32 b[4] = {centroids(upper.x), centroids(upper.y), centroids(upper.z),
                      centroids(upper.w)};
    const int chunk = lane_index / 8 + turn * 4;  // over the row tiles' codes, which lie in a row
    const u32 to = table + chunk * 8 * 128 + (lane_index & 7) * 16;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      store_shared4(to + 2 * c * 128, bytes(a[c], b[c], 0x5410));
      store_shared4(to + (2 * c + 1) * 128, bytes(a[c], b[c], 0x7632));
    }
  }
};
