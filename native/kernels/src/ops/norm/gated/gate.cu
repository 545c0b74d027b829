// The gated norm and its gradient, after the common text of norms, whose rows are the parts of rows here. Blocks visit
// parts at a stride that is a multiple of the groups, so a slot of threads always has the same group, whose weights it
// holds and whose sums for dw it accumulates. The host gives NORM_FIRST, whether the norm comes before the gate, and
// the number of SILU among functions.

// The first part that this slot of threads processes. Also moves `p.w` to the weights of its group.
__device__ __forceinline__ i64 first_row(Params& p) {
    i64 own = (i64)blockIdx.x * ROWS + slot();
    p.w += own % p.groups * p.columns;
    return own;
}

// u, the input of the normalisation: with HOLD all of it, otherwise recomputed for each pack.
struct Inner {
    const Row& x;
    const Row& z;
    REAL held[HOLD ? HELD : 1][VEC];

    __device__ __forceinline__ Inner(const Params& p, const Row& x, const Row& z) : x(x), z(z) {
        if (HOLD)
            EACH_PACK compute(p, k, held[WEIGHTS_AT]);
    }
    __device__ __forceinline__ void compute(const Params& p, int k, REAL (&to)[VEC]) const {
        x.values(p, k, to);
        if (NORM_FIRST) return;
        REAL gate[VEC];
        z.values(p, k, gate);
        EACH_ELEMENT to[e] *= activate<SILU>(gate[e]);
    }
    __device__ __forceinline__ void values(const Params& p, int k, REAL (&to)[VEC]) const {
        if (HOLD) {
            EACH_ELEMENT to[e] = held[WEIGHTS_AT][e];
        } else
            compute(p, k, to);
    }
    // u^ of a pack.
    __device__ __forceinline__ void units(const Params& p, const Statistics& s, int k, REAL (&to)[VEC]) const {
        values(p, k, to);
        EACH_ELEMENT to[e] = s.deviation(p, to[e]) * s.scaled_r;
    }
};
