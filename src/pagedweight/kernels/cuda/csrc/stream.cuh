// One warp's stream from global to shared memory, some stages ahead of what it multiplies.
//
// A pass over row tiles starts with a stage of their centroids. The others are one or two row tiles
// by a few column tiles, all planes. A stage is copied in 16-byte pieces by the whole warp: a run
// is one plane of one row tile, and lanes take runs side by side, so that a stage lies in shared
// memory as [plane][row tile][column tile][32 words].
#pragma once
#include "lookup.cuh"
#include "plan.cuh"

const int SLOTS = 3;
const int SLOT_BYTES = 2048;
const int STREAM_BYTES = SLOTS * SLOT_BYTES;

// Row tiles and column tiles of a stage, so that no precision takes more than a slot and that the
// tables of its row tiles fit.
PW_INLINE constexpr int stage_rows(int bits) { return bits <= 5 ? 2 : 1; }
PW_INLINE constexpr int stage_log_tiles(int bits) { return bits == 5 ? 0 : 1; }
template <int BITS>
struct Stage {
  static const int ROWS = stage_rows(BITS), TILES = 1 << stage_log_tiles(BITS);
  static_assert(BITS * ROWS * TILES * 128 <= SLOT_BYTES, "a stage fits in its slot");
};

// One unit of work as a warp sees it. `row` is the block's row of the device table, a piece a lane:
// 0..7 plane addresses, 8 the table's address, 9 the bits.
struct Task {
  int phase, block, unit;
  u64 row;
  PW_INLINE int bits() const { return (int)__shfl_sync(~0u, row, 9); }
  PW_INLINE u64 table() const { return __shfl_sync(~0u, row, 8); }
};
// Asks for the row of the device table; nothing here waits for it. Once a unit, so not inlined.
__device__ __noinline__ Task task_of(const Params& p, const Plan& plan, const Phase& f, int phase,
                                     int index, int lane) {
  Task t;
  t.phase = phase;
  const int place = f.units == 1 ? index : __umulhi(index, f.reciprocal);
  t.block = plan.order[phase * plan.most + place];
  t.unit = index - place * f.units;
  const int row = plan.blocks[t.block].expert() * 2 + phase;
  const u64* at = lane < 8 ? p.planes + row * 8 + lane : p.tables + row;
  t.row = lane == 9 ? (u64)p.bits[row] : *at;
  return t;
}

struct Stream {
  u64 base[4];   // first piece of this lane in a pass, by copy instruction
  u32 done;      // bytes of a run asked for already
  int copies;    // copy instructions of a stage
  int left;      // column tiles not asked for yet
  int log_tiles; // column tiles of a stage
  u32 to;        // address of the slot to fill next
  u32 from;      // address of the oldest stage's slot
  int ahead;     // stages asked for and not worked off yet

  // Ask for a stage: there are columns left and a slot is free. `slots`: address of the first.
  PW_INLINE void ask(u32 slots, int lane) {
    const u32 piece = to + lane * 16;
    if (left >= 1 << log_tiles || (lane & 8) == 0) {  // the last stage may be one tile
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i < copies) copy16(piece + i * 512, base[i] + done);
    }
    done += 128 << log_tiles;
    left -= 1 << log_tiles;
    asked(slots);
  }
  PW_INLINE void asked(u32 slots) {
    copies_commit();
    to = to == slots + STREAM_BYTES - SLOT_BYTES ? slots : to + SLOT_BYTES;
    ++ahead;
  }

  // Wait for the oldest stage.
  PW_INLINE void await() const {
    if (ahead == SLOTS)
      copies_wait<SLOTS - 1>();
    else
      copies_wait<0>();
    __syncwarp();
  }
  PW_INLINE void give_back(u32 slots) {
    __syncwarp();  // every lane has read what it needs
    from = from == slots + STREAM_BYTES - SLOT_BYTES ? slots : from + SLOT_BYTES;
    --ahead;
  }
};

// Where a lane's pieces of a pass over row tiles first_row ... start; asks for the centroids on the
// way, at address `to`. `first_row` is 1 for the second of two passes; columns [from, end).
struct Pieces {
  u64 at[4];
  int copies, log_tiles;
};
__device__ __noinline__ Pieces begin_pass(const Phase& f, int phase, int unit, u64 row,
                                          int first_row, int from, u32 to, int lane) {
  const int bits = (int)__shfl_sync(~0u, row, 9), two = stage_rows(bits) - 1;
  const u64 table = __shfl_sync(~0u, row, 8);
  const int tile0 = row_tile(f, phase, unit, first_row);
  const int tile1 = row_tile(f, phase, unit, first_row + two);
  if (bits <= 6) {
    const int log_size = bits + 5;  // bytes of a row tile's centroids
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // at most a slot
      const int byte = i * 512 + lane * 16;
      const int tile = byte >> log_size ? tile1 : tile0;
      if (byte < (1 + two) << log_size)
        copy16(to + byte, table + ((u64)tile << log_size) + (byte & (1 << log_size) - 1));
    }
  }
  Pieces s;
  s.log_tiles = stage_log_tiles(bits);
  const int log_lanes = s.log_tiles + 3;  // of a run: 8 or 16 lanes
  const int run = lane >> log_lanes, log_runs = 5 - log_lanes;
  const int all = bits << two;
  s.copies = all + (1 << log_runs) - 1 >> log_runs;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int mine = min((i << log_runs) + run, all - 1);  // too many lanes: the last run again
    const u64 plane = __shfl_sync(~0u, row, mine >> two);
    const u64 tile = (u64)(two && mine & 1 ? tile1 : tile0) * f.cols + from;
    s.at[i] = plane + tile * 128 + (lane & (1 << log_lanes) - 1) * 16;
  }
  return s;
}

// Address of the centroids of a task's row tile.
PW_INLINE u64 centroids_of(const Task& t, const Phase& f, int r, int bits) {
  return t.table() + ((u64)row_tile(f, t.phase, t.unit, r) << (bits + 5));
}

// The A fragments of row tile R of a stage from a tile's planes at `at` (with the lane's offset):
// products of near columns 0..7, far ones, near ones, far ones of the lane's 16; each takes two
// neighbouring registers of the 16-byte loads that activations come with.
template <int BITS, int R>
PW_INLINE void fragments(const unsigned char* at, const Lookup<BITS, Stage<BITS>::ROWS>& lookup,
                         u32 (&a)[4][4]) {
  const int ROWS = Stage<BITS>::ROWS, TILES = Stage<BITS>::TILES;
  u32 word[BITS];
#pragma unroll
  for (int i = 0; i < BITS; ++i) word[i] = *(const u32*)(at + (i * ROWS + R) * TILES * 128);
  const Codes<BITS> codes = Codes<BITS>::of(word);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    u32 near[2], far[2];
    lookup.template at<R>(codes, word[0], s, near, far);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a[s / 2 * 2][s % 2 * 2 + h] = near[h];
      a[s / 2 * 2 + 1][s % 2 * 2 + h] = far[h];
    }
  }
}
