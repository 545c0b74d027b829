// The selective scan, forward, after common.cu. The formula is in mod.rs; cuda.rs chooses the macros:
//   N       states of this launch           K, P   states per thread, threads per channel (K P >= N)
//   S       steps a thread owns per tile    Q      steps that P lanes share among them: P, or 1 where L = 1
//   WARPS   warps per block                 MIN    resident blocks of a multiprocessor, at least
//   NEAR    whether offsets within a tile fit 32 bits
//   FORM_B, FORM_C   the forms of B and C: TILE (shared by all channels of the block), DIRECT (a group
//                    per few channels), CONSTANT (D, N)
//   HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS, CLAMP, STATES, SLABS   the call's inputs and options
//   ENDS    whether this is the first of two passes over chunks: the last state of each chunk
//   PACKED  whether sequences are those of p.sequences, else of a batch, each of p.length steps
//
// Time is the loop, and states are in registers. P neighbouring lanes share a channel; of P steps each lane loads,
// prepares and finishes one, so nothing is computed twice, and P - 1 shuffles sum y for P steps at once. Loads run one
// tile of Q S steps ahead, in registers.
//
// History, f32 on an H200 (132 multiprocessors at 1.98 GHz), ms for B x L x D x N of
//                       32x60x512x16  8x2048x2048x16  8x2048x5120x16  1x2048x1536x16
//   16 exp a clock/SM   0.0038        0.128           0.321           0.0120 (twice that in chunks)
//   bytes at 4.2 TB/s   0.0029        0.096           0.240           0.0091
//   version 1           0.0133        0.269           0.553           0.052
//     as above; every load and step masked, bounds of the clamp read from constant memory
//   version 2           0.0114        0.205           0.466           0.048
//     whole tiles without masks, running pointers: 8 instructions a state and step, 5 of them needed
//   version 3           0.0104        0.197           0.472           0.045
//     no divisions before the first load; registers for 12 to 16 warps a multiprocessor, no more
// Tried without gain: two sums for y; fetching after the tile rather than before it; 16-bit values held
// in whole registers; tiles of more than 128 states and steps a thread, whose code outgrows the
// instruction cache.

#define TILE 0
#define DIRECT 1
#define CONSTANT 2

constexpr int CHANNELS = 32 / P;
constexpr int STEPS = Q * S;
constexpr int THREADS = 32 * WARPS;
constexpr bool TILE_B = FORM_B == TILE, TILE_C = FORM_C == TILE && !ENDS;
// B and C of one lane and step are adjacent, padded to an odd number of 16-byte units to avoid
// bank conflicts.
constexpr int UNITS = (2 * K + UNIT - 1) / UNIT | (P > 1);
// One tile of B and C, and the number of its elements that each thread loads.
constexpr int TILE_ELEMENTS = STEPS * N;
constexpr int FETCHES = (TILE_ELEMENTS + THREADS - 1) / THREADS;
constexpr int FETCHED = FETCHES > 0 ? FETCHES : 1;

struct Step { REAL delta, input; };

#if NEAR
typedef unsigned Offset;
#else
typedef i64 Offset;
#endif

// The element at `offset` bytes from `base`.
template <typename T>
__device__ __forceinline__ T& behind(T* base, Offset offset) { return *(T*)((char*)base + offset); }

// The current row of B or C, and the stride from step to step.
struct Rows {
    const STORAGE* row;
    i64 stride;
};

// A thread's values for its steps of one tile.
struct Owned { STORAGE x[S], dt[S], z[S]; };

struct Shared {
    Unit tiles[TILE_B || TILE_C ? 2 : 1][TILE_B || TILE_C ? STEPS : 1][P][UNITS];
    Step steps[P > 1 ? WARPS : 1][P > 1 ? STEPS : 1][CHANNELS];
};

// One thread's part of the scan.
struct Scan {
    const Params& p;
    Shared& shared;
    // The place of the thread's sequence among states; its first step and its length, if it is packed.
    i64 batch, packed_start, packed_length;
    // The thread's chunk, channel, lane within the channel and first state.
    i64 j, channel, first;
    int lane;
    bool alive;
    // Whether rows of A and of states start at multiples of 16 bytes.
    bool wide;
    REAL a[K], h[K], b_row[K], c_row[K], bias, skip, lo, hi, sum = 0;
    Rows from_b, from_c;
    // The next tile, whose loads are in flight.
    Owned next;
    STORAGE next_b[FETCHED], next_c[FETCHED];
    // Addresses of this thread's first step in the tile fetched next (x, dt, z) and in the current one (y, `tile`), and
    // the stride in bytes from one of its steps to the next.
    const STORAGE *x, *dt, *z;
    STORAGE* y;
    i64 tile;
    Offset apart;

    __device__ __forceinline__ Scan(const Params& p, Shared& shared) : p(p), shared(shared) {
        unsigned block = blockIdx.x, section = 0;
        unsigned runs = ENDS ? p.end_chunks : p.chunks;
        batch = blockIdx.z * (i64)gridDim.y + blockIdx.y;
        if (PACKED) {
            // Blocks past the last sequence return once this is done.
            Sequence of = packed_sequence(p.sequences, batch < p.batch ? batch : p.batch - 1);
            if (batch < p.batch) batch = of.place;
            packed_start = of.first, packed_length = of.length;
        }
        j = 0;
        if (runs > 1) j = block % runs, block /= runs;
        if (p.sections > 1) section = block / p.section_blocks, block -= section * p.section_blocks;
        i64 corner = (i64)block * (WARPS * CHANNELS);
        i64 last = p.section - 1 - corner;
        alive = threadIdx.x / P <= last;
        // Threads past the last channel compute it too, for shuffles and barriers, but write nothing.
        int local = alive ? threadIdx.x / P : last;
        corner += section * p.section;
        lane = threadIdx.x % P;
        channel = corner + local;
        first = p.first_state + lane * K;
        wide = p.state % UNIT == 0;
        tile = (start_of(j) + lane) * p.channels + channel;
        x = p.x + tile, dt = p.dt + tile, z = p.z + tile, y = p.y + tile;
        lo = p.lo, hi = p.hi;
        apart = Offset(Q * p.channels) * sizeof(STORAGE);
        from_b = rows(p.b, p.groups_b, p.share_b);
        from_c = rows(p.c, p.groups_c, p.share_c);
    }

    __device__ __forceinline__ i64 length() const { return PACKED ? packed_length : p.length; }
    // The first step of a chunk among those of all sequences.
    __device__ __forceinline__ i64 start_of(i64 chunk) const {
        return (PACKED ? packed_start : batch * p.length) + chunk * p.chunk;
    }
    // Whether the chunk is the sequence's last one, and whether a packed sequence has it.
    __device__ __forceinline__ bool is_last() const { return PACKED ? (j + 1) * p.chunk >= length() : j + 1 == p.chunks; }
    __device__ __forceinline__ bool is_there() const { return !PACKED || j == 0 || j * p.chunk < length(); }

    __device__ __forceinline__ Rows rows(const STORAGE* from, i64 groups, i64 share) {
        i64 group = groups > 1 ? channel / share : 0, stride = groups * p.state;
        return {from + start_of(j) * stride + group * p.state + p.first_state, stride};
    }

    __device__ __forceinline__ void load_constant(REAL (&to)[K], const STORAGE* from) {
#pragma unroll
        for (int k = 0; k < K; k++) to[k] = exists(lane, k) ? widen(from[channel * p.state + first + k]) : REAL(0);
    }

    __device__ __forceinline__ void load_direct(REAL (&to)[K], const Rows& from, int step, bool inside) {
        const STORAGE* row = from.row + step * from.stride + lane * K;
#pragma unroll
        for (int k = 0; k < K; k++) to[k] = inside && exists(lane, k) ? widen(row[k]) : REAL(0);
    }

    // The step and the state of the i-th element that this thread loads for a tile.
    __device__ __forceinline__ void element(int i, int& step, int& n) {
        constexpr int WIDTH = N > 0 ? N : 1;
        if (THREADS % WIDTH == 0) {
            step = threadIdx.x / WIDTH + i * (THREADS / WIDTH), n = threadIdx.x % WIDTH;
        } else {
            step = (threadIdx.x + i * THREADS) / WIDTH, n = (threadIdx.x + i * THREADS) % WIDTH;
        }
    }

    // `left` is the number of the tile's steps within the chunk; WHOLE says that all of them are.
    template <bool WHOLE>
    __device__ __forceinline__ void fetch_tile(STORAGE (&to)[FETCHED], const Rows& from, int left) {
        int step, n;
        element(0, step, n);
        const STORAGE* row = from.row + step * from.stride + n;
#pragma unroll
        for (int i = 0; i < FETCHES; i++) {
            element(i, step, n);
            if (THREADS % (N > 0 ? N : 1) != 0) row = from.row + step * from.stride + n;
            to[i] = {};
            bool needed = TILE_ELEMENTS % THREADS == 0 || step < STEPS;
            if (needed && (WHOLE || step < left)) to[i] = *row;
            row += (THREADS / (N > 0 ? N : 1)) * from.stride;
        }
    }

    // Writes the loaded elements to the shared tile; `offset` is 0 for B and K for C.
    __device__ __forceinline__ void spread_tile(int buffer, const STORAGE (&from)[FETCHED], int offset) {
#pragma unroll
        for (int i = 0; i < FETCHES; i++) {
            int step, n;
            element(i, step, n);
            bool needed = TILE_ELEMENTS % THREADS == 0 || step < STEPS;
            if (needed) ((REAL*)shared.tiles[buffer][step][n / K])[offset + n % K] = widen(from[i]);
        }
    }

    // Whether this thread owns a step in round s of a tile, and that step is one of the first `left`.
    template <bool WHOLE>
    __device__ __forceinline__ bool owns(int s, int left) {
        return (Q == P || lane < Q) && (WHOLE || s * Q + lane < left);
    }

    // Issues the loads of the next tile.
    template <bool WHOLE>
    __device__ __forceinline__ void fetch(int left) {
#pragma unroll
        for (int s = 0; s < S; s++) {
            next.x[s] = next.dt[s] = next.z[s] = {};
            if (!owns<WHOLE>(s, left)) continue;
            next.x[s] = behind(x, s * apart);
            next.dt[s] = behind(dt, s * apart);
            if (HAS_Z && !ENDS) next.z[s] = behind(z, s * apart);
        }
        if constexpr (TILE_B) fetch_tile<WHOLE>(next_b, from_b, left);
        if constexpr (TILE_C) fetch_tile<WHOLE>(next_c, from_c, left);
        x += STEPS * p.channels, dt += STEPS * p.channels, z += STEPS * p.channels;
        if (FORM_B == TILE) from_b.row += STEPS * from_b.stride;
        if (FORM_C == TILE) from_c.row += STEPS * from_c.stride;
    }

    // Sums `part[q]` over the P lanes of a channel, for Q steps at once: lane q ends with step q.
    __device__ __forceinline__ REAL sum_lanes(REAL (&part)[Q]) {
#pragma unroll
        for (int half = P / 2; half > 0; half /= 2) {
            if (Q == 1) part[0] += __shfl_xor_sync(0xffffffff, part[0], half);
            bool upper = lane & half;
#pragma unroll
            for (int i = 0; Q == P && i < half; i++) {
                REAL keep = upper ? part[i + half] : part[i];
                REAL send = upper ? part[i] : part[i + half];
                part[i] = keep + __shfl_xor_sync(0xffffffff, send, half);
            }
        }
        return part[0];
    }

    __device__ __forceinline__ void finish(REAL sum, STORAGE x, STORAGE z, int s) {
        if (SLABS) {
            REAL* partial = p.partial + tile + s * Q * p.channels;
            if (!p.first_slab) sum += *partial;
            *partial = sum;
            if (!p.last_slab) return;
        }
        if (HAS_D) sum = fma(skip, widen(x), sum);
        if (HAS_Z) sum *= silu(widen(z));
        narrow(sum, behind(y, s * apart));
    }

    // The state before chunk j: initial_state carried over the chunks before it.
    __device__ __forceinline__ void carry() {
        for (i64 i = 0; i < j; i++) {
            i64 flat = (i * p.batch + batch) * p.channels + channel;
            REAL passed = p.sums[flat], end[K];
            load_row(end, p.ends + flat * N + lane * K, lane, true);
#pragma unroll
            for (int k = 0; k < K; k++) h[k] = decayed(passed * a[k], h[k], end[k]);
        }
    }

    __device__ __forceinline__ void start() {
        i64 row = (batch * p.channels + channel) * p.state + first;
        load_row(a, p.a + channel * p.state + first, lane, wide);
#pragma unroll
        for (int k = 0; k < K; k++) h[k] = 0;
        if (p.initial_state && !ENDS) load_row(h, p.initial_state + row, lane, wide);
        bias = HAS_BIAS ? p.dt_bias[channel] : REAL(0), skip = HAS_D ? p.d[channel] : REAL(0);
        if (FORM_B == CONSTANT) load_constant(b_row, p.b);
        if (FORM_C == CONSTANT) load_constant(c_row, p.c);
#pragma unroll
        for (int k = 0; k < K; k++) a[k] *= REAL(LOG2_E);
        if (!ENDS && j > 0) carry();
        // Padding states are read from the tile but never written, so they are set to zero, as factors of zeros.
        if ((TILE_B || TILE_C) && K * P != N) {
            for (int i = threadIdx.x; i < sizeof(shared.tiles) / sizeof(REAL); i += THREADS) ((REAL*)shared.tiles)[i] = 0;
            __syncthreads();
        }
    }

    // Advances all states of this lane by one step; returns their part of y.
    __device__ __forceinline__ REAL advance(const Step& now, int buffer, int step, bool inside) {
        Unit units[UNITS];
        if constexpr (TILE_B || TILE_C) {
#pragma unroll
            for (int u = 0; u < UNITS; u++) units[u] = shared.tiles[buffer][step][lane][u];
        }
        if (FORM_B == DIRECT) load_direct(b_row, from_b, step, inside);
        if (FORM_C == DIRECT && !ENDS) load_direct(c_row, from_c, step, inside);
        REAL y = 0;
#pragma unroll
        for (int k = 0; k < K; k++) {
            REAL b = TILE_B ? units[k / UNIT].v[k % UNIT] : b_row[k];
            REAL input = exists(lane, k) ? now.input * b : REAL(0);
            h[k] = fma(exp2_fast(now.delta * a[k]), h[k], input);
            REAL c = TILE_C ? units[(K + k) / UNIT].v[(K + k) % UNIT] : c_row[k];
            if (!ENDS) y = fma(c, h[k], y);
        }
        return y;
    }

    // Processes the tile that was fetched before, `left` steps of it, and issues the loads of the next.
    template <bool WHOLE>
    __device__ __forceinline__ void do_tile(int buffer, int left, int next_left) {
        Owned own = next;
        Step prepared[S];
        int warp = threadIdx.x / 32, local = threadIdx.x % 32 / P;
        if (P > 1) __syncwarp();
#pragma unroll
        for (int s = 0; s < S; s++) {
            REAL delta = step_size(widen(own.dt[s]), bias, lo, hi);
            // A step past the end leaves the state as it is.
            bool inside = WHOLE || s * Q + lane < left;
            prepared[s].delta = inside ? delta : REAL(0);
            prepared[s].input = inside ? delta * widen(own.x[s]) : REAL(0);
            if (Q < P && lane >= Q) continue;
            if (ENDS) sum += prepared[s].delta;
            if (P > 1) shared.steps[warp][s * Q + lane][local] = prepared[s];
        }
        if constexpr (TILE_B) spread_tile(buffer, next_b, 0);
        if constexpr (TILE_C) spread_tile(buffer, next_c, K);
        // One barrier per tile is enough: the buffer written next was last read before this barrier.
        if (TILE_B || TILE_C) __syncthreads();
        else if (P > 1) __syncwarp();
        if (WHOLE || next_left > 0) fetch<WHOLE>(next_left);

#pragma unroll
        for (int s = 0; s < S; s++) {
            REAL part[Q];
#pragma unroll
            for (int q = 0; q < Q; q++) {
                int step = s * Q + q;
                Step now = P > 1 ? shared.steps[warp][step][local] : prepared[s];
                part[q] = advance(now, buffer, step, WHOLE || step < left);
                if (STATES && !ENDS && alive && (WHOLE || step < left)) {
                    i64 flat = tile + (step - lane) * p.channels;
                    store_row(p.states + flat * p.state + first, h, lane, wide);
                }
            }
            if (ENDS) continue;
            REAL sum = sum_lanes(part);
            if (alive && owns<WHOLE>(s, left)) finish(sum, own.x[s], own.z[s], s);
        }
        y += STEPS * p.channels, tile += STEPS * p.channels;
        if (FORM_B == DIRECT) from_b.row += STEPS * from_b.stride;
        if (FORM_C == DIRECT) from_c.row += STEPS * from_c.stride;
    }

    __device__ __forceinline__ void end() {
        if (ENDS) {
            i64 flat = (j * p.batch + batch) * p.channels + channel;
#pragma unroll
            for (int half = P / 2; half > 0; half /= 2) sum += __shfl_xor_sync(0xffffffff, sum, half);
            if (alive) store_row(p.ends + flat * N + lane * K, h, lane, true);
            if (alive && lane == 0) p.sums[flat] = sum;
        } else if (p.last_state && is_last() && alive) {
            store_row(p.last_state + (batch * p.channels + channel) * p.state + first, h, lane, wide);
        }
    }
};

__device__ __forceinline__ int at_most_a_tile(i64 left) {
    return left < 0 ? 0 : left < STEPS ? (int)left : STEPS;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN) selective_scan_forward(const __grid_constant__ Params p) {
    __shared__ Shared shared;
    Scan scan(p, shared);
    // A last chunk's end state is needed by none.
    if (scan.batch >= p.batch || !scan.is_there() || (PACKED && ENDS && scan.is_last())) return;
    i64 left = scan.is_last() ? scan.length() - scan.j * p.chunk : p.chunk;
    scan.fetch<false>(at_most_a_tile(left));
    scan.start();
    int buffer = 0;
    // A whole tile that is followed by a whole tile needs no masks.
    for (; left >= 2 * STEPS; left -= STEPS, buffer ^= 1) scan.do_tile<true>(buffer, STEPS, STEPS);
    for (; left > 0; left -= STEPS, buffer ^= 1)
        scan.do_tile<false>(buffer, at_most_a_tile(left), at_most_a_tile(left - STEPS));
    scan.end();
}
