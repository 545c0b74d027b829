// The gradients of attention of 16-bit storage without mask and bias on tensor cores, after common.cu,
// mma.cu and gradients.cu.

constexpr int STAGE = OTHER * (LEADING + VALUE_LEADING);

__device__ __forceinline__ void bring(STORAGE* to, float* facts, const Params& p, const Work& work, int head, int first) {
    Sides from = work.others(p, head);
    fetch<OTHER, WIDTH, LEADING, THREADS>(to, from.side, first, 0);
    fetch<OTHER, VALUE_WIDTH, VALUE_LEADING, THREADS>(to + OTHER * LEADING, from.value, first, 0);
    bring_facts(facts, p, work.batch, head, first);
    end_group();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN) attention_mma_backward(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    STORAGE* own_side = (STORAGE*)memory;
    STORAGE* own_value = own_side + OWN * LEADING;
    STORAGE* stages = own_value + OWN * VALUE_LEADING;
    float* all_facts = (float*)(stages + 2 * STAGE);

    Work work(p, blockIdx.x);
    if (work.items) {
        Sides own = work.own(p);
        fetch<OWN, WIDTH, LEADING, THREADS>(own_side, own.side, work.row, 0);
        if (WITH_DS) fetch<OWN, VALUE_WIDTH, VALUE_LEADING, THREADS>(own_value, own.value, work.row, 0);
        bring(stages, all_facts, p, work, work.head, work.begin);
    }
    int warp_row = threadIdx.x / 32 * 16 * TILES, row = work.row + warp_row;
    unsigned left = left_at<LEADING>(own_side + warp_row * LEADING);
    unsigned left_value = left_at<VALUE_LEADING>(own_value + warp_row * VALUE_LEADING);
    Facts own;
    own_facts(own, p, work, row);

    Sums side_sums[TILES][WIDTH / 8], value_sums[TILES][VALUE_WIDTH / 8];
    if (WITH_DS) clear(side_sums);
    if (WITH_DV) clear(value_sums);
    int head = work.head, first = work.begin;
#pragma unroll 1
    for (int item = 0; item < work.items; ++item) {
        wait_groups<0>();
        __syncthreads();
        STORAGE *here = stages + item % 2 * STAGE, *here_value = here + OTHER * LEADING;
        const float* facts = all_facts + item % 2 * 2 * OTHER;
        int next = first + OTHER, next_head = head, other = (item + 1) % 2;
        if (next >= work.end) next_head++, next = work.begin;
        if (item + 1 < work.items) bring(stages + other * STAGE, all_facts + other * 2 * OTHER, p, work, next_head, next);

        Sums s[TILES][OTHER / 8];
        Left x[TILES][OTHER / 16];
        clear(s);
        add_products<OTHER, WIDTH, LEADING>(s, left, right_at<LEADING>(here));
        weigh(s, own, facts, p, row, first);
        if (WITH_DV) {
            round<OTHER>(x, s);
            add_weighted<VALUE_WIDTH, OTHER, VALUE_LEADING>(value_sums, x, turned_at<VALUE_LEADING>(here_value));
        }
        if (WITH_DS) {
            Sums dp[TILES][OTHER / 8];
            clear(dp);
            add_products<OTHER, VALUE_WIDTH, VALUE_LEADING>(dp, left_value, right_at<VALUE_LEADING>(here_value));
            slope(s, dp, own, facts);
            round<OTHER>(x, s);
            add_weighted<WIDTH, OTHER, LEADING>(side_sums, x, turned_at<LEADING>(here));
        }
        head = next_head, first = next;
    }
    finish(p, work, row, side_sums, value_sums);
}
