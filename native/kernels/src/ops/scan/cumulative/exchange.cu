// Exchange between the threads of a block and the blocks of a cluster.

constexpr int WORDS = sizeof(Total) / 4;

// Shared memory of a round's exchange: the totals of the warps, which their prefixes replace, the prefix before the
// block's tile, the totals of the cluster's blocks, and the barrier that counts their arrival.
struct Exchange {
    alignas(32) unsigned warps[WORDS][WARPS][CHANNELS];
    alignas(32) unsigned before[WORDS][CHANNELS];
    unsigned blocks[WORDS][MOST_BLOCKS][CHANNELS];
    u64 barrier;
};

#if SCAN == PRODUCT
__device__ __noinline__ void append_odd(Total (&sum)[VEC], const Total (&later)[VEC]) {
    for (int v = 0; v < VEC; ++v) sum[v] = then(sum[v], later[v]);
}
#endif

// Composes an earlier total with a later one, in each channel. Products skip the check for 0 times infinity; if this
// gives NaN in any channel, which is rare, all are composed again with it.
__device__ __forceinline__ void append(Total (&sum)[VEC], const Total (&later)[VEC]) {
#if SCAN == PRODUCT
    bool odd = false;
    Total all[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        all[v] = swift(sum[v], later[v]);
        odd |= is_odd(all[v]);
    }
    if (odd) {
        Total a[VEC], b[VEC];
#pragma unroll
        for (int v = 0; v < VEC; ++v) a[v] = sum[v], b[v] = later[v];
        append_odd(a, b);
#pragma unroll
        for (int v = 0; v < VEC; ++v) all[v] = a[v];
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] = all[v];
#else
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] = then(sum[v], later[v]);
#endif
}

constexpr int PACKED = VEC < 4 ? VEC : 4;
struct alignas(PACKED * 4) Pack { unsigned of[PACKED]; };

// Stores the totals of neighbouring channels. The words of a total are `apart` elements apart.
__device__ __forceinline__ void put(const Total (&totals)[VEC], unsigned* to, int apart) {
    unsigned words[VEC][WORDS];
    memcpy(words, totals, sizeof(words));
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
        for (int first = 0; first < VEC; first += PACKED) {
            Pack pack;
#pragma unroll
            for (int v = 0; v < PACKED; ++v) pack.of[v] = words[first + v][w];
            *(Pack*)(to + w * apart + first) = pack;
        }
}

__device__ __forceinline__ void get(const unsigned* from, int apart, Total (&totals)[VEC]) {
    unsigned words[VEC][WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
        for (int first = 0; first < VEC; first += PACKED) {
            Pack pack = *(const Pack*)(from + w * apart + first);
#pragma unroll
            for (int v = 0; v < PACKED; ++v) words[first + v][w] = pack.of[v];
        }
    memcpy(totals, words, sizeof(words));
}

// Stores the total of a single channel.
__device__ __forceinline__ void put(Total total, unsigned* to, int apart) {
    unsigned words[WORDS];
    memcpy(words, &total, sizeof(words));
#pragma unroll
    for (int w = 0; w < WORDS; ++w) to[w * apart] = words[w];
}

__device__ __forceinline__ Total get(const unsigned* from, int apart) {
    unsigned words[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) words[w] = from[w * apart];
    Total total;
    memcpy(&total, words, sizeof(words));
    return total;
}

// Replaces each warp's total by the prefix before it, in the thread's channel, and returns the total of the tile.
__device__ __forceinline__ Total over_warps(Exchange& shared) {
    Total sum = identity(), all[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; ++i) all[i] = get(&shared.warps[0][i][threadIdx.x], WARPS * CHANNELS);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        put(sum, &shared.warps[0][i][threadIdx.x], WARPS * CHANNELS);
        sum = then(sum, all[i]);
    }
    return sum;
}

// The total of lane `from`.
__device__ __forceinline__ Total of_lane(Total own, int from) {
    unsigned words[WORDS];
    memcpy(words, &own, sizeof(words));
#pragma unroll
    for (int w = 0; w < WORDS; ++w) words[w] = __shfl_sync(~0u, words[w], from & 31);
    memcpy(&own, words, sizeof(words));
    return own;
}

#if CLUSTERED
__device__ __forceinline__ int own_rank() { return rank_in_cluster(); }

__device__ __forceinline__ void begin(Exchange (&exchange)[2]) {
    if (threadIdx.x < 2) {
        unsigned barrier = address(&exchange[threadIdx.x].barrier);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    }
    meet_in_cluster();
}

// Sends the total of this block's tile, in the thread's channel, to all blocks of the cluster.
__device__ __forceinline__ void tell(const Params& p, Exchange& shared, Total tile) {
    unsigned barrier = address(&shared.barrier), bytes = WORDS * CHANNELS * 4 * (unsigned)p.cluster;
    unsigned own = address(&shared.blocks[0][own_rank()][threadIdx.x]), words[WORDS];
    memcpy(words, &tile, sizeof(words));
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    for (int rank = 0; rank < p.cluster; ++rank) {
        unsigned there = in_block(own, rank), its_barrier = in_block(barrier, rank);
#pragma unroll
        for (int w = 0; w < WORDS; ++w)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                         ::"r"(there + w * MOST_BLOCKS * CHANNELS * 4), "r"(words[w]), "r"(its_barrier) : "memory");
    }
}

// Waits for the totals of all blocks of the cluster in this round.
__device__ __forceinline__ void listen(const Exchange& shared, i64 round) {
    unsigned told, parity = round / 2 % 2;
    do
        asm volatile("{ .reg .pred told; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 told, [%1], %2; "
                     "selp.u32 %0, 1, 0, told; }"
                     : "=r"(told) : "r"(address(&shared.barrier)), "r"(parity) : "memory");
    while (!told);
}

// Returns the prefix before the block's tile, and advances `carry` to the prefix before the next round.
__device__ __forceinline__ Total over_blocks(const Params& p, Exchange& shared, i64 round, Total tile, Total& carry) {
    tell(p, shared, tile);
    listen(shared, round);
    Total all[MOST_BLOCKS], before = carry;
#pragma unroll
    for (int i = 0; i < MOST_BLOCKS; ++i)
        if (i < p.cluster) all[i] = get(&shared.blocks[0][i][threadIdx.x], MOST_BLOCKS * CHANNELS);
#pragma unroll
    for (int i = 0; i < MOST_BLOCKS; ++i) {
        if (i == own_rank()) before = carry;
        if (i < p.cluster) carry = then(carry, all[i]);
    }
    return before;
}
#else
__device__ __forceinline__ int own_rank() { return 0; }
__device__ __forceinline__ void begin(Exchange (&)[2]) {}
__device__ __forceinline__ Total over_blocks(const Params&, Exchange&, i64, Total tile, Total& carry) {
    Total before = carry;
    carry = then(carry, tile);
    return before;
}
#endif

// The prefix before a thread's steps, from `own`, its prefix within the warp. One thread per channel computes the
// prefixes of the warps and the tile, and keeps in `carry` the prefix before the next round.
__device__ __forceinline__ void exchange_totals(const Params& p, Exchange& shared, i64 round, Total& carry,
                                                const Total (&own)[VEC], Total (&before)[VEC]) {
    __syncthreads();
    if (threadIdx.x < CHANNELS)
        put(over_blocks(p, shared, round, over_warps(shared), carry), &shared.before[0][threadIdx.x], CHANNELS);
    __syncthreads();
    Total warps[VEC];
    int channel = threadIdx.x % COLS * VEC;
    get(&shared.before[0][channel], CHANNELS, before);
    get(&shared.warps[0][threadIdx.x / 32][channel], WARPS * CHANNELS, warps);
    append(before, warps);
    append(before, own);
}
