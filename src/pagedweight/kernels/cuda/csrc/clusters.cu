// Seed clusters and splits of a row's sorted values (quantize/torch_rows.py): a thread block has a
// row. The dynamic program goes level by level of its divide and conquer; a warp takes one prefix
// (or one cluster to split) at a time and its lanes the candidates.
//
// PW_SEED_BITS, PW_TOP_BITS: clusters at the start and at the end, as powers of two. PW_WARPS.

constexpr int CLUSTERS = 1 << PW_SEED_BITS;
constexpr int LEAVES = 1 << PW_TOP_BITS;
constexpr unsigned ALL = 0xffffffffu;

struct Clusters {
    const double* s0;       // [rows, width], prefix sums of importance before each distinct value
    const double* s1;       // [rows, width], of importance times value less the row's mean
    const long long* m;     // [rows], distinct values; width is larger than any
    double* before;         // [rows, width], scratch
    double* after;          // [rows, width], scratch
    int* cuts;              // [rows, CLUSTERS, width], scratch
    long long* bounds;      // [rows, LEAVES + 1], out: where each cluster begins
    int rows, width;
};

struct Best {
    double value;
    int at;
};

// The larger value; of equal ones the one further left.
__device__ inline Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.at < a.at) ? b : a;
}

__device__ inline Best of_warp(Best own) {
#pragma unroll
    for (int away = 16; away; away >>= 1) {
        Best other;
        other.value = __shfl_xor_sync(ALL, own.value, away);
        other.at = __shfl_xor_sync(ALL, own.at, away);
        own = better(own, other);
    }
    return own;
}

__device__ inline double gain(const double* s0, const double* s1, int i, int j) {
    const double weight = s0[j] - s0[i], moment = s1[j] - s1[i];
    return weight > 0 ? moment * moment / weight : 0.0;
}

// Best last cut in [lo, hi] of the prefix [0, j), by one warp; the same in all lanes.
__device__ inline Best best_cut(
    const double* before, const double* s0, const double* s1, int lo, int hi, int j, int lane) {
    Best own = {-1.0, lo};
    for (int i = lo + lane; i <= hi; i += 32) own = better(own, {before[i] + gain(s0, s1, i, j), i});
    return of_warp(own);
}

// Best cut of the values [start, stop) in two, by one warp; `stop` when there is nothing to cut.
__device__ inline int best_split(
    const double* s0, const double* s1, int start, int stop, int lane) {
    if (stop - start < 2) return stop;
    const double weight = s0[stop] - s0[start], mean = (s1[stop] - s1[start]) / weight;
    Best own = {-1.0, start + 1};
    for (int p = start + 1 + lane; p < stop; p += 32) {
        const double left = s0[p] - s0[start], apart = s1[p] - s1[start] - mean * left;
        own = better(own, {apart * apart / (left * (weight - left)), p});
    }
    return of_warp(own).at;
}

extern "C" __global__ void __launch_bounds__(32 * PW_WARPS) clusters(const Clusters p) {
    __shared__ int bounds[LEAVES + 1];
    const long long row = blockIdx.x;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const double *s0 = p.s0 + row * p.width, *s1 = p.s1 + row * p.width;
    double *before = p.before + row * p.width, *after = p.after + row * p.width;
    int* cuts = p.cuts + row * CLUSTERS * p.width;
    const int m = (int)p.m[row];
    constexpr int STRIDE = LEAVES / CLUSTERS;

    if (m <= CLUSTERS) {  // each value is its own cluster, the rest are empty
        for (int t = threadIdx.x; t <= CLUSTERS; t += 32 * PW_WARPS) bounds[t * STRIDE] = min(t, m);
    } else {
        for (int j = threadIdx.x; j <= m; j += 32 * PW_WARPS) before[j] = gain(s0, s1, 0, j);
        __syncthreads();
        for (int layer = 2; layer < CLUSTERS; ++layer) {
            int* cut = cuts + (long long)layer * p.width;
            int step = 1;
            while (step <= m) step <<= 1;
            for (step >>= 1; step; step >>= 1) {
                // Odd multiples: their neighbours at twice the step are known and bound the cut.
                for (int j = step * (2 * warp + 1); j <= m; j += 2 * step * PW_WARPS) {
                    if (j < layer) continue;
                    const int lo = j - step < layer ? layer - 1 : cut[j - step];
                    const int hi = j + step <= m ? min(cut[j + step], j - 1) : j - 1;
                    const Best found = best_cut(before, s0, s1, lo, hi, j, lane);
                    if (lane == 0) {
                        after[j] = found.value;
                        cut[j] = found.at;
                    }
                }
                __syncthreads();
            }
            double* last = before;
            before = after;
            after = last;
        }
        if (warp == 0) {
            int at = best_cut(before, s0, s1, CLUSTERS - 1, m - 1, m, lane).at;
            if (lane == 0) {
                bounds[LEAVES] = m;
                for (int layer = CLUSTERS - 1; layer >= 1; --layer) {
                    bounds[layer * STRIDE] = at;
                    at = layer > 1 ? cuts[(long long)layer * p.width + at] : 0;
                }
                bounds[0] = 0;
            }
        }
    }
    __syncthreads();
    for (int stride = STRIDE; stride > 1; stride >>= 1) {
        for (int t = warp * stride; t < LEAVES; t += PW_WARPS * stride) {
            const int cut = best_split(s0, s1, bounds[t], bounds[t + stride], lane);
            if (lane == 0) bounds[t + stride / 2] = cut;
        }
        __syncthreads();
    }
    for (int t = threadIdx.x; t <= LEAVES; t += 32 * PW_WARPS)
        p.bounds[row * (LEAVES + 1) + t] = bounds[t];
}
