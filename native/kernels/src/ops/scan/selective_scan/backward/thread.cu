// The common part of both passes of the gradient: a thread's position, its loads, and sums over threads.

constexpr int THREADS = 32 * WARPS;
constexpr int GROUPS = 32 / P;
// Channels of a warp, and states including padding.
constexpr int WIDTH = M * GROUPS, PADDED = K * P;
// Elements that a thread prepares and finishes, of STEPS steps of all channels of a warp.
template <int STEPS> constexpr int SHARE = (STEPS * WIDTH + 31) / 32;
// The number of channels of these elements.
constexpr int OWN = WIDTH > 32 ? WIDTH / 32 : 1;
constexpr int SLOT = SUB * 2 > WIDTH ? SUB * 2 * PADDED : PADDED * WIDTH;

template <int C> struct __align__(C * sizeof(REAL)) Pack { REAL v[C]; };

template <int C>
__device__ __forceinline__ void load(REAL (&to)[C], const REAL* from) {
    Pack<C> pack = *(const Pack<C>*)from;
#pragma unroll
    for (int i = 0; i < C; i++) to[i] = pack.v[i];
}

template <int C>
__device__ __forceinline__ void store(REAL* to, const REAL (&from)[C]) {
    Pack<C> pack;
#pragma unroll
    for (int i = 0; i < C; i++) pack.v[i] = from[i];
    *(Pack<C>*)to = pack;
}

// Sums each of V values of each set over LANES lanes that are STRIDE apart. This lane is number `rank` of these, and
// ends with the sums from value `rank * V / LANES` on. All sets are shuffled together, to hide the shuffles' latency.
template <int LANES, int STRIDE, int SETS, int V, int LEFT = V>
__device__ __forceinline__ void sum_over(REAL (&v)[SETS][V], int rank) {
    if constexpr (LANES > 1) {
        constexpr int HALF = LANES / 2, MOVED = LEFT > 1 ? LEFT / 2 : 1;
        bool upper = rank & HALF;
        REAL got[SETS][MOVED];
#pragma unroll
        for (int set = 0; set < SETS; set++) {
#pragma unroll
            for (int i = 0; i < MOVED; i++) {
                REAL send = LEFT == 1 || upper ? v[set][i] : v[set][i + MOVED];
                got[set][i] = __shfl_xor_sync(0xffffffff, send, HALF * STRIDE);
            }
        }
#pragma unroll
        for (int set = 0; set < SETS; set++) {
#pragma unroll
            for (int i = 0; i < MOVED; i++) v[set][i] = (LEFT > 1 && upper ? v[set][i + MOVED] : v[set][i]) + got[set][i];
        }
        sum_over<HALF, STRIDE, SETS, V, MOVED>(v, rank);
    }
}

// a b + sum, or a b for the first term of a sum.
__device__ __forceinline__ REAL plus(bool first, REAL a, REAL b, REAL sum) { return first ? a * b : fma(a, b, sum); }

// Adds a b where `on`, by a predicate: a branch would divide the code, and a selection take an instruction.
__device__ __forceinline__ void add_if(bool on, float a, float b, float& sum) {
    asm("{ .reg .pred q; setp.ne.s32 q, %3, 0; @q fma.rn.f32 %0, %1, %2, %0; }" : "+f"(sum) : "f"(a), "f"(b), "r"((int)on));
}
__device__ __forceinline__ void add_if(bool on, double a, double b, double& sum) {
    if (on) sum = fma(a, b, sum);
}

// The lesser of v and the largest finite number, or NaN: an infinite product times zero would be NaN.
__device__ __forceinline__ float finite(float v) {
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(3.402823466e38f));
    return v;
#else
    return v > 3.402823466e38f ? 3.402823466e38f : v;
#endif
}
__device__ __forceinline__ double finite(double v) {
    return v > 1.7976931348623157e308 ? 1.7976931348623157e308 : v;
}

// The shared memory of a warp.
struct Warp {
    REAL delta[TILE][WIDTH], x[TILE][WIDTH];
    REAL dy[ENDS ? STAGE : SUB][WIDTH];
    REAL sums[ENDS ? 1 : 2 + HAS_Z][SUB][WIDTH];
    // The states before every SUB steps; then the sums of these steps for dB and dC.
    REAL slots[ENDS ? 1 : TILE / SUB][ENDS ? 4 : SLOT];
};

struct Shared {
    REAL b[ENDS ? 2 * STAGE : TILE][PADDED], c[ENDS ? 2 * STAGE : TILE][PADDED];
    Warp warps[WARPS];
};

// The position of a thread. It has as few members as possible, since they stay in registers.
struct Place {
    // The warp's first channel, and the number of its channels that exist.
    i64 channel;
    int left;
    int lane;
    // The thread's group of P lanes in the warp, and its rank in the group.
    int group, rank;

    // The index of the block among those that cover all channels.
    static __device__ __forceinline__ unsigned block(const Params& p) {
        return blockIdx.x % (p.sections * p.section_blocks);
    }

    __device__ __forceinline__ Place(const Params& p) {
        unsigned block = Place::block(p), section = 0;
        if (p.sections > 1) section = block / p.section_blocks, block -= section * p.section_blocks;
        i64 within = (i64)block * (WARPS * WIDTH) + threadIdx.x / 32 * WIDTH, rest = p.section - within;
        channel = section * p.section + within;
        left = rest < WIDTH ? (int)rest : WIDTH;
        lane = threadIdx.x % 32, group = lane / P, rank = lane % P;
    }

    // The block's first channel.
    __device__ __forceinline__ i64 corner() const { return channel - threadIdx.x / 32 * WIDTH; }

    // Channel m of this thread within the warp; whether it exists.
    __device__ __forceinline__ int local(int m) const { return group * M + m; }
    __device__ __forceinline__ bool alive(int m) const { return local(m) < left; }
    // Of the elements of some steps and all channels of the warp, each thread owns every 32nd: the step and the channel
    // of its element i, the offset of its first element from the row of the first step, and the offset of element i
    // from the first.
    __device__ __forceinline__ int step(int i) const { return WIDTH > 32 ? i / OWN : i * (32 / WIDTH) + lane / WIDTH; }
    __device__ __forceinline__ int owned(int i) const { return WIDTH > 32 ? i % OWN * 32 + lane : lane % WIDTH; }
    __device__ __forceinline__ i64 first(const Params& p) const { return step(0) * p.channels + channel + owned(0); }
    __device__ __forceinline__ i64 behind(const Params& p, int i) const {
        return WIDTH > 32 ? i / OWN * p.channels + i % OWN * 32 : i * (32 / WIDTH) * p.channels;
    }
    __device__ __forceinline__ bool mine(int i) const { return owned(i) < left; }
    // Whether element i is within STEPS steps, and whether it is within the first `left` of them.
    template <int STEPS>
    __device__ __forceinline__ bool among(int i) const { return STEPS * WIDTH % 32 == 0 || step(i) < STEPS; }
    template <int STEPS, bool WHOLE>
    __device__ __forceinline__ bool has(int i, int left) const {
        return among<STEPS>(i) && (!RAGGED || mine(i)) && (WHOLE || step(i) < left);
    }
};

// STEPS steps of B or C, loaded by all threads of the block, on the way to shared memory.
template <int STEPS>
struct Rows {
    static constexpr int COUNT = (STEPS * PADDED + THREADS - 1) / THREADS;
    STORAGE v[COUNT];

    // `left` is the number of steps that exist.
    __device__ __forceinline__ void fetch(const STORAGE* from, i64 stride, int left) {
        int step = threadIdx.x / PADDED, n = threadIdx.x % PADDED;
        const STORAGE* row = from + step * stride + n;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (THREADS % PADDED != 0) {
                step = (threadIdx.x + i * THREADS) / PADDED, n = (threadIdx.x + i * THREADS) % PADDED;
                row = from + step * stride + n;
            }
            v[i] = {};
            if (step < left && (PADDED == N || n < N)) v[i] = *row;
            step += THREADS / PADDED, row += THREADS / PADDED * stride;
        }
    }

    __device__ __forceinline__ void spread(REAL (*to)[PADDED]) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int element = threadIdx.x + i * THREADS;
            if (STEPS * PADDED % THREADS == 0 || element < STEPS * PADDED) to[0][element] = widen(v[i]);
        }
    }
};

// The elements of STEPS steps of x, dt, dy or z that this thread prepares.
template <int STEPS>
struct Column {
    static constexpr int COUNT = SHARE<STEPS>;
    STORAGE v[COUNT] = {};

    // `from` is the address of the thread's first element; `left` is the number of steps that exist.
    template <bool WHOLE>
    __device__ __forceinline__ void fetch(const STORAGE* from, const Params& p, const Place& at, int left) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            v[i] = {};
            if (at.template has<STEPS, WHOLE>(i, left)) v[i] = from[at.behind(p, i)];
        }
    }
};

__device__ __forceinline__ int at_most(int most, i64 left) { return left < 0 ? 0 : left < most ? (int)left : most; }

// A thread's state in both passes.
struct Thread {
    const Params& p;
    Shared& shared;
    Warp& warp;
    Place at;
    // The place of the sequence among states; its first step and its length, if it is packed.
    i64 batch, packed_start, packed_length;
    bool wide;
    REAL a[M][K], bias[OWN];
    REAL b_row[CONSTANT_B ? M : 1][K], c_row[CONSTANT_C ? M : 1][K];
    REAL lo, hi;

    __device__ __forceinline__ Thread(const Params& p, Shared& shared)
        : p(p), shared(shared), warp(shared.warps[threadIdx.x / 32]), at(p) {
        wide = p.state % UNIT == 0;
        lo = p.lo, hi = p.hi;
#pragma unroll
        for (int m = 0; m < M; m++) {
            i64 row = (at.channel + at.local(m)) * p.state + p.first_state + at.rank * K;
            read(a[m], p.a + row, m, wide);
            if constexpr (CONSTANT_B) read_narrow(b_row[m], p.b + row, m);
            if constexpr (CONSTANT_C) read_narrow(c_row[m], p.c + row, m);
#pragma unroll
            for (int k = 0; k < K; k++) a[m][k] *= REAL(LOG2_E);
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) bias[i] = HAS_BIAS && at.mine(i) ? p.dt_bias[at.channel + at.owned(i)] : REAL(0);
    }

    // Begins sequence `which`.
    __device__ __forceinline__ void take(i64 which) {
        batch = which;
        if (PACKED) {
            Sequence of = packed_sequence(p.sequences, which);
            batch = of.place, packed_start = of.first, packed_length = of.length;
        }
    }

    __device__ __forceinline__ i64 length() const { return PACKED ? packed_length : p.length; }
    // Step t of the sequence among those of all.
    __device__ __forceinline__ i64 time(i64 t) const { return (PACKED ? packed_start : batch * p.length) + t; }
    // The row of a tile among those of all sequences: see `bounds`.
    __device__ __forceinline__ i64 row_of(i64 tile) const {
        return PACKED ? packed_row(packed_start, batch) + tile : tile * p.batch + batch;
    }

    __device__ __forceinline__ void read(REAL (&to)[K], const REAL* row, int m, bool wide) {
#pragma unroll
        for (int k = 0; k < K; k++) to[k] = 0;
        if (at.alive(m)) load_row(to, row, at.rank, wide);
    }

    __device__ __forceinline__ void read_narrow(REAL (&to)[K], const STORAGE* row, int m) {
#pragma unroll
        for (int k = 0; k < K; k++) to[k] = at.alive(m) && exists(at.rank, k) ? widen(row[k]) : REAL(0);
    }

    // Offsets of channel m in an array of (rows, D), of its states in one of (rows, D, N), and in one of all states.
    __device__ __forceinline__ i64 flat(i64 row, int m) { return row * p.channels + at.channel + at.local(m); }
    __device__ __forceinline__ i64 states(i64 row, int m) { return flat(row, m) * N + at.rank * K; }
    __device__ __forceinline__ i64 all_states(i64 row, int m) {
        return flat(row, m) * p.state + p.first_state + at.rank * K;
    }

    __device__ __forceinline__ const STORAGE* rows(const STORAGE* from, i64 groups, i64 share, i64 time) {
        i64 group = groups > 1 ? at.corner() / share : 0;
        return from + (time * groups + group) * p.state + p.first_state;
    }

    // Writes delta and x of STEPS steps to shared memory, from `step` of the tile on.
    template <int STEPS>
    __device__ __forceinline__ void prepare(const Column<STEPS>& dt, const Column<STEPS>& x, int step, int left) {
#pragma unroll
        for (int i = 0; i < Column<STEPS>::COUNT; i++) {
            if (!at.template among<STEPS>(i)) continue;
            REAL delta = step_size(widen(dt.v[i]), bias[i % OWN], lo, hi);
            // Padding steps and channels have no effect.
            warp.delta[step + at.step(i)][at.owned(i)] = at.template has<STEPS, false>(i, left) ? delta : REAL(0);
            warp.x[step + at.step(i)][at.owned(i)] = widen(x.v[i]);
        }
    }

    template <int STEPS>
    __device__ __forceinline__ void prepare_dy(const Column<STEPS>& dy, const Column<STEPS>& z) {
#pragma unroll
        for (int i = 0; i < Column<STEPS>::COUNT; i++) {
            if (!at.template among<STEPS>(i)) continue;
            REAL v = widen(dy.v[i]);
            warp.dy[at.step(i)][at.owned(i)] = HAS_Z ? v * silu(widen(z.v[i])) : v;
        }
    }

    // The decay of state k of channel m over delta.
    __device__ __forceinline__ REAL decay(REAL delta, int m, int k) { return exp2_fast(delta * a[m][k]); }
    // Whether state k of channel m exists: padding must not change sums, for any B and C.
    __device__ __forceinline__ bool there(int m, int k) { return (!RAGGED || at.alive(m)) && exists(at.rank, k); }

    __device__ __forceinline__ void load_b(REAL (&b)[K], int row) {
        if constexpr (!CONSTANT_B) load(b, &shared.b[row][at.rank * K]);
    }
    __device__ __forceinline__ void load_c(REAL (&c)[K], int row) {
        if constexpr (!CONSTANT_C) load(c, &shared.c[row][at.rank * K]);
    }
    __device__ __forceinline__ REAL b_of(const REAL (&b)[K], int m, int k) {
        if constexpr (CONSTANT_B) return b_row[m][k];
        else return b[k];
    }
    __device__ __forceinline__ REAL c_of(const REAL (&c)[K], int m, int k) {
        if constexpr (CONSTANT_C) return c_row[m][k];
        else return c[k];
    }
};
