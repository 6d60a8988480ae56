// The end of a call: the weighted sum over a token's choices, the statistics, clean counters. WARPS
// and THREADS are the thread block's.
#pragma once
#include "plan.cuh"

// out[t] = sum over choices, in their order, of weight * down's output. Four columns a thread; a
// width that four does not divide is done one column a thread.
template <class Vector>
PW_INLINE void combine_columns(const Params& p) {
  const int thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
  const int width = sizeof(Vector) / sizeof(float), vectors = p.hidden / width;
  for (int i = thread; i < p.tokens * vectors; i += threads) {
    const int token = i / vectors, col = i % vectors * width;
    float sum[width] = {};
#pragma unroll 4
    for (int c = 0; c < p.top_k; ++c) {
      const int pair = token * p.top_k + c;
      const bool local = local_expert(p, pair) != NOBODY;
      Vector part = {};
      if (local) part = load_l2((const Vector*)(p.parts + (u64)pair * p.hidden + col));
      const float weight = local ? p.weights[pair] : 0.0f;
#pragma unroll
      for (int j = 0; j < width; ++j) sum[j] += weight * ((const float*)&part)[j];
    }
#pragma unroll
    for (int j = 0; j < width; ++j) p.out[(u64)token * p.hidden + col + j] = to_act(sum[j]);
  }
}
PW_INLINE void combine(const Params& p) {
  if (p.hidden % 4 == 0)
    combine_columns<float4>(p);
  else
    combine_columns<float>(p);
}

// Euclidean norm of a row, by one warp. Rows start at 16 bytes and are zero up to a whole piece of 8.
PW_INLINE float norm(const u16* row, int cols, int lane) {
  float sum = 0;
#pragma unroll 4
  for (int i = lane * 8; i < cols; i += 256) {
    const uint4 v = load_l2((const uint4*)(row + i));
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float low = to_float((u16)pairs[j]), high = to_float((u16)(pairs[j] >> 16));
      sum += low * low + high * high;
    }
  }
#pragma unroll
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return sqrtf(sum);
}

// Sums of one expert's real tokens (LayerStats): [0] mass, [1] tokens, then features of both kinds.
struct Sums {
  float v[8];
  PW_INLINE void add(const Sums& other) {
    for (int i = 0; i < 8; ++i)
      v[i] = i == 4 || i == 7 ? fmaxf(v[i], other.v[i]) : v[i] + other.v[i];
  }
};

// Add one expert's pairs[first .. last) to the statistics. Warp w takes every WARPS-th pair, in
// order; the first thread adds the warps up, in order. `scratch`: shared memory.
template <class Pair>
PW_INLINE void count_expert(const Params& p, const Pair* pairs, int expert, int first, int last,
                            Sums (&scratch)[WARPS]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int real = p.num_tokens ? (int)*p.num_tokens - p.first_token : p.tokens;
  Sums mine = {};
  for (int i = first + warp; i < last; i += WARPS) {
    const int pair = pairs[i];
    if (pair / p.top_k >= real) continue;
    const float r = p.weights[pair];
    const float x = norm(p.x + (u64)(pair / p.top_k) * p.x_stride, p.hidden, lane);
    const float m = norm(p.middle + (u64)pair * p.middle_stride, p.intermediate, lane);
    mine.add({r, 1, r * x, r * x * x, x, r * m, r * m * m, m});
  }
  if (lane == 0) scratch[warp] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < WARPS; ++w) mine.add(scratch[w]);
    p.mass[expert] += mine.v[0];
    p.seen[expert] += mine.v[1];
    float* f = p.features + expert * 6;
    for (int i = 0; i < 6; ++i)
      f[i] = i % 3 == 2 ? fmaxf(f[i], mine.v[2 + i]) : f[i] + mine.v[2 + i];
  }
  __syncthreads();
}

// Decode's statistics: each expert by one thread block. Its blocks of tokens are neighbours in the
// plan.
PW_INLINE void count_all(const Params& p, const Plan& plan, unsigned char* free_memory) {
  Sums(&scratch)[WARPS] = *(Sums(*)[WARPS])free_memory;
  for (int b = blockIdx.x; b < *plan.block_count; b += gridDim.x) {
    const int expert = plan.blocks[b].expert();
    if (b > 0 && plan.blocks[b - 1].expert() == expert) continue;
    int last = b;
    while (last + 1 < *plan.block_count && plan.blocks[last + 1].expert() == expert) ++last;
    const Block end = plan.blocks[last];
    count_expert(p, plan.pairs, expert, plan.blocks[b].first(), end.first() + end.count(), scratch);
  }
}

// Wait until `units` of down are written, and combine.
PW_INLINE void combine_after(const Params& p, int units) {
  const u32* finished = &((Counters*)p.counters)->finished;
  if (threadIdx.x == 0)
    while (load_acquire(finished) != (u32)units) __nanosleep(32);
  __syncthreads();
  combine(p);
}

// The last thread block to leave cleans the counters for the next launch.
PW_INLINE void leave(const Params& p, int blocks) {
  Counters* c = (Counters*)p.counters;
  __syncthreads();
  if (threadIdx.x == 0 && add_release(&c->left, 1) == gridDim.x - 1) {
    for (int b = 0; b < blocks; ++b) c->ready[b] = 0;
    c->claimed[0] = c->claimed[1] = c->finished = c->left = 0;
  }
}
