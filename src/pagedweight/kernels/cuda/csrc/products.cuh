// Products of a decoded row tile with all groups of a block's tokens. GROUPS is the kernel's.
#pragma once
#include "dtype.cuh"

// Activations of a lane's token and columns: 16 neighbours, near (0..7) and far (8..15) ones.
struct Columns {
  uint4 near, far;
};
PW_INLINE Columns columns_at(u64 at) {
  return {load_fresh((const void*)at), load_fresh((const void*)(at + 16))};
}

// A lane's activations, of one token in each group of 8.
struct Inputs {
  u64 at[GROUPS];  // column tile that was loaded last
  Columns x[GROUPS];
  PW_INLINE void load(int step) {
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      at[n] += step;
      x[n] = columns_at(at[n]);
    }
  }
};

// Products of half a tile (32 columns) of ROWS row tiles: near and far ones of every group.
template <int ROWS>
PW_INLINE void multiply_half(float (&total)[ROWS][GROUPS][4], const u32 (&a)[ROWS][2][4],
                             const Inputs& in, int half) {
#pragma unroll
  for (int far = 0; far < 2; ++far)
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const uint4& x = far ? in.x[n].far : in.x[n].near;
        multiply16816(total[r][n], a[r][far], half ? x.z : x.x, half ? x.w : x.y);
      }
}
