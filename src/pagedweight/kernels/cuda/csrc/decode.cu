// Fused MoE for few tokens an expert: gate_up, activation, down, combine in one launch.
//
// Every warp works for itself: it claims a unit (two row tiles for one block of 8 tokens), streams
// its planes, looks codes up in tables of its own, multiplies on the tensor cores and writes the
// result. Where units are few or long, a group of warps shares one by columns. docs/kernels.md
// draws it.
#include "lookup.cuh"
const int WARPS = PW_WARPS, THREADS = WARPS * 32;

#include "combine.cuh"
#include "stream.cuh"

extern __shared__ __align__(1024) unsigned char memory[];

// Shared memory by address: the system's own, up to WINDOW; the plan, up to FRONT_AT; the first two
// streams; at TABLES_AT the tables; the other streams.
const int WINDOW = __CUDA_ARCH__ >= 900 ? 1024 : 0;
const int FRONT_AT = TABLES_AT - 2 * STREAM_BYTES;
PW_INLINE u32 stream_at(int warp) {
  return warp < 2 ? FRONT_AT + warp * STREAM_BYTES
                  : TABLES_AT + WARPS * TABLE_BYTES + (warp - 2) * STREAM_BYTES;
}
PW_INLINE unsigned char* memory_at(u32 address) {
  return memory + (address - shared_address(memory));
}

// Column tiles before the end of a stream at which the next unit is looked for.
const int NEAR_END = 4;

struct Head {  // of the plan
  Phase phase[2];
  int block_count;
  u32 board[2][WARPS];  // by phase and a group's first warp: the unit claimed, and its parity
};
PW_INLINE Head& head() { return *(Head*)memory; }
static_assert(sizeof(Head) == 52 + 8 * WARPS, "shapes.py computes the same");
PW_INLINE Plan plan_of(const Params& p) { return plan_behind(head(), p); }

// Activations of a lane's token and columns: 16 neighbours, near (0..7) and far (8..15) ones.
struct Columns {
  uint4 near, far;
};
PW_INLINE Columns columns_at(const u16* row, int tile) {
  return {load_fresh(row + tile * 64), load_fresh(row + tile * 64 + 8)};
}

template <int BITS, int R>
PW_INLINE void multiply_row(const unsigned char* at, const Lookup<BITS, Stage<BITS>::ROWS>& lookup,
                            const Columns& x, float (&total)[4]) {
  u32 a[4][4];
  fragments<BITS, R>(at, lookup, a);
  multiply16816(total, a[0], x.near.x, x.near.y);
  multiply16816(total, a[1], x.far.x, x.far.y);
  multiply16816(total, a[2], x.near.z, x.near.w);
  multiply16816(total, a[3], x.far.z, x.far.w);
}
template <int BITS>
PW_INLINE void multiply_tile(const unsigned char* at, const Lookup<BITS, Stage<BITS>::ROWS>& lookup,
                             const Columns& x, float (&total)[Stage<BITS>::ROWS][4]) {
  multiply_row<BITS, 0>(at, lookup, x, total[0]);
  if constexpr (Stage<BITS>::ROWS == 2) multiply_row<BITS, 1>(at, lookup, x, total[1]);
}

struct Worker {
  const Params& p;
  const int lane, warp;
  const u32 two_to_16;
  Stream stream;
  Task task, next;  // next.phase is 2 after the last unit, -1 until it is known
  bool streams_next;
  u32 parity;       // of the units done in this phase
  u32 down_units;   // written by this warp
  float sum[2][4];  // of the unit's two row tiles

  PW_INLINE const Phase& phase(int i) const { return head().phase[i]; }
  PW_INLINE int group_size(int phase) const { return 1 << head().phase[phase].log_group; }
  PW_INLINE int group(int phase) const { return warp >> head().phase[phase].log_group; }
  PW_INLINE int member(int phase) const { return warp & group_size(phase) - 1; }
  PW_INLINE int first_column(int i, int member) const {
    return phase(i).cols * member >> phase(i).log_group;
  }
  PW_INLINE void sync_group() const {
    const int g = group(task.phase);
    barrier_sync(task.phase ? 15 - g : 1 + g, group_size(task.phase) * 32);
  }

  // Where this lane's token (the n of the product is lane / 4) has its activations: the first of
  // the 16 columns of a tile that are the lane's.
  PW_INLINE const u16* source() const {
    const Plan plan = plan_of(p);
    const Block block = plan.blocks[task.block];
    const int g = lane / 4, pair = plan.pairs[block.first() + (g < block.count() ? g : 0)];
    const int start = (lane & 3) * 16;
    if (task.phase == 0) return p.x + (u64)(pair / p.top_k) * p.x_stride + start;
    const u32* ready = ((Counters*)p.counters)->ready + task.block;
    if (lane == 0)
      while (load_acquire(ready) != (u32)phase(0).units) __nanosleep(32);
    __syncwarp();
    return p.middle + (u64)pair * p.middle_stride + start;
  }

  PW_INLINE void start_stream(bool of_next, int first_row) {
    const u64 row = of_next ? next.row : task.row;
    const int i = of_next ? next.phase : task.phase, unit = of_next ? next.unit : task.unit;
    const int from = first_column(i, member(i));
    const Pieces s = begin_pass(phase(i), i, unit, row, first_row, from, stream.to, lane);
    stream.asked(stream_at(warp));
#pragma unroll
    for (int j = 0; j < 4; ++j) stream.base[j] = s.at[j];
    stream.done = 0;
    stream.copies = s.copies;
    stream.log_tiles = s.log_tiles;
    stream.left = first_column(i, member(i) + 1) - from;
  }
  // Ask for one more stage, over the end of this pass and this unit. There is a free slot.
  PW_INLINE void keep_streaming(int passes_left, int first_row, u32 claimed) {
    if (stream.left <= NEAR_END) {
      if (next.phase < 0) try_meet_next(claimed);
      if (stream.left <= 0) {
        if (passes_left) {
          start_stream(false, first_row + 1);
        } else if (!streams_next && (next.phase & ~1) == 0) {
          start_stream(true, 0);
          streams_next = true;
        }
        return;
      }
    }
    stream.ask(stream_at(warp), lane);
  }

  // The unit `index` of a phase, or the first of the phase that follows when there is none.
  PW_INLINE void meet(int i, int index) {
    if (i == 0 && index >= phase(0).all_units) {
      i = 1;
      index = group(1) * gridDim.x + blockIdx.x;
    }
    if (index < phase(i).all_units)
      next = task_of(p, plan_of(p), phase(i), i, index, lane);
    else
      next.phase = 2;
  }
  // Learn the next unit, if this warp can: it was claimed at the start of this one, so that the
  // answer has arrived. A group's first warp tells the others, marked with the unit's parity.
  PW_INLINE void try_meet_next(u32 claimed) {
    const int i = task.phase;
    u32 told = __shfl_sync(~0u, claimed, 0);
    if (group_size(i) > 1) {
      u32* board = &head().board[i][group(i)];
      if (member(i) == 0) {
        if (lane == 0) atomicExch(board, told << 1 | parity);
      } else {
        if (lane == 0) told = atomicAdd(board, 0);
        told = __shfl_sync(~0u, told, 0);
        if ((told & 1) != parity) return;
        told >>= 1;
      }
    }
    meet(i, (WARPS >> phase(i).log_group) * gridDim.x + told);
  }

  // One pass over a unit: Stage<BITS>::ROWS row tiles over this warp's columns, into `total`.
  template <int BITS>
  PW_INLINE void pass(int first_row, int passes_left, const u16* from, u32 claimed,
                      float (&total)[Stage<BITS>::ROWS][4]) {
    const int ROWS = Stage<BITS>::ROWS, TILES = Stage<BITS>::TILES;
    const int first = first_column(task.phase, member(task.phase));
    const int end = first_column(task.phase, member(task.phase) + 1);
    Lookup<BITS, ROWS> lookup;
    const u64 in_global[ROWS] = {centroids_of(task, phase(task.phase), first_row, BITS)};
    Columns x = columns_at(from, first);
    keep_streaming(passes_left, first_row, claimed);
    stream.await();
    lookup.fill(memory_at(stream.from), in_global, warp, lane, two_to_16);
    stream.give_back(stream_at(warp));
#pragma unroll 1
    for (int c = first; c < end; c += TILES) {
      keep_streaming(passes_left, first_row, claimed);
      stream.await();
      const unsigned char* at = memory_at(stream.from + lane * 4);
      // Activations come one tile ahead; at the end the last ones come again, unused.
      const Columns y = columns_at(from, min(c + 1, end - 1));
      multiply_tile<BITS>(at, lookup, x, total);
      if constexpr (TILES == 1) {
        x = y;
      } else {
        x = columns_at(from, min(c + 2, end - 1));
        if (c + 1 < end) multiply_tile<BITS>(at + 128, lookup, y, total);
      }
      stream.give_back(stream_at(warp));
    }
  }

  template <int BITS>
  PW_INLINE void multiply_unit(const u16* from, u32 claimed) {
    if constexpr (Stage<BITS>::ROWS == 2) {
      pass<BITS>(0, 0, from, claimed, sum);
    } else {
      for (int r = 0; r < 2; ++r) {
        float total[1][4] = {{0, 0, 0, 0}};
        pass<BITS>(r, 1 - r, from, claimed, total);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[0][i] = r ? sum[0][i] : total[0][i];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[1][i] = total[0][i];
      }
    }
  }

  PW_INLINE void multiply_any(int bits, const u16* from, u32 claimed) {
    switch (bits) {
      case 2: return multiply_unit<2>(from, claimed);
      case 3: return multiply_unit<3>(from, claimed);
      case 4: return multiply_unit<4>(from, claimed);
      case 5: return multiply_unit<5>(from, claimed);
      case 6: return multiply_unit<6>(from, claimed);
      case 7: return multiply_unit<7>(from, claimed);
      default: return multiply_unit<8>(from, claimed);
    }
  }

  // Sums over the group's warps, in their order, in its first warp; passed through their tables.
  PW_INLINE void add_up_group(u32 claimed) {
    if (member(task.phase) > 0) {
      float* own = (float*)memory_at(table_start(warp)) + lane;
#pragma unroll
      for (int i = 0; i < 8; ++i) own[i * 32] = sum[i / 4][i % 4];
    }
    sync_group();
    if (member(task.phase) > 0) {
      // The first warp has told what is next, and tells no more until all have heard.
      if (next.phase < 0) try_meet_next(claimed);
    } else {
#pragma unroll 1
      for (int w = 1; w < group_size(task.phase); ++w) {
        const float* other = (const float*)memory_at(table_start(warp + w)) + lane;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] += other[i * 32];
      }
    }
    sync_group();
  }

  // Write the unit's rows g, g + 8 for tokens 2t, 2t + 1, and tell who waits for them.
  PW_INLINE void write() const {
    const Plan plan = plan_of(p);
    const Block block = plan.blocks[task.block];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i & 2) * 4, token = (lane & 3) * 2 + (i & 1);
      if (token >= block.count()) continue;
      const u64 pair = plan.pairs[block.first() + token];
      if (task.phase == 0) {
        const int col = task.unit * 16 + row;
        const float v = activate(sum[0][i], p.activation) * sum[1][i];
        u16* to = p.middle + pair * p.middle_stride;
        to[col] = col < p.intermediate ? to_act(v) : 0;
        // The last unit also clears what is left of the last column tile.
        if (task.unit + 1 == phase(0).units)
          for (int rest = col + 16; rest < p.middle_stride; rest += 16) to[rest] = 0;
      } else {
        const int col = task.unit * 32 + row;
        float* to = p.parts + pair * p.hidden;
        if (col < p.hidden) to[col] = sum[0][i];
        if (col + 16 < p.hidden) to[col + 16] = sum[1][i];
      }
    }
    __syncwarp();
    if (lane == 0 && task.phase == 0) signal_release(((Counters*)p.counters)->ready + task.block);
  }

  PW_INLINE void run() {
    meet(0, group(0) * gridDim.x + blockIdx.x);
    stream.to = stream.from = stream_at(warp);
    stream.ahead = parity = down_units = 0;
    streams_next = false;
    while (next.phase < 2) {
      task = next;
      if (!streams_next) start_stream(false, 0);
      while (stream.left > 0 && stream.ahead < SLOTS - 1) stream.ask(stream_at(warp), lane);
      streams_next = false;
      next.phase = -1;
      const bool leads = member(task.phase) == 0;
      u32 claimed = 0;
      if (leads && lane == 0)
        claimed = atomicAdd(&((Counters*)p.counters)->claimed[task.phase], 1u);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[0][i] = sum[1][i] = 0;
      multiply_any(task.bits(), source(), claimed);
      if (leads && next.phase < 0) try_meet_next(claimed);
      if (group_size(task.phase) > 1) add_up_group(claimed);
      if (leads) write();
      down_units += leads && task.phase == 1;
      parity = next.phase == task.phase ? parity ^ 1 : 0;
    }
    if (lane == 0 && down_units) signal_release(&((Counters*)p.counters)->finished, down_units);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode(const __grid_constant__ Params p, const u32 two_to_16) {
  if (shared_address(memory) != WINDOW) __trap();  // addresses are laid out behind it
  const Plan plan = plan_of(p);
  const int mixed = make_plan(p, plan, memory_at(TABLES_AT), THREADS);
  if (threadIdx.x < 2)
    head().phase[threadIdx.x] =
        phase_of(p, threadIdx.x, *plan.block_count, mixed >> threadIdx.x & 1);
  if (threadIdx.x < WARPS) head().board[0][threadIdx.x] = head().board[1][threadIdx.x] = 1;
  __syncthreads();
  Worker worker = {p, (int)threadIdx.x % 32, (int)threadIdx.x / 32, two_to_16};
  worker.run();
  __syncthreads();
  combine_after(p, head().phase[1].all_units);
  if (p.mass) count_all(p, plan, memory_at(TABLES_AT));
  leave(p, *plan.block_count);
}
