// The gradients of a step: of a group's q and k, and with DELTA of its heads' v and beta. A warp for each group and step.
//   EACH             keys of a lane, rounded up
//   VALUES           whether it computes all other gradients, too: with DELTA those of v and beta, and dk has two parts
// With VALUES and GATE it also writes p.changes: dg[t] - dg[t+1] = y . dy - dv . v with DELTA, or else q * dq - k * dk
// with the dq and dk of a head, for each key with BY_KEY and summed over keys without.

__device__ __forceinline__ REAL warp_sum(REAL sum) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

// The key of a lane's n-th element.
__device__ __forceinline__ int key_of(int n) { return threadIdx.x % 32 + 32 * n; }

// Adds p.sums[kind] of a step of a head, over all slices.
__device__ __forceinline__ void add(REAL (&to)[EACH], const Params& p, int kind, i64 step) {
    i64 slice = (i64)p.batch * p.length * p.heads * p.keys;
#pragma unroll
    for (int n = 0; n < EACH; n++)
        if (key_of(n) < p.keys)
            for (int i = 0; i < p.slices; i++) to[n] += p.sums[kind][i * slice + step * p.keys + key_of(n)];
}

__device__ __forceinline__ REAL dot(const REAL (&a)[EACH], const REAL (&b)[EACH]) {
    REAL sum = 0;
#pragma unroll
    for (int n = 0; n < EACH; n++) sum = fma(a[n], b[n], sum);
    return warp_sum(sum);
}

// Loads q or k, with NORM divided by its norm; returns the inverse of the norm, or 1.
__device__ __forceinline__ REAL load(REAL (&to)[EACH], const STORAGE* from, int keys) {
#pragma unroll
    for (int n = 0; n < EACH; n++) to[n] = key_of(n) < keys ? widen(from[key_of(n)]) : (REAL)0;
    REAL factor = NORM ? rsqrt(dot(to, to) + (REAL)EPS) : (REAL)1;
#pragma unroll
    for (int n = 0; n < EACH; n++) to[n] *= factor;
    return factor;
}

// Writes dq or dk. `sums` is the gradient of `unit`, which with NORM is the normalized input, `x * factor`.
__device__ __forceinline__ void write(STORAGE* to, const REAL (&sums)[EACH], const REAL (&unit)[EACH], REAL factor,
                                      int keys) {
    REAL along = NORM ? dot(sums, unit) : (REAL)0;
#pragma unroll
    for (int n = 0; n < EACH; n++)
        if (key_of(n) < keys) narrow(NORM ? factor * (sums[n] - unit[n] * along) : sums[n], to[key_of(n)]);
}

#if DELTA
// Writes dv and dbeta of a step of a head; returns dv . v.
__device__ __forceinline__ REAL write_values(const Params& p, i64 step) {
    REAL beta = widen(p.beta[step]), dbeta = 0, with_v = 0;
    for (int column = threadIdx.x % 32; column < p.values; column += 32) {
        i64 place = step * p.values + column;
        REAL de = p.derrors[place], dv = beta * de;
        dbeta = fma(de, p.errors[place], dbeta);
        with_v = fma(dv, widen(p.v[place]), with_v);
        narrow(dv, p.dv[place]);
    }
    dbeta = warp_sum(dbeta);
    if (threadIdx.x % 32 == 0) narrow(dbeta, p.dbeta[step]);
    return warp_sum(with_v);
}
#else
// Writes p.changes of a step of a head.
__device__ __forceinline__ void write_changes(const Params& p, i64 step, const REAL (&dq)[EACH], const REAL (&q)[EACH],
                                              const REAL (&dk)[EACH], const REAL (&k)[EACH]) {
    if (BY_KEY) {
#pragma unroll
        for (int n = 0; n < EACH; n++)
            if (key_of(n) < p.keys) p.changes[step * p.keys + key_of(n)] = dq[n] * q[n] - dk[n] * k[n];
        return;
    }
    REAL change = dot(dq, q) - dot(dk, k);
    if (threadIdx.x % 32 == 0) p.changes[step] = change;
}
#endif

extern "C" __global__ void matrix_state_finish(Params p) {
    i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= (i64)p.batch * p.length * p.groups) return;
    int heads = p.heads / p.groups;
    i64 first = row / p.groups * p.heads + row % p.groups * heads;
    REAL q[EACH], k[EACH], dq[EACH] = {}, dk[EACH] = {};
    REAL q_factor = load(q, p.q + row * p.keys, p.keys), k_factor = load(k, p.k + row * p.keys, p.keys);
    for (int i = 0; i < heads; i++) {
        REAL own[EACH] = {};
        add(own, p, 0, first + i);
#pragma unroll
        for (int n = 0; n < EACH; n++) own[n] *= (REAL)p.scale, dq[n] += own[n];
#if DELTA
        add(dk, p, 1, first + i);
        if (!VALUES) continue;
        add(dk, p, 2, first + i);
        REAL with_v = write_values(p, first + i), with_dy = GATE ? dot(own, q) : (REAL)0;
        if (GATE && threadIdx.x % 32 == 0) p.changes[first + i] = with_dy - with_v;
#else
        REAL own_dk[EACH] = {};
        add(own_dk, p, 2, first + i);
#pragma unroll
        for (int n = 0; n < EACH; n++) dk[n] += own_dk[n];
        if (VALUES && GATE) write_changes(p, first + i, own, q, own_dk, k);
#endif
    }
    write(p.dq + row * p.keys, dq, q, q_factor, p.keys);
    write(p.dk + row * p.keys, dk, k, k_factor, p.keys);
}
