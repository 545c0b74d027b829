// The gradient of a norm. A slot of THREADS threads processes rows and accumulates its columns' sums for dw and db in
// registers (in its row of p.dw and p.db if PACKS is 0); norm_sums adds up those of all slots. The sums leave few
// registers, so rows go through shared memory: STAGES of them at a time, including the one being processed.

extern __shared__ __align__(16) unsigned char shared[];

// Where this thread keeps a pack of x (tensor 0) or dy (tensor 1); only this thread reads it.
__device__ __forceinline__ Pack* kept(int stage, int tensor, int k) {
    return (Pack*)shared + ((stage * 2 + tensor) * PACKS + k) * (THREADS * ROWS) + threadIdx.x;
}

// Queues the copy of a pack, or of zeros. Small packs, and devices before compute capability 8, have synchronous
// copies.
__device__ __forceinline__ void copy(Pack* to, const Pack* from, bool there) {
#if __CUDA_ARCH__ >= 800
    constexpr int BYTES = sizeof(Pack) < 4 ? 4 : sizeof(Pack);
    unsigned at = address(to);
    if (sizeof(Pack) == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(there ? 16 : 0) : "memory");
    else if (sizeof(Pack) >= 4)
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(BYTES),
                     "r"(there ? BYTES : 0) : "memory");
    else
#endif
        *to = there ? *from : Pack{};
}

// A row of x or dy; zeros past its end and past the last row.
template <int TENSOR>
struct Row {
    const STORAGE* from;
    bool there;
    int stage;

    __device__ __forceinline__ Row(const Params& p, i64 row, int stage) : stage(stage) {
        there = row < p.rows;
        from = (TENSOR == 0 ? p.x : p.dy) + row * p.columns;
    }
    __device__ __forceinline__ void queue(const Params& p) const {
        if (PACKS)
            EACH_PACK copy(kept(stage, TENSOR, k), (const Pack*)(from + column(k)), there && inside(p, k));
    }
    __device__ __forceinline__ void values(const Params& p, int k, REAL (&to)[VEC]) const {
        Pack pack = {};
        if (PACKS)
            pack = *kept(stage, TENSOR, k);
        else if (there && inside(p, k))
            pack = *(const Pack*)(from + column(k));
        widen(pack, to);
    }
};

__device__ __forceinline__ void queue_both(const Params& p, i64 row, int stage) {
    Row<0>(p, row, stage).queue(p);
    Row<1>(p, row, stage).queue(p);
    commit();
}

// A row in registers.
struct Taken {
    REAL of[HELD][VEC];

    __device__ __forceinline__ Taken(const Params& p, const Row<0>& x) {
        EACH_PACK x.values(p, k, of[AT]);
    }
    __device__ __forceinline__ void values(const Params&, int k, REAL (&to)[VEC]) const {
        EACH_ELEMENT to[e] = of[AT][e];
    }
};

// u is held in registers if there are enough, or if it is expensive to compute again.
constexpr bool HOLD_U = PACKS && (HOLD || FN != Activation::None);
#define U_AT (HOLD_U ? AT : 0)

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, RESIDENT) norm_backward(Params p) {
    Weights of(p);
    i64 step = (i64)gridDim.x * ROWS, own = (i64)blockIdx.x * ROWS + slot(), at = own;
    REAL* dw_sums = p.dw + own * p.columns;
    REAL* db_sums = HAS_B ? p.db + own * p.columns : nullptr;
    REAL dw[HELD][VEC] = {}, db[HELD][VEC] = {};
#pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) queue_both(p, own + ahead * step, ahead);
    int set = 0, stage = 0;
    for (i64 first = (i64)blockIdx.x * ROWS; first < p.rows; first += step, at += step, set ^= 1) {
        queue_both(p, at + (STAGES - 1) * step, stage ? stage - 1 : STAGES - 1);
        copied<STAGES - 1>();
#if HOLD
        Taken x(p, Row<0>(p, at, stage));
#else
        Row<0> x(p, at, stage);
#endif
        Row<1> dy(p, at, stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        Statistics s = statistics(p, x, set);
        REAL u_parts[PARTS] = {}, along_parts[PARTS] = {}, u[HOLD_U ? HELD : 1][VEC];
        EACH_PACK {
            REAL v[VEC], dz[VEC];
            x.values(p, k, v);
            dy.values(p, k, dz);
            of.again(p, k);
#if PACKS == 0
            // Only this thread writes these columns of its row of sums, which must be initialised before the first row.
            EACH_ELEMENT dw[0][e] = db[0][e] = 0;
            if (at != own) {
                read(p, dw_sums, k, dw[0]);
                if (HAS_B) read(p, db_sums, k, db[0]);
            }
#endif
            EACH_ELEMENT {
                REAL unit = s.deviation(p, v[e]) * s.scaled_r;
                dz[e] *= slope<FN>(of.w[WEIGHTS_AT][e] * unit + of.b[WEIGHTS_AT][e]);
                REAL& own_u = u[U_AT][e];
                own_u = dz[e] * of.w[WEIGHTS_AT][e];
                u_parts[e % PARTS] += own_u;
                along_parts[e % PARTS] += own_u * unit;
                // Past the last row dz is 0, but 0 times an infinite unit would be NaN.
                dw[AT][e] += ROWS == 1 || dy.there ? dz[e] * unit : 0;
                db[AT][e] += dz[e];
            }
#if PACKS == 0
            write(p, dw[0], dw_sums, k);
            if (HAS_B) write(p, db[0], db_sums, k);
#endif
        }
        REAL sums[2] = {total(u_parts), total(along_parts)};
        row_sums<2>(sums, set);
        // dx = r u - r t v mean(u x^) - r mean(u). For a centered row of one element the exact result is 0, so r = 0
        // avoids rounding errors.
        REAL r = CENTERED && p.columns == 1 ? 0 : s.r;
        REAL along = -r * s.scaled_t * (sums[1] * p.inverse_count), mean = -r * (sums[0] * p.inverse_count);
        EACH_PACK {
            REAL v[VEC], dx[VEC];
            x.values(p, k, v);
            if (!HOLD_U) {
                dy.values(p, k, dx);
                of.again(p, k);
            }
            EACH_ELEMENT {
                v[e] = s.deviation(p, v[e]);
                if (!HOLD_U) {
                    REAL w = of.w[WEIGHTS_AT][e], z = w * (v[e] * s.scaled_r) + of.b[WEIGHTS_AT][e];
                    u[0][e] = dx[e] * slope<FN>(z) * w;
                }
                dx[e] = fma(u[U_AT][e], r, fma(v[e], along, CENTERED ? mean : 0));
            }
            write(p, dx, p.to, at, k);
        }
    }
#if PACKS
    EACH_PACK {
        write(p, dw[AT], dw_sums, k);
        if (HAS_B) write(p, db[AT], db_sums, k);
    }
#endif
}
