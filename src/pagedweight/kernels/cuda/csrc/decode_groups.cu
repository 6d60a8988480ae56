// Fused MoE as decode.cu, for experts with 9 to 32 tokens: a weight is decoded once for up to
// PW_GROUPS groups of 8 tokens. Also for calls whose plan does not fit there.
//
// Every warp works for itself: it claims a unit (two row tiles for one block of tokens), streams
// its planes, looks codes up in tables of its own, multiplies on the tensor cores and writes the
// result. Where units are few or long, a group of warps shares one by columns.
#include "ring.cuh"
const int WARPS = PW_WARPS, THREADS = WARPS * 32, GROUPS = PW_GROUPS;

#include "combine.cuh"

extern __shared__ __align__(1024) unsigned char memory[];

#include "desk.cuh"
#include "products.cuh"

// Shared memory: the plan, then a region for each warp, with its ring of stages at the start and
// its tables at the end.
const int REGIONS_AT = PW_PLAN_BYTES, REGION = PW_REGION_BYTES;

// How a precision is streamed: a stage is COLS column tiles of ROWS row tiles, as many as have room
// for their tables. The ring is AHEAD stages ahead of the products.
template <int BITS>
struct Stage {
  static const int ROWS = BITS <= 5 ? 2 : 1, COLS = BITS == 5 ? 1 : 2;
  static const int RUNS = BITS * ROWS, LANES = COLS * 8, BYTES = RUNS * COLS * 128;
  static const int COPIES = (RUNS * LANES + 31) / 32;
  static const int TABLE_AT = REGION - table_bytes(BITS, ROWS);
  static const int AHEAD = TABLE_AT / BYTES < 4 ? TABLE_AT / BYTES - 1 : 3;
  static_assert(AHEAD >= 2 && TABLE_AT - (AHEAD + 1) * BYTES >= 0, "the ring fits");
};

struct Worker {
  const Params& p;
  const int lane, warp;
  const u32 two_to_16;
  const u32 region;  // of this warp: address in shared memory
  u64 base[4];       // of the stream: the pieces that this lane asked for last
  int step;          // from a stage to the next, or 0 where nothing follows
  int whole;         // stages before one that lacks its second column tile; negative: there is none
  u32 from, free;    // oldest stage and slot to fill next: addresses of this lane's words
  u64 row, next_row;  // of the device table: the unit's and the next one's
  bool streams_next;
  float sum[2][GROUPS][4];

  PW_INLINE const Phase& phase(int i) const { return head().phase[i]; }
  PW_INLINE Desk& desk() const { return head().desk[warp]; }
  PW_INLINE int group_size(int phase) const { return 1 << head().phase[phase].log_group; }
  PW_INLINE int group(int phase) const { return warp >> head().phase[phase].log_group; }
  PW_INLINE int member(int phase) const { return warp & group_size(phase) - 1; }
  PW_INLINE int first_column(int i, int member) const {
    return phase(i).cols * member >> phase(i).log_group;
  }
  PW_INLINE void sync_group(int phase) const {
    // Groups of the two phases are the same, or the larger ones are few.
    const Phase(&of)[2] = head().phase;
    const bool apart = phase == 1 && of[0].log_group != of[1].log_group;
    const int g = group(phase);
    barrier_sync(apart ? 15 - g : 1 + g, group_size(phase) * 32);
  }

  // Where a lane's tokens (the n of the products is lane / 4) have their activations: column tile
  // `column` of the 16 columns of a tile that are the lane's.
  PW_INLINE void find_inputs(Inputs& in, int column) const {
    const Plan plan = plan_of(p);
    const Task task = desk().task;
    const Block block = plan.blocks[task.block];
    if (task.phase == 1) {
      const u32* ready = ((Counters*)p.counters)->ready + task.block;
      if (lane == 0)
        while (load_acquire(ready) != (u32)phase(0).units) __nanosleep(32);
      __syncwarp();
    }
    const int start = column * 64 + (lane & 3) * 16;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      const int token = n * 8 + lane / 4;
      const int pair = plan.pairs[block.first() + (token < block.count() ? token : 0)];
      const u16* row = task.phase ? p.middle + (u64)pair * p.middle_stride
                                  : p.x + (u64)(pair / p.top_k) * p.x_stride;
      in.at[n] = (u64)(row + start);
    }
  }

  // ---- the stream: every stage that is worked off asks for one more, AHEAD later

  template <int BITS>
  PW_INLINE u32 after(u32 slot) const {
    const u32 first = region + lane * 4, last = first + Stage<BITS>::AHEAD * Stage<BITS>::BYTES;
    return slot == last ? first : slot + Stage<BITS>::BYTES;
  }
  // Copies the stage that follows the last one into the free slot.
  template <int BITS>
  PW_INLINE void ask() {
    typedef Stage<BITS> S;
    const u32 to = free + lane * 12;
    const bool exists = S::COLS == 1 || whole != 0 || (lane & 8) == 0;
#pragma unroll
    for (int i = 0; i < S::COPIES; ++i) {
      base[i] += (long long)step;
      const int left = S::RUNS * S::LANES - i * 32;  // lanes that have a piece
      if (exists && (left >= 32 || lane < left)) copy16(to + i * 512, base[i]);
    }
    whole -= whole > 0;
    copies_commit();
  }
  // The next stage to ask for is the first of a pass over columns [first, end), of a unit with this
  // row of the device table.
  template <int BITS>
  PW_INLINE void aim(const Task& t, u64 of, int first_row, int first, int end) {
    typedef Stage<BITS> S;
    const Pieces s =
        pieces_of(phase(t.phase), t.phase, t.unit, of, first_row, S::ROWS, S::COLS, first, lane);
    step = S::COLS * 128;
    whole = (end - first) % S::COLS ? (end - first) / S::COLS : -1;
#pragma unroll
    for (int i = 0; i < S::COPIES; ++i) base[i] = s.at[i] - step;
  }

  // What follows this pass: the second row tile, or the next unit, if the ring is `ahead`.
  template <int BITS>
  PW_INLINE void turn_over(int passes_left, bool ahead, u32 claimed) {
    const Task task = desk().task;
    const int first = first_column(task.phase, member(task.phase));
    const int end = first_column(task.phase, member(task.phase) + 1);
    if (passes_left) return aim<BITS>(task, row, 1, first, end);
    if (desk().next.phase < 0) next_row = meet_next(p, claimed, warp, lane);
    const Task next = desk().next;
    if (ahead && (next.phase & ~1) == 0 && bits_of(next_row) == BITS) {
      const int to = member(next.phase), start = first_column(next.phase, to);
      const int stop = first_column(next.phase, to + 1);
      if (ceil_div(stop - start, Stage<BITS>::COLS) >= Stage<BITS>::AHEAD) {
        aim<BITS>(next, next_row, 0, start, stop);
        streams_next = true;
        const Phase& f = phase(next.phase);
        prefetch_l2(centroids_of(f, next.phase, next.unit, next_row, lane / 16, BITS) +
                    lane % 16 * (2 << BITS));
        return;
      }
    }
    // Something that exists, again and again: one column tile, which every pass has.
    aim<BITS>(task, row, 0, first, end);
#pragma unroll
    for (int i = 0; i < Stage<BITS>::COPIES; ++i) base[i] += (long long)step;
    step = whole = 0;
  }

  // ---- the work

  // One stage: wait for it, and ask for another one into the slot that the last one left.
  template <int BITS>
  PW_INLINE u32 next_stage() {
    copies_wait<Stage<BITS>::AHEAD - 1>();
    __syncwarp();  // it is there for all lanes, and all have read the one before
    ask<BITS>();
    free = from;
    from = after<BITS>(from);
    return free;
  }

  // One column tile, from a stage's words at `at`.
  template <int BITS>
  PW_INLINE static void multiply_tile(const Tables<BITS, Stage<BITS>::ROWS>& tables,
                                      const Inputs& in, u32 at,
                                      float (&total)[Stage<BITS>::ROWS][GROUPS][4]) {
    const int ROWS = Stage<BITS>::ROWS, COLS = Stage<BITS>::COLS, STRIDE = ROWS * COLS * 128;
    u32 top[2], a[2][ROWS][2][4];
    const Codes<BITS> codes = codes_at<BITS>(at, STRIDE, top[0]);
    fragments<BITS, ROWS, 0>(codes, top[0], tables, 0, a[0][0]);
    fragments<BITS, ROWS, 0>(codes, top[0], tables, 1, a[1][0]);
    if constexpr (ROWS == 2) {
      const Codes<BITS> second = codes_at<BITS>(at + COLS * 128, STRIDE, top[1]);
      fragments<BITS, ROWS, 1>(second, top[1], tables, 0, a[0][1]);
      multiply_half<ROWS>(total, a[0], in, 0);
      fragments<BITS, ROWS, 1>(second, top[1], tables, 1, a[1][1]);
    } else {
      multiply_half<ROWS>(total, a[0], in, 0);
    }
    multiply_half<ROWS>(total, a[1], in, 1);
  }

  // One pass over a unit: Stage<BITS>::ROWS row tiles over this warp's columns, into `total`.
  template <int BITS>
  PW_INLINE void pass(int first_row, int passes_left, Inputs& in, u32 claimed,
                      float (&total)[Stage<BITS>::ROWS][GROUPS][4]) {
    typedef Stage<BITS> S;
    const Task task = desk().task;
    const int first = first_column(task.phase, member(task.phase));
    const int end = first_column(task.phase, member(task.phase) + 1);
    if (first == end) return;
    int left = ceil_div(end - first, S::COLS);  // stages
    const bool ahead = left >= S::AHEAD;
    // A short pass cannot have been asked for in advance.
    if (first_row == 0 ? !streams_next : !ahead) {
      copies_wait<0>();
      __syncwarp();
      aim<BITS>(task, row, first_row, first, end);
      from = free = region + lane * 4;
#pragma unroll 1
      for (int i = 0; i < S::AHEAD; ++i) {
        if (i < left)
          ask<BITS>();
        else
          copies_commit();
        free = after<BITS>(free);
      }
    }
    streams_next = false;
    u64 tile[S::ROWS];
#pragma unroll
    for (int r = 0; r < S::ROWS; ++r)
      tile[r] = centroids_of(phase(task.phase), task.phase, task.unit, row, first_row + r, BITS);
    Tables<BITS, S::ROWS> tables;
    const auto raw = tables.load(tile, lane);
    find_inputs(in, first);
    in.load(0);
    tables.fill(raw, tile, region + S::TABLE_AT, lane, two_to_16);
    // First all stages but the last few, then, with what follows under way, those.
    int tiles = end - first;
#pragma unroll 1
    for (int part = 0; part < 3; ++part) {
      // A group's warps learn from its first what is next: some tiles before they need it.
      const int keep = part == 2 ? 0 : part == 1 ? S::AHEAD : S::AHEAD + 2;
#pragma unroll 1
      for (; left > keep; --left) {
        const u32 at = next_stage<BITS>();
        multiply_tile<BITS>(tables, in, at, total);
        in.load(--tiles > 0 ? 128 : 0);  // at the end the last ones again, unused
        if (S::COLS == 2 && tiles > 0) {
          multiply_tile<BITS>(tables, in, at + 128, total);
          in.load(--tiles > 0 ? 128 : 0);
        }
      }
      if (part == 0 && desk().next.phase < 0) next_row = meet_next(p, claimed, warp, lane);
      if (part == 1) turn_over<BITS>(passes_left, ahead, claimed);
    }
  }

  template <int BITS>
  PW_INLINE void multiply_unit(u32 claimed) {
    Inputs in;
    if constexpr (Stage<BITS>::ROWS == 2) {
      pass<BITS>(0, 0, in, claimed, sum);
    } else {
#pragma unroll 1
      for (int r = 0; r < 2; ++r) {
        float total[1][GROUPS][4] = {};
        pass<BITS>(r, 1 - r, in, claimed, total);
#pragma unroll
        for (int n = 0; n < GROUPS; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[0][n][i] = r ? sum[0][n][i] : total[0][n][i];
            sum[1][n][i] = total[0][n][i];
          }
      }
    }
  }

  PW_INLINE void multiply_any(int bits, u32 claimed) {
    switch (bits) {
      case 2: return multiply_unit<2>(claimed);
      case 3: return multiply_unit<3>(claimed);
      case 4: return multiply_unit<4>(claimed);
      case 5: return multiply_unit<5>(claimed);
      case 6: return multiply_unit<6>(claimed);
      case 7: return multiply_unit<7>(claimed);
      default: return multiply_unit<8>(claimed);
    }
  }

  // Sums over the group's warps, in their order, in its first warp; passed through the ends of
  // their regions, where tables were.
  PW_INLINE float* exchange(int warp) const {
    return (float*)(memory + REGIONS_AT + (warp + 1) * REGION - GROUPS * 1024) + lane;
  }
  PW_INLINE void add_up_group(int phase, u32 claimed) {
    if (member(phase) > 0) {
      float* own = exchange(warp);
#pragma unroll
      for (int i = 0; i < 8 * GROUPS; ++i)
        own[i * 32] = sum[i / (4 * GROUPS)][i / 4 % GROUPS][i % 4];
    }
    sync_group(phase);
    if (member(phase) > 0) {
      // The first warp has told what is next, and tells no more until all have heard.
      if (desk().next.phase < 0) next_row = meet_next(p, claimed, warp, lane);
    } else {
#pragma unroll 1
      for (int w = 1; w < group_size(phase); ++w) {
        const float* other = exchange(warp + w);
#pragma unroll
        for (int i = 0; i < 8 * GROUPS; ++i)
          sum[i / (4 * GROUPS)][i / 4 % GROUPS][i % 4] += other[i * 32];
      }
    }
    sync_group(phase);
  }

  // Write the unit's rows g, g + 8 for tokens 2t, 2t + 1 of every group, and tell who waits.
  PW_INLINE void write(const Task& task) const {
    const Plan plan = plan_of(p);
    const Block block = plan.blocks[task.block];
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + (i & 2) * 4, token = n * 8 + (lane & 3) * 2 + (i & 1);
        if (token >= block.count()) continue;
        const u64 pair = plan.pairs[block.first() + token];
        if (task.phase == 0) {
          const int col = task.unit * 16 + row;
          const float v = activate(sum[0][n][i], p.activation) * sum[1][n][i];
          u16* to = p.middle + pair * p.middle_stride;
          to[col] = col < p.intermediate ? to_act(v) : 0;
          // The last unit also clears what is left of the last column tile.
          if (task.unit + 1 == phase(0).units)
            for (int rest = col + 16; rest < p.middle_stride; rest += 16) to[rest] = 0;
        } else {
          const int col = task.unit * 32 + row;
          float* to = p.parts + pair * p.hidden;
          if (col < p.hidden) to[col] = sum[0][n][i];
          if (col + 16 < p.hidden) to[col + 16] = sum[1][n][i];
        }
      }
    }
    __syncwarp();
    if (lane == 0 && task.phase == 0) signal_release(((Counters*)p.counters)->ready + task.block);
  }

  PW_INLINE void run() {
    next_row = meet(p, 0, group(0) * gridDim.x + blockIdx.x, 0, warp, lane);
    if (lane == 0) desk().down_units = 0;
    streams_next = false;
    while (desk().next.phase < 2) {
      row = next_row;
      const Task task = desk().next;
      __syncwarp();
      if (lane == 0) {
        desk().task = task;
        desk().next.phase = -1;
      }
      __syncwarp();
      // The claim of the unit after this one comes second: all warps start at once, and the answers
      // to as many claims of one counter take a while.
      const int bits = bits_of(row);
      u32 claimed = 0;
      if (member(task.phase) == 0 && lane == 0)
        claimed = atomicAdd(&((Counters*)p.counters)->claimed[task.phase], 1u);
#pragma unroll
      for (int n = 0; n < GROUPS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[0][n][i] = sum[1][n][i] = 0;
      multiply_any(bits, claimed);
      finish(claimed);
    }
    copies_wait<0>();
    if (lane == 0 && desk().down_units)
      signal_release(&((Counters*)p.counters)->finished, desk().down_units);
  }
  PW_INLINE void finish(u32 claimed) {
    const Task task = desk().task;
    const bool leads = member(task.phase) == 0;
    if (leads && desk().next.phase < 0) next_row = meet_next(p, claimed, warp, lane);
    if (group_size(task.phase) > 1) add_up_group(task.phase, claimed);
    if (leads) write(task);
    if (leads && task.phase == 1 && lane == 0) ++desk().down_units;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode(const __grid_constant__ Params p, const u32 two_to_16) {
  const Plan plan = plan_of(p);
  const int mixed = make_plan(p, plan, memory + REGIONS_AT, THREADS);
  if (threadIdx.x < 2)
    head().phase[threadIdx.x] =
        phase_of(p, threadIdx.x, *plan.block_count, mixed >> threadIdx.x & 1);
  if (threadIdx.x < WARPS) head().board[0][threadIdx.x] = head().board[1][threadIdx.x] = 1;
  __syncthreads();
  const int warp = threadIdx.x / 32;
  Worker worker = {p, (int)threadIdx.x % 32, warp, two_to_16,
                   shared_address(memory) + REGIONS_AT + warp * REGION};
  worker.run();
  __syncthreads();
  combine_after(p, head().phase[1].all_units);
  if (p.mass) count_all(p, plan, memory + REGIONS_AT);
  leave(p, *plan.block_count);
}
