// What a warp of decode_groups.cu works at and what comes next: the head of shared memory, and the
// claims. WARPS and `memory` are the thread block's.
#pragma once
#include "ring.cuh"

// What a warp needs once a unit is kept in shared memory, so that the loops have the registers.
struct Desk {
  Task task, next;  // next.phase is 2 after the last unit, -1 until it is known
  int down_units;   // written by this warp
};
struct Head {  // of the plan
  Phase phase[2];
  int block_count;
  u32 board[2][WARPS];  // by phase and a group's first warp: the unit claimed, and its parity
  Desk desk[WARPS];
};
PW_INLINE Head& head() { return *(Head*)memory; }
static_assert(sizeof(Head) == 52 + 44 * WARPS, "shapes.py computes the same");
PW_INLINE Plan plan_of(const Params& p) { return plan_behind(head(), p); }

// Whether a warp has a whole group about it: when groups do not divide the warps, the last idle.
PW_INLINE bool in_group(const Params& p, int phase, int warp) {
  return warp >> head().phase[phase].log_group < WARPS >> head().phase[phase].log_group;
}

// Puts the unit `index` of a phase on a desk, or the first of this warp in the phase that follows
// when there is none (phase 2 after the last); returns the block's row of the device table.
PW_INLINE u64 meet(const Params& p, int phase, int index, u32 parity, int warp, int lane) {
  const Plan plan = plan_of(p);
  if (phase == 0 && (index >= head().phase[0].all_units || !in_group(p, 0, warp))) {
    phase = 1;
    parity = 0;
    index = (warp >> head().phase[1].log_group) * gridDim.x + blockIdx.x;
  }
  const Phase& f = head().phase[phase];
  Task t = {2, 0, 0, 0};
  u64 row = 0;
  if (index < f.all_units && in_group(p, phase, warp)) {
    const int place = f.units == 1 ? index : __umulhi(index, f.reciprocal);
    t = {phase, plan.order[phase * plan.most + place], index - place * f.units, parity};
    row = table_row(p, plan.blocks[t.block].expert(), phase, lane);
  }
  __syncwarp();  // every lane has read what was there
  if (lane == 0) head().desk[warp].next = t;
  __syncwarp();
  return row;
}
// The unit after the warp's present one, if it can be known: it was claimed when that one started,
// so that the answer has arrived. A group's first warp tells the others, marked with the parity;
// what is not known yet stays so. Not inlined: once or twice a unit.
__device__ __noinline__ u64 meet_next(const Params& p, u32 claimed, int warp, int lane) {
  const Task& task = head().desk[warp].task;
  const int i = task.phase, log = head().phase[i].log_group;
  u32 told = __shfl_sync(~0u, claimed, 0);
  if (log > 0) {
    u32* board = &head().board[i][warp >> log];
    if ((warp & (1 << log) - 1) == 0) {
      if (lane == 0) atomicExch(board, told << 1 | task.parity);
    } else {
      if (lane == 0) told = atomicAdd(board, 0);
      told = __shfl_sync(~0u, told, 0);
      if ((told & 1) != task.parity) return 0;
      told >>= 1;
    }
  }
  return meet(p, i, (WARPS >> log) * gridDim.x + told, task.parity ^ 1, warp, lane);
}
