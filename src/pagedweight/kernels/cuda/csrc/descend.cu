// The descent over codes of compensated quantizing (quantize/torch_descent.py), for one block of
// columns: a warp has a row and takes its columns one after the other. Each lane holds leaves (codes
// of the highest level) with the centroids above them, and columns of the row's gradient.
//
// PW_SEED_BITS, PW_LEVELS: levels of PW_SEED_BITS bits and up. PW_COLUMNS: most columns of a block, a
// multiple of 32. PW_WARPS: rows of a thread block.

#define PW_TOP_BITS (PW_SEED_BITS + PW_LEVELS - 1)
constexpr int LEAVES = 1 << PW_TOP_BITS;
constexpr int OWN = (LEAVES + 31) / 32;
constexpr int PARTS = PW_COLUMNS / 32;
constexpr int TABLE = (1 << (PW_TOP_BITS + 1)) - (1 << PW_SEED_BITS);
constexpr unsigned ALL = 0xffffffffu;

struct Descent {
    unsigned char* codes;   // [rows, cols], in and out
    float* apart;           // [rows, levels, cols], W_b - W, in and out
    const float* pulled;    // [rows, levels, width], (W_b - W) H of the block's columns
    const float* product;   // [experts, cols, cols], H
    const float* weights;   // [rows, cols]
    const float* tables;    // [rows, TABLE], a level after the other
    const float* pull;      // [experts, levels]
    const float* trust;     // [levels]
    int rows, rows_of_expert, cols, start, width;
};

__device__ inline int place(int level, int leaf) {
    return (1 << (PW_SEED_BITS + level)) - (1 << PW_SEED_BITS) + (leaf >> (PW_LEVELS - 1 - level));
}

// The code with the least sum over levels of pull (centroid - target)^2, the lowest on a tie; the
// same in all lanes.
__device__ inline int choose(
    const float (&value)[PW_LEVELS][OWN], const float (&target)[PW_LEVELS],
    const float (&pull)[PW_LEVELS], int lane) {
    float least = __int_as_float(0x7f800000);
    int own = 0;
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        float cost = 0.f;
#pragma unroll
        for (int level = 0; level < PW_LEVELS; ++level) {
            const float away = value[level][j] - target[level];
            cost += pull[level] * away * away;
        }
        if (lane * OWN + j < LEAVES && cost < least) {
            least = cost;
            own = j;
        }
    }
    const unsigned bits = __float_as_uint(least);  // costs are not negative: ordered as integers
    const unsigned best = __reduce_min_sync(ALL, bits);
    const int winner = __ffs(__ballot_sync(ALL, bits == best)) - 1;
    return __shfl_sync(ALL, lane * OWN + own, winner);
}

extern "C" __global__ void __launch_bounds__(32 * PW_WARPS) descend(const Descent p) {
    const int lane = threadIdx.x & 31;
    const long long row = (long long)blockIdx.x * PW_WARPS + (threadIdx.x >> 5);
    if (row >= p.rows) return;
    const long long expert = row / p.rows_of_expert;
    const float* table = p.tables + row * TABLE;
    const float* product = p.product + (expert * p.cols + p.start) * p.cols + p.start;
    const float* weights = p.weights + row * p.cols + p.start;
    unsigned char* codes = p.codes + row * p.cols + p.start;
    float* apart = p.apart + row * PW_LEVELS * p.cols + p.start;

    float value[PW_LEVELS][OWN], pull[PW_LEVELS], trust[PW_LEVELS];
#pragma unroll
    for (int level = 0; level < PW_LEVELS; ++level) {
        pull[level] = p.pull[expert * PW_LEVELS + level];
        trust[level] = p.trust[level];
#pragma unroll
        for (int j = 0; j < OWN; ++j)
            value[level][j] = lane * OWN + j < LEAVES ? table[place(level, lane * OWN + j)] : 0.f;
    }
    float gradient[PW_LEVELS][PARTS];
    int code[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int column = part * 32 + lane;
        const bool there = column < p.width;
        code[part] = there ? codes[column] : 0;
        const float curve = there ? product[(long long)column * p.cols + column] : 1.f;
#pragma unroll
        for (int level = 0; level < PW_LEVELS; ++level) {
            const float alone = there ? apart[(long long)level * p.cols + column] * curve : 0.f;
            const float full =
                there ? p.pulled[(row * PW_LEVELS + level) * p.width + column] : 0.f;
            gradient[level][part] = alone + trust[level] * (full - alone);
        }
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int stop = min(32, p.width - part * 32);
        for (int owner = 0; owner < stop; ++owner) {
            const float* column = product + (long long)(part * 32 + owner) * p.cols;
            const float curve = column[part * 32 + owner];
            const int old = __shfl_sync(ALL, code[part], owner);
            float here[PW_LEVELS], target[PW_LEVELS];
#pragma unroll
            for (int level = 0; level < PW_LEVELS; ++level) {
                here[level] = table[place(level, old)];
                target[level] = here[level] - __shfl_sync(ALL, gradient[level][part], owner) / curve;
            }
            const int chosen = choose(value, target, pull, lane);
            if (chosen == old) continue;  // in all lanes
            if (lane == owner) code[part] = chosen;
            float believed[PW_LEVELS];
#pragma unroll
            for (int level = 0; level < PW_LEVELS; ++level)
                believed[level] = trust[level] * (table[place(level, chosen)] - here[level]);
            // Columns before this one are not asked for again in this pass.
#pragma unroll
            for (int later = part; later < PARTS; ++later) {
                if (later * 32 + lane < p.width) {
                    const float h = column[later * 32 + lane];
#pragma unroll
                    for (int level = 0; level < PW_LEVELS; ++level)
                        gradient[level][later] += believed[level] * h;
                }
            }
        }
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int column = part * 32 + lane;
        if (column >= p.width) continue;
        codes[column] = (unsigned char)code[part];
        const float weight = weights[column];
#pragma unroll
        for (int level = 0; level < PW_LEVELS; ++level)
            apart[(long long)level * p.cols + column] = table[place(level, code[part])] - weight;
    }
}
