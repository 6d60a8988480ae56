// Decode's codes to centroids: the A fragments of a tile's products, from a warp's own tables.
//
// 2, 3 bits: each row's centroids in registers, split in low and high bytes; a byte permute looks
//            four codes up at once.
// 4 to 6:    shared memory, word [code][lane]: low half row g, high half row g + 8. Every lane
//            reads its own bank, so a lookup never conflicts. Two row tiles alternate, 128 bytes
//            each; at 6 bits one fills the space.
// 7, 8 bits: read from global memory where they lie; slow, and rarely worth their bytes.
#pragma once
#include "octets.cuh"

const int TABLE_BYTES = PW_TABLE_BYTES;  // shared memory of a warp's tables: 8 KB
const int TABLES_AT = 16384;  // address of the first warp's: all are multiples of TABLE_BYTES
PW_INLINE u32 table_start(int warp) { return TABLES_AT + warp * TABLE_BYTES; }

// Tables of one row tile, or of two.
template <int BITS, int ROWS>
struct Lookup {
  // 2, 3 bits: [row tile][g, g + 8]. 4 bits: row g of row tile 0, a quarter of the lookups, because
  // shared memory would be the limit.
  Octet octet[BITS <= 3 ? 2 * ROWS : 2];
  u32 lane;                               // address of this lane's column of the shared table
  u32 high;                               // bits 8..15 of it that are above a code, in all bytes
  u32 two_to_16;
  const u16* row[ROWS];                   // in global memory: row g of each row tile

  static const int STRIDE = ROWS * 128;  // bytes from a code to the next

  // Product s of row tile R: near columns (2s, 2s + 1) and far ones (8 + 2s, 9 + 2s) of rows g and
  // g + 8. `top`: the plane of the most significant bits.
  template <int R>
  PW_INLINE void at(const Codes<BITS>& codes, u32 top, int s, u32 (&near)[2],
                    u32 (&far)[2]) const {
    if constexpr (BITS <= 3) {
      lookup_octet(octet[2 * R], codes.x[s], near[0], far[0]);
      lookup_octet(octet[2 * R + 1], codes.x[s] >> 16, near[1], far[1]);
    } else if constexpr (BITS <= 6) {
      u32 even[4], odd[4];
      addresses(codes, s, even, odd);
      const int first = R * 128, second = first + 2;
      if (BITS == 4 && R == 0) {
        lookup_sixteen(octet, codes.x[s] & 0x7777u, upper_half(top, s), near[0], far[0]);
      } else {
        near[0] = join16(shared16<first>(even[0]), shared16<first>(odd[0]), two_to_16);
        far[0] = join16(shared16<first>(even[1]), shared16<first>(odd[1]), two_to_16);
      }
      near[1] = join16(shared16<second>(even[2]), shared16<second>(odd[2]), two_to_16);
      far[1] = join16(shared16<second>(even[3]), shared16<second>(odd[3]), two_to_16);
    } else {
      const u32 even = codes.even(s, 0), odd = codes.odd(s);
      near[0] = global_pair(row[R], even, odd);
      far[0] = global_pair(row[R], even >> 8, odd >> 8);
      near[1] = global_pair(row[R] + (8 << BITS), even >> 16, odd >> 16);
      far[1] = global_pair(row[R] + (8 << BITS), even >> 24, odd >> 24);
    }
  }

  // Where the centroids of even and odd places are. With lines of 256 bytes a byte permute
  // addresses even places (it puts the code in place of the address's second byte, so that byte's
  // upper bits come with the codes) and a dot product odd ones: the logic and the multiply pipe
  // take half each.
  PW_INLINE void addresses(const Codes<BITS>& codes, int s, u32 (&even)[4], u32 (&odd)[4]) const {
    const u32 e = codes.even(s, ROWS == 2 ? high : 0), o = codes.odd_doubled(s);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      even[b] = ROWS == 2 ? bytes(e, lane, 0x7604 | b << 4) : dot4(e, 0x80u << 8 * b, lane);
      odd[b] = dot4(o, (ROWS == 2 ? 0x80u : 0x40u) << 8 * b, lane);
    }
  }
  PW_INLINE static u32 global_pair(const u16* row, u32 low, u32 high) {
    return centroid(row[low & 255]) | (u32)centroid(row[high & 255]) << 16;
  }

  // Fill the tables from centroids [ROWS][16][2^BITS] in shared memory at `raw`; beyond 6 bits they
  // are read where they are, row tile r at in_global[r]. One warp.
  PW_INLINE void fill(const unsigned char* raw, const u64 (&in_global)[ROWS], int warp,
                      int lane_index, u32 opaque_65536) {
    two_to_16 = opaque_65536;
    if constexpr (BITS <= 3) {
#pragma unroll
      for (int i = 0; i < 2 * ROWS; ++i)
        octet[i] =
            octet_of(read_row(raw + (i / 2 * 16 + lane_index / 4 + i % 2 * 8) * (2 << BITS)));
    } else if constexpr (BITS <= 6) {
      const u32 start = table_start(warp);
      lane = start + lane_index * 4;
      high = (start >> 8 & 0xFF) * 0x01010101u;
      __syncwarp();  // nobody still looks codes up
      fill_shared(raw, start, lane_index);
      if constexpr (BITS == 4) {
        octet[0] = octet_of(*(const uint4*)(raw + lane_index / 4 * 32));
        octet[1] = octet_of(*(const uint4*)(raw + lane_index / 4 * 32 + 16));
      }
      __syncwarp();
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) row[r] = (const u16*)in_global[r] + (lane_index / 4 << BITS);
    }
  }

  PW_INLINE static uint4 read_row(const unsigned char* at) {
    if constexpr (BITS == 3) return *(const uint4*)at;
    const uint2 v = *(const uint2*)at;
    return make_uint4(v.x, v.y, 0, 0);
  }

  // A lane takes rows g and g + 8 and eight codes; a word goes to the four lanes of its row.
  PW_INLINE static void fill_shared(const unsigned char* raw, u32 start, int lane_index) {
    const int octets = (1 << BITS) / 8;
#pragma unroll
    for (int i = 0; i < ROWS * octets / 4; ++i) {
      const int g = lane_index & 7, chunk = lane_index / 8 + i * 4;
      const int first = chunk % octets * 8, r = chunk / octets;
      const unsigned char* at = raw + ((r * 16 + g) * (1 << BITS) + first) * 2;
      const uint4 lower = *(const uint4*)at, upper = *(const uint4*)(at + 16 * (1 << BITS));
      const u32 a[4] = {centroids(lower.x), centroids(lower.y), centroids(lower.z),
                        centroids(lower.w)};
      const u32 b[4] = {centroids(upper.x), centroids(upper.y), centroids(upper.z),
                        centroids(upper.w)};
      const u32 to = start + first * STRIDE + r * 128 + g * 16;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        store_shared4(to + 2 * c * STRIDE, bytes(a[c], b[c], 0x5410));
        store_shared4(to + (2 * c + 1) * STRIDE, bytes(a[c], b[c], 0x7632));
      }
    }
  }
};
