// The results of a block for its rows: for each the maximum, the sum of weights and the weighted sums. With JOINED the
// parts of a head's keys are those of the blocks of a cluster, or of a single block: each keeps its results in shared memory
// and joins them with those of the others. Else a second kernel joins all parts from p.delta.

__device__ __forceinline__ int apart(const Params& p) { return p.value_width + 2; }

// Where a block writes its result for row `i` of its own, number `row` of all.
__device__ __forceinline__ REAL* result(const Params& p, REAL* kept, int i, i64 row, int part) {
    return JOINED ? kept + i * apart(p) : p.delta + (row * p.parts + part) * apart(p);
}

#if JOINED
constexpr int MOST = 8; // blocks of a cluster

#if __CUDA_ARCH__ >= 900
template <class T>
__device__ __forceinline__ T of_part(const T* kept, int part) {
    // f64 has no clusters.
    if constexpr (sizeof(T) == 4) return of_block(kept, part);
    else return *kept;
}
__device__ __forceinline__ void meet() { meet_in_cluster(); }
#else
__device__ __forceinline__ REAL of_part(const REAL* kept, int) { return *kept; }
__device__ __forceinline__ void meet() { __syncthreads(); }
#endif

// Joins the results of all parts for a row, and writes them.
__device__ __forceinline__ void join_row(const Params& p, const REAL* kept, int batch, int head, int query) {
    REAL top = hidden(), total = 0, weights[MOST];
#pragma unroll
    for (int part = 0; part < MOST; ++part) {
        weights[part] = part < p.parts ? of_part(kept, part) : hidden();
        top = largest(weights[part], top);
    }
    REAL by = top == hidden() ? (REAL)0 : top;
#pragma unroll
    for (int part = 0; part < MOST; ++part) {
        weights[part] = exp2_fast((weights[part] - by) * (REAL)LOG2_E);
        if (part < p.parts) total = fma(weights[part], of_part(kept + 1, part), total);
    }
    STORAGE* to = p.to + start(p.y_at, batch, head) + query * p.y_at.row;
    for (int c = threadIdx.x; c < p.value_width; c += blockDim.x) {
        REAL sum = 0;
#pragma unroll
        for (int part = 0; part < MOST; ++part)
            if (part < p.parts) sum = fma(weights[part], of_part(kept + 2 + c, part), sum);
        narrow(total == 0 ? (REAL)0 : sum / total, to[c]);
    }
    if (threadIdx.x == 0) p.to_lse[((i64)batch * p.heads + head) * p.queries + query] = total == 0 ? hidden() : top + log(total);
}

// Joins all rows, which the blocks of the cluster divide. Their results stay until all blocks have read them.
template <class Join>
__device__ __forceinline__ void join_rows(int count, int part, int parts, Join join) {
    meet();
    for (int i = part; i < count; i += parts) join(i);
    meet();
}
#endif
