// Fused MoE for many tokens an expert: the same work as decode.cu with up to 144 tokens a block, so
// that a weight is decoded once for all of them.
//
// A thread block takes one block of tokens and eight units (pairs of row tiles), one a warp. Column
// tile by column tile, activations go through shared memory for all warps, planes through each
// warp's own ring; a warp decodes two row tiles into registers and multiplies them with 18 groups
// of 8 tokens. The plan is made by a launch of its own.
const int WARPS = 8, THREADS = WARPS * 32;
#include "combine.cuh"
#include "ring.cuh"

const int BLOCK_MOST = 144;  // tokens of a block: as many sums as registers hold
const int GROUPS = BLOCK_MOST / 8;
const int TILE_BYTES = BLOCK_MOST * 128;  // activations of a column tile
const int PIECES = (BLOCK_MOST * 8 + THREADS - 1) / THREADS;  // 16 bytes each, of a thread

extern __shared__ __align__(1024) unsigned char memory[];

// At most 144 routed tokens of one expert, pairs[first .. first + count), and which blocks of the
// plan are this expert's: all that read the same weights.
struct WideBlock {
  int expert, first, count, group_first, group_blocks;
};
// The plan in global memory: the count of blocks, the blocks, the pairs.
struct WidePlan {
  int* block_count;
  WideBlock* blocks;
  int* pairs;
};
PW_INLINE WidePlan wide_plan(const Params& p) {
  return {p.plan, (WideBlock*)(p.plan + 4), p.plan + p.pairs_at};
}

// ---- the plan: one thread block of PLANNERS warps, each over neighbouring pairs, in order

const int PLANNERS = 32;

// Calls put(pair, expert, rank among the warp's pairs of that expert) for the warp's pairs, and
// leaves its count of each expert added to `count`.
template <class Put>
PW_INLINE void rank_share(const Params& p, u32* count, Put put) {
  const int pairs = p.tokens * p.top_k, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = ceil_div(ceil_div(pairs, PLANNERS), 32) * 32;
  for (int base = warp * share; base < min(pairs, (warp + 1) * share); base += 32) {
    const int i = base + lane, e = i < pairs ? local_expert(p, i) : NOBODY;
    const u32 same = __match_any_sync(~0u, e);
    const int before = __popc(same & ((1u << lane) - 1));
    if (e != NOBODY) put(i, e, count[e] + before);
    __syncwarp();
    if (e != NOBODY && before == 0) count[e] += __popc(same);
    __syncwarp();
  }
}

// Blocks of each expert: as few as can be, filled alike, in steps of 8 tokens. One warp.
PW_INLINE void lay_out_wide(const Params& p, const WidePlan& plan, const u32* total, u32* start,
                            int lane) {
  int pairs = 0, blocks = 0;
  for (int base = 0; base < p.experts; base += 32) {
    const int e = base + lane, c = e < p.experts ? total[e] : 0;
    const int own = ceil_div(c, BLOCK_MOST);
    int pair_sum = c, block_sum = own;
    for (int d = 1; d < 32; d *= 2) {
      const int a = __shfl_up_sync(~0u, pair_sum, d), b = __shfl_up_sync(~0u, block_sum, d);
      if (lane >= d) pair_sum += a, block_sum += b;
    }
    const int first = pairs + pair_sum - c, at = blocks + block_sum - own;
    if (e < p.experts) start[e] = first;
    const int each = own ? ceil_div(ceil_div(c, own), 8) * 8 : 0;
    for (int b = 0; b < own; ++b)
      plan.blocks[at + b] = {e, first + b * each, min(each, c - b * each), at, own};
    pairs += __shfl_sync(~0u, pair_sum, 31);
    blocks += __shfl_sync(~0u, block_sum, 31);
  }
  if (lane == 0) *plan.block_count = blocks;
}

extern "C" __global__ void __launch_bounds__(PLANNERS * 32, 1)
    plan(const __grid_constant__ Params p) {
  const WidePlan plan = wide_plan(p);
  u32* count = (u32*)memory;  // [PLANNERS][experts], then [experts] twice
  u32* total = count + PLANNERS * p.experts;
  u32* start = total + p.experts;
  for (int i = threadIdx.x; i < PLANNERS * p.experts; i += blockDim.x) count[i] = 0;
  __syncthreads();
  u32* mine = count + threadIdx.x / 32 * p.experts;
  rank_share(p, mine, [](int, int, int) {});
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += blockDim.x) {
    u32 sum = 0;
    for (int w = 0; w < PLANNERS; ++w) {
      const u32 own = count[w * p.experts + e];
      count[w * p.experts + e] = sum;
      sum += own;
    }
    total[e] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) lay_out_wide(p, plan, total, start, threadIdx.x);
  __syncthreads();
  rank_share(p, mine, [&](int pair, int e, int rank) { plan.pairs[start[e] + rank] = pair; });
}

// ---- the work

// Shared memory: the head, then a ring of planes and tables for each warp, then a ring of
// activations for all.
const int TABLES = table_bytes(6, 2);
const int RING = 4608;  // 3 stages of 1536 bytes, or 2 of 2048 beyond 6 bits
const int REGION = RING + TABLES, REGIONS_AT = 1024, COLUMNS_AT = REGIONS_AT + WARPS * REGION;
PW_INLINE constexpr int slots_of(int bits) { return bits <= 6 ? 3 : 2; }
PW_INLINE constexpr int slot_bytes(int slots) { return slots == 3 ? 1536 : 2048; }

struct Head {
  Phase phase[2];
  int row_groups[2];  // eights of units
  int next;
  int pairs[BLOCK_MOST];
};
static_assert(sizeof(Head) <= REGIONS_AT, "the head fits");
PW_INLINE Head& head() { return *(Head*)memory; }

struct Worker {
  const Params& p;
  const WidePlan plan;
  const int lane, warp, blocks;
  const u32 two_to_16;
  Task task;
  u64 row;                   // of the device table
  int block, count, groups;  // of tokens
  bool real;                 // whether the warp's unit exists
  Pieces pieces;             // of the warp's planes
  u64 rows;           // activations of the call's tokens, or act(gate) * up
  u32 row_at[PIECES];  // byte offsets of the rows that this thread copies, at its piece of a tile
  float sum[2][GROUPS][4];

  PW_INLINE const Phase& phase() const { return head().phase[task.phase]; }

  // Item `index` of all; items of one expert's blocks that read the same weights are neighbours.
  PW_INLINE void take(int index) {
    const int of_gate = blocks * head().row_groups[0];
    task.phase = index >= of_gate;
    const int i = index - task.phase * of_gate, row_groups = head().row_groups[task.phase];
    const WideBlock any = plan.blocks[i / row_groups];
    const int local = i - any.group_first * row_groups;
    block = task.block = any.group_first + local % any.group_blocks;
    const int unit = local / any.group_blocks * WARPS + warp;
    real = unit < phase().units;
    task.unit = min(unit, phase().units - 1);
    row = table_row(p, any.expert, task.phase, lane);
    const WideBlock mine = plan.blocks[block];
    count = mine.count;
    groups = ceil_div(count, 8);
    __syncthreads();
    if (threadIdx.x < BLOCK_MOST)
      head().pairs[threadIdx.x] = plan.pairs[mine.first + min((int)threadIdx.x, count - 1)];
    if (task.phase == 1 && threadIdx.x == 0) {
      const u32* ready = ((Counters*)p.counters)->ready + block;
      while (load_acquire(ready) != (u32)head().row_groups[0]) __nanosleep(32);
    }
    __syncthreads();
    rows = task.phase ? (u64)p.middle : (u64)p.x;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int pair = head().pairs[min((int)threadIdx.x / 8 + 32 * i, BLOCK_MOST - 1)];
      const u32 row = task.phase ? pair * p.middle_stride : pair / p.top_k * p.x_stride;
      row_at[i] = row * 2 + threadIdx.x % 8 * 16;
    }
  }

  // Ask for a column tile: this warp's planes and this thread's part of the activations, in one of
  // `slots`. Pieces of odd rows change places in pairs, so that reading eight lanes' pieces meets
  // no bank twice.
  template <int BITS>
  PW_INLINE void ask(int tile) {
    const int slots = slots_of(BITS);
    if (tile < phase().cols) {
      const u32 start = shared_address(memory);
      const u32 to =
          start + REGIONS_AT + warp * REGION + tile % slots * slot_bytes(slots) + lane * 16;
#pragma unroll
      for (int i = 0; i < (BITS + 1) / 2; ++i) copy16(to + i * 512, pieces.at[i] + tile * 128);
      const int row = threadIdx.x / 8;
      const u32 at = start + COLUMNS_AT + tile % slots * TILE_BYTES + row * 128 +
                     (threadIdx.x % 8 ^ (row & 1)) * 16;
#pragma unroll
      for (int i = 0; i < PIECES; ++i)
        if (row / 8 + i * 4 < groups) copy16(at + i * 4096, rows + row_at[i] + tile * 128);
    }
    copies_commit();
  }

  template <int BITS>
  PW_INLINE void multiply() {
    u64 tile[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      tile[r] = centroids_of(phase(), task.phase, task.unit, row, r, BITS);
    Tables<BITS, 2> tables;
    const auto raw = tables.load(tile, lane);
    // Up to 6 bits a stage leaves room for three.
    const int slots = slots_of(BITS);
    ask<BITS>(0);
    if (slots == 3) ask<BITS>(1);
    const int region = REGIONS_AT + warp * REGION;
    tables.fill(raw, tile, shared_address(memory) + region + RING, lane, two_to_16);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < GROUPS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][n][i] = 0;
    const int g = lane / 4, piece = (lane & 3) * 2;
    const u32 near_at = g * 128 + (piece ^ (g & 1)) * 16;
    const u32 far_at = g * 128 + (piece + 1 ^ (g & 1)) * 16;
#pragma unroll 1
    for (int c = 0; c < phase().cols; ++c) {
      copies_wait<slots - 2>();
      __syncthreads();  // the tile is there for all, and all are done with the one before
      ask<BITS>(c + slots - 1);
      const u32 at =
          shared_address(memory) + region + c % slots * slot_bytes(slots) + lane * 4;
      u32 a[2][4][4];
      tile_fragments<BITS, 0>(at, tables, a[0]);
      tile_fragments<BITS, 1>(at + 128, tables, a[1]);
      const unsigned char* x = memory + COLUMNS_AT + c % slots * TILE_BYTES;
#pragma unroll
      for (int n = 0; n < GROUPS; n += 2) {
        if (n >= groups) break;
        // Two groups at once: four chains of sums, so that no product waits for the one before.
        uint4 near[2], far[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          near[m] = *(const uint4*)(x + (n + m) * 1024 + near_at);
          far[m] = *(const uint4*)(x + (n + m) * 1024 + far_at);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint4& v = i < 4 ? near[i / 2 % 2] : far[i / 2 % 2];
          multiply16816(sum[i % 2][n + i / 2 % 2], a[i % 2][i / 4], v.x, v.y);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint4& v = i < 4 ? near[i / 2 % 2] : far[i / 2 % 2];
          multiply16816(sum[i % 2][n + i / 2 % 2], a[i % 2][2 + i / 4], v.z, v.w);
        }
      }
    }
    copies_wait<0>();
  }

  // A fragments of a row tile: near columns 0..3 of the lane's 16, far ones, then the next four.
  template <int BITS, int R>
  PW_INLINE static void tile_fragments(u32 at, const Tables<BITS, 2>& tables,
                                       u32 (&a)[4][4]) {
    u32 top, half[2][4];
    const Codes<BITS> codes = codes_at<BITS>(at, 256, top);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      fragments<BITS, 2, R>(codes, top, tables, h, half);
#pragma unroll
      for (int i = 0; i < 8; ++i) a[h * 2 + i / 4][i % 4] = half[i / 4][i % 4];
    }
  }

  PW_INLINE void multiply_any() {
    switch (bits_of(row)) {
      case 2: return multiply<2>();
      case 3: return multiply<3>();
      case 4: return multiply<4>();
      case 5: return multiply<5>();
      case 6: return multiply<6>();
      case 7: return multiply<7>();
      default: return multiply<8>();
    }
  }

  // Rows g, g + 8 for tokens 2t, 2t + 1 of every group.
  PW_INLINE void write() const {
    if (!real) return;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + (i & 2) * 4, token = n * 8 + (lane & 3) * 2 + (i & 1);
        if (token >= count) continue;
        const u64 pair = head().pairs[token];
        if (task.phase == 0) {
          const int col = task.unit * 16 + row;
          const float v = activate(sum[0][n][i], p.activation) * sum[1][n][i];
          u16* to = p.middle + pair * p.middle_stride;
          to[col] = col < p.intermediate ? to_act(v) : 0;
          if (task.unit + 1 == phase().units)
            for (int rest = col + 16; rest < p.middle_stride; rest += 16) to[rest] = 0;
        } else {
          const int col = task.unit * 32 + row;
          float* to = p.parts + pair * p.hidden;
          if (col < p.hidden) to[col] = sum[0][n][i];
          if (col + 16 < p.hidden) to[col + 16] = sum[1][n][i];
        }
      }
    }
  }

  PW_INLINE void run() {
    Counters* c = (Counters*)p.counters;
    const int items = blocks * (head().row_groups[0] + head().row_groups[1]);
    for (int index = blockIdx.x; index < items;) {
      take(index);
      u32 claimed = 0;
      if (threadIdx.x == 0) claimed = gridDim.x + atomicAdd(&c->claimed[0], 1u);
      pieces = pieces_of(phase(), task.phase, task.unit, row, 0, 2, 1, 0, lane);
      multiply_any();
      write();
      if (threadIdx.x == 0) head().next = claimed;
      __syncthreads();
      if (threadIdx.x == 0) signal_release(task.phase == 0 ? c->ready + block : &c->finished);
      index = head().next;
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill(const __grid_constant__ Params p, const u32 two_to_16) {
  const WidePlan plan = wide_plan(p);
  const int blocks = *plan.block_count;
  if (threadIdx.x < 2) {
    head().phase[threadIdx.x] = phase_of(p, threadIdx.x, blocks, 0);
    head().row_groups[threadIdx.x] = ceil_div(head().phase[threadIdx.x].units, WARPS);
  }
  __syncthreads();
  Worker worker = {p, plan, (int)threadIdx.x % 32, (int)threadIdx.x / 32, blocks, two_to_16};
  worker.run();
  __syncthreads();
  combine_after(p, blocks * head().row_groups[1]);
  if (p.mass) {
    Sums(&scratch)[WARPS] = *(Sums(*)[WARPS])(memory + REGIONS_AT);
    for (int b = blockIdx.x; b < blocks; b += gridDim.x) {
      const WideBlock first = plan.blocks[b];
      if (first.group_first != b) continue;
      const WideBlock last = plan.blocks[b + first.group_blocks - 1];
      count_expert(p, plan.pairs, first.expert, first.first, last.first + last.count, scratch);
    }
  }
  leave(p, blocks);
}
