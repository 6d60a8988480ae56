// Units of work as a warp of decode_groups.cu or prefill.cu sees them, its ring of planes, and the
// fragments of a stage.
#pragma once
#include "tables.cuh"
#include "plan.cuh"

// One unit of work. What a lane holds of its block's row of the device table goes beside it.
struct Task {
  int phase, block, unit;
  u32 parity;  // of the units that this warp has done in this phase
};

// A block's row of the device table, a piece a lane: 0..7 plane addresses, 8 the table's address, 9
// the bits. Nothing here waits for it.
PW_INLINE u64 table_row(const Params& p, int expert, int phase, int lane) {
  const int row = expert * 2 + phase;
  const u64* at = lane < 8 ? p.planes + row * 8 + lane : p.tables + row;
  return lane == 9 ? (u64)p.bits[row] : *at;
}

// Planes are copied in runs: one plane of one row tile by `cols` column tiles, 128 bytes each, by
// eight lanes a tile; a stage lies in shared memory as [plane][row tile][column tile][32 words].
// Here is where this lane's pieces are of a stage that starts at column tile `from`, one for each
// copy instruction; copies that have no run left repeat the last one.
struct Pieces {
  u64 at[4];
};
__device__ __noinline__ Pieces pieces_of(const Phase& f, int phase, int unit, u64 row,
                                         int first_row, int rows, int cols, int from, int lane) {
  const int bits = (int)__shfl_sync(~0u, row, 9);
  const int lanes = cols * 8, two = rows - 1;
  Pieces s;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int run = min((i * 32 + lane) / lanes, (bits << two) - 1);
    const u64 plane = __shfl_sync(~0u, row, run >> two);
    const int tile = row_tile(f, phase, unit, first_row + (run & two));
    s.at[i] = plane + ((u64)tile * f.cols + from) * 128 + (lane & lanes - 1) * 16;
  }
  return s;
}

PW_INLINE int bits_of(u64 row) { return (int)__shfl_sync(~0u, row, 9); }
// Address of the centroids of a unit's row tile.
PW_INLINE u64 centroids_of(const Phase& f, int phase, int unit, u64 row, int r, int bits) {
  return __shfl_sync(~0u, row, 8) + ((u64)row_tile(f, phase, unit, r) << (bits + 5));
}

// The A fragments of products from..to of a row tile: near columns 0..7 of the lane's 16, far ones,
// near ones, far ones; each takes two neighbouring registers of the 16-byte loads that activations
// come with. `top`: the plane of the most significant bits.
template <int BITS, int ROWS, int R>
PW_INLINE void fragments(const Codes<BITS>& codes, u32 top, const Tables<BITS, ROWS>& tables,
                         int half, u32 (&a)[2][4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 near[2], far[2];
    tables.template at<R>(codes, top, half * 2 + i, near, far);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a[0][i * 2 + h] = near[h];
      a[1][i * 2 + h] = far[h];
    }
  }
}

// A tile's codes from its planes in shared memory, `stride` bytes from one to the next.
template <int BITS>
PW_INLINE Codes<BITS> codes_at(u32 at, int stride, u32& top) {
  u32 word[BITS];
#pragma unroll
  for (int i = 0; i < BITS; ++i) word[i] = shared_word(at + i * stride);
  top = word[0];
  return Codes<BITS>::of(word);
}
