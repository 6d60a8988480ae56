// From routed tokens to a list of work, the same in every thread block.
#pragma once
#include "dtype.cuh"

const int CHOICES = 5;

// One launch, for tokens from first_token of the call on, as the launcher fills it (params.py has
// the same fields in the same order).
struct Params {
  const u16* x;               // [tokens, x_stride]
  const float* weights;       // [tokens, top_k]
  const void* ids;            // [tokens, top_k] int32 or int64
  const int* bits;            // BlockTable
  const u64* planes;
  const u64* tables;
  u16* out;                   // [tokens, hidden]
  float* mass;                // LayerStats, or null
  float* seen;
  float* features;
  const long long* num_tokens;  // or null
  u32* counters;              // Counters, zero between launches
  u16* middle;                // [tokens * top_k, middle_stride]: act(gate) * up
  float* parts;               // [tokens * top_k, hidden]: down's output, unweighted
  int* plan;                  // of prefill (prefill.cu)
  int first_token, tokens, top_k, experts, hidden, intermediate, x_stride, middle_stride;
  int activation, ids_are_64, pairs_at;  // pairs_at: bytes from the plan's blocks to its pairs
  // Warps that share a unit, where precisions are alike and where they are mixed: choice i serves
  // fewer than group_below[i] blocks of tokens; group_logs[i] has log2 by phase, a byte each.
  int group_below[2][CHOICES], group_logs[2][CHOICES];
};

// Shared by the thread blocks of a launch; the last one leaves zeros.
struct Counters {
  u32 claimed[2], finished, left;  // claimed: units, by phase
  u32 ready[1];  // by block of tokens: units of gate_up finished
};

const int NOBODY = 0xFFFF;
// Groups of 8 tokens, the n of a tensor-core product, that decode multiplies with a weight.
#ifndef PW_GROUPS
#define PW_GROUPS 1
#endif
const int BLOCK_TOKENS = 8 * PW_GROUPS;

// At most BLOCK_TOKENS routed tokens of one expert: pairs[first .. first + count).
struct Block {
  u32 packed;
  PW_INLINE static Block of(u32 expert, u32 first, u32 count) {
    return {expert << 20 | count << 14 | first};
  }
  PW_INLINE int expert() const { return packed >> 20; }
  PW_INLINE int count() const { return packed >> 14 & 63; }
  PW_INLINE int first() const { return packed & 0x3FFF; }
};

struct Plan {
  u16* pairs;     // token * top_k + choice, sorted by expert, then ascending
  Block* blocks;  // ascending by expert
  u16* order;     // [phase][most]: blocks in the order in which their units are claimed
  int most;       // blocks that there is room for
  int* block_count;
};

// The plan in the shared memory behind a head, which holds the number of its blocks.
template <typename HEAD>
PW_INLINE Plan plan_behind(HEAD& head, const Params& p) {
  Plan plan;
  plan.blocks = (Block*)(&head + 1);
  plan.pairs = (u16*)((unsigned char*)plan.blocks + p.pairs_at);
  plan.most = p.pairs_at / 8;  // 4 bytes a block, and twice 2 for the orders
  plan.order = (u16*)(plan.blocks + plan.most);
  plan.block_count = &head.block_count;
  return plan;
}

PW_INLINE int local_expert(const Params& p, int pair) {
  const long long id = p.ids_are_64 ? ((const long long*)p.ids)[pair] : ((const int*)p.ids)[pair];
  return id >= 0 && id < p.experts ? (int)id : NOBODY;
}

// Rank of each pair among those of its expert, and how many there are. One warp, in order.
PW_INLINE void rank_pairs(int pairs, const u16* id, u16* rank, u32* count, int lane) {
  for (int base = 0; base < pairs; base += 32) {
    const int i = base + lane;
    const int e = i < pairs ? id[i] : NOBODY;
    const u32 same = __match_any_sync(~0u, e);
    const int before = __popc(same & ((1u << lane) - 1));
    const u32 seen = e == NOBODY ? 0 : count[e];
    if (i < pairs) rank[i] = (u16)(seen + before);
    __syncwarp();
    if (e != NOBODY && before == 0) count[e] = seen + __popc(same);
    __syncwarp();
  }
}

// First pair of each expert and its blocks of tokens. One warp.
PW_INLINE void lay_out(const Params& p, const Plan& plan, const u32* count, u32* start, int lane) {
  u32 total = 0;  // pairs in the high half, blocks in the low half
  for (int base = 0; base < p.experts; base += 32) {
    const int e = base + lane;
    const u32 c = e < p.experts ? count[e] : 0;
    const u32 own = c << 16 | (c + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    u32 sum = own;
    for (int d = 1; d < 32; d *= 2) {
      const u32 other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    const u32 at = total + sum - own;
    if (e < p.experts) start[e] = at >> 16;
    for (u32 b = 0; b < (own & 0xFFFF); ++b) {
      const u32 done = b * BLOCK_TOKENS;
      plan.blocks[(at & 0xFFFF) + b] =
          Block::of(e, (at >> 16) + done, min(c - done, (u32)BLOCK_TOKENS));
    }
    total += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) *plan.block_count = total & 0xFFFF;
}

PW_INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// How many blocks of tokens have each precision, by phase and bits (2 to 8).
struct Tally {
  u32 blocks[2][9];
  // Blocks of a phase without the most common precision.
  PW_INLINE int others(int phase, int all) const {
    u32 most = 0;
    for (int b = 2; b <= 8; ++b) most = max(most, blocks[phase][b]);
    return all - (int)most;
  }
};

// Blocks of tokens by the bits of their weights, most first, in the order of gate_up and of down:
// warps that are busy at the same time then run the same code, which the instruction cache holds,
// whatever the plan of precisions, and the last units are the shortest. Down keeps gate_up's order
// among equals, so that what it waits for comes first. A few blocks, or blocks that are all alike,
// stay as they are. All threads; `bits`: by expert and kind; `tally`: zeros; `keys`: a byte a block.
// A barrier must follow. Returns, bit by bit, which phases have mixed precisions: there a group of
// warps pays sooner (docs/kernels.md).
const int FEW_BLOCKS = 8;
const int MIXED_SHARE = 8;  // mixed: more than one block in so many has not the usual precision
PW_INLINE int order_blocks(const Plan& plan, const u8* bits, Tally& tally, u32* keys, int threads) {
  const int blocks = *plan.block_count, words = ceil_div(blocks, 4);
  for (int b = threadIdx.x; b < blocks; b += threads) {
    plan.order[b] = plan.order[plan.most + b] = (u16)b;
    for (int kind = 0; kind < 2; ++kind)
      atomicAdd(&tally.blocks[kind][bits[plan.blocks[b].expert() * 2 + kind]], 1u);
  }
  __syncthreads();
  const int others[2] = {tally.others(0, blocks), tally.others(1, blocks)};
  const int mixed = (others[0] * MIXED_SHARE > blocks) | (others[1] * MIXED_SHARE > blocks) << 1;
  if (others[0] + others[1] == 0 || blocks <= FEW_BLOCKS) return mixed;
  for (int phase = 0; phase < 2; ++phase) {
    u16* order = plan.order + phase * plan.most;
    for (int i = threadIdx.x; i < words * 4; i += threads) {
      const int block = i < blocks ? plan.order[i] : 0;
      ((u8*)keys)[i] = i < blocks ? bits[plan.blocks[block].expert() * 2 + phase] : 0;
    }
    __syncthreads();
    for (int b = threadIdx.x; b < blocks; b += threads) {
      const u32 mine = ((const u8*)keys)[b];
      int at = 0;  // how many come before
      for (int w = 0; w < words; ++w) {
        const u32 four = keys[w];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 other = four >> 8 * i & 255;
          at += other > mine || (other == mine && 4 * w + i < b);
        }
      }
      order[at] = phase ? plan.order[b] : (u16)b;
    }
    __syncthreads();
  }
  return mixed;
}

// All threads of the block; returns what order_blocks does. `scratch`: 4 bytes a pair and 10 an
// expert of shared memory, and 76.
PW_INLINE int make_plan(const Params& p, const Plan& plan, unsigned char* scratch, int threads) {
  const int pairs = p.tokens * p.top_k;
  u32* count = (u32*)scratch;
  u32* start = count + p.experts;
  u16* id = (u16*)(start + p.experts);
  u16* rank = id + pairs;
  Tally* tally = (Tally*)(rank + pairs);
  u8* bits = (u8*)(tally + 1);  // by expert and kind; read early, with the ids
  for (int e = threadIdx.x; e < p.experts; e += threads) count[e] = 0;
  for (int i = threadIdx.x; i < pairs; i += threads) id[i] = (u16)local_expert(p, i);
  for (int i = threadIdx.x; i < 2 * p.experts; i += threads) bits[i] = (u8)p.bits[i];
  if (threadIdx.x < sizeof(Tally) / 4) (&tally->blocks[0][0])[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    rank_pairs(pairs, id, rank, count, threadIdx.x);
    lay_out(p, plan, count, start, threadIdx.x);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += threads)
    if (id[i] != NOBODY) plan.pairs[start[id[i]] + rank[i]] = (u16)i;
  __syncthreads();
  return order_blocks(plan, bits, *tally, count, threads);  // keys where the pairs' counts were
}

// A unit of work is a pair of row tiles for one block of tokens: gate i and up i, or down's 2i and
// 2i + 1. Units are claimed in order: gate_up of every block of tokens, then down.
struct Phase {
  int tiles, cols, units;  // row tiles of a segment, column tiles, units of a block of tokens
  int all_units;           // of all blocks
  u32 reciprocal;          // ceil(2^32 / units): units are few, so the quotient is exact
  int log_group;           // log2 of the warps that share a unit
};
PW_INLINE Phase phase_of(const Params& p, int phase, int blocks, int mixed) {
  const int gate = ceil_div(p.intermediate, 16), down = ceil_div(p.hidden, 16);
  Phase f;
  f.tiles = phase ? down : gate;
  f.cols = ceil_div(phase ? p.intermediate : p.hidden, 64);
  f.units = phase ? ceil_div(down, 2) : gate;
  f.all_units = f.units * blocks;
  f.reciprocal = f.units == 1 ? 0xFFFFFFFFu : 0xFFFFFFFFu / f.units + 1;
  int choice = 0;
  while (choice < CHOICES - 1 && blocks >= p.group_below[mixed][choice]) ++choice;
  f.log_group = p.group_logs[mixed][choice] >> 8 * phase & 255;
  return f;
}
PW_INLINE int row_tile(const Phase& f, int phase, int unit, int r) {
  if (phase == 0) return r * f.tiles + unit;
  return min(2 * unit + r, f.tiles - 1);  // an odd last one is done twice, written once
}
